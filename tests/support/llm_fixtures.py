"""Engines under test, adapters made by PEFT, and what PEFT answers alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.support.peft_saving import save_with_peft
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model, greedy_tokens

from pagedlora.config import KvCacheConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.engine.llm import LLM
from pagedlora.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "r1": (1, ["q_proj", "v_proj"], False),
    "r3": (3, ATTENTION, False),
    "r12": (12, "all-linear", True),
    "r33": (33, ["down_proj", "v_proj"], False),
    "r64": (64, "all-linear", False),
    "r8": (8, ["gate_proj", "o_proj"], True),
}
"""Name to rank, target modules and whether rank-stabilised."""

SMALL_CACHE = PeftCacheConfig(host_cache_size=2**24, device_cache_size=2**23)
"""Enough for tiny models: tiers are touched when they are made, and the default has gigabytes."""

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


def save_adapter(
    directory: Path, family: str, rank: int, targets: Any, *, rslora: bool = False, seed: int = 0
) -> Path:
    """Saves a PEFT adapter of the family's tiny model with a B that is not zero."""
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if not rslora else 4,
        target_modules=targets,
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(build_tiny_model(family), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape) * (1.2 / rank) ** 0.5 * 0.4)
        save_with_peft(model, directory)
    return directory


def save_all_adapters(root: Path, family: str) -> dict[str, Path]:
    """Saves `ADAPTERS` for a family; name to directory."""
    return {
        name: save_adapter(root / name, family, rank, targets, rslora=rslora, seed=seed)
        for seed, (name, (rank, targets, rslora)) in enumerate(ADAPTERS.items())
    }


def adapter_bytes(directory: Path) -> int:
    """Bytes of the adapter's tensors."""
    return (directory / "adapter_model.safetensors").stat().st_size


def peft_answers(
    family: str, directory: Path | None, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """What PEFT answers alone with the adapter, greedily."""
    model: Any = build_tiny_model(family)
    if directory is not None:
        model = peft.PeftModel.from_pretrained(model, directory).eval()
    return [greedy_tokens(model, prompt, num_tokens) for prompt in prompts]


def make_prompts(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(1, 30))]
        for _ in range(count)
    ]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """The answers' tokens; none of the requests failed."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="session")
def llama_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of `ADAPTERS` for llama."""
    return save_all_adapters(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def engines() -> Iterator[list[LLM]]:
    """Engines to be checked and closed after the test, whether or not the test asks."""
    made: list[LLM] = []
    yield made
    for llm in made:
        llm._parts.core.check_invariants()
        llm.peft_cache_manager.check_invariants()
        assert not llm.peft_cache_manager.active_tasks
        llm.close()


@pytest.fixture
def llm(llama_adapters: dict[str, Path], engines: list[LLM]) -> LLM:
    """A small llama with all adapters registered and room for them."""
    engine = LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size="4MB", host_cache_size="16MB"),
        kv_cache_config=KvCacheConfig(num_blocks=40, block_size=4),
        scheduler_config=SchedulerConfig(max_batch_size=4, max_num_tokens=16),
    )
    engines.append(engine)
    for name, path in llama_adapters.items():
        engine.load_lora(name, path)
    return engine
