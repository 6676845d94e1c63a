"""Building, closing and refusing: models from modules and directories, sizes, tokenizers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import llm_fixtures
from tests.support.llm_fixtures import GREEDY, SMALL_CACHE, tokens_of
from tests.support.tiny_models import build_tiny_model

from pagedlora import LoraManager, LoraModelConfig, PeftCacheManager, attach
from pagedlora.config import KvCacheConfig, LoraConfig, PeftCacheConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import (
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from pagedlora.requests import LlmRequest
from pagedlora.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings(
    # transformers warns when PEFT 0.21 asks a model whether it checkpoints gradients.
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)
llama_adapters = llm_fixtures.llama_adapters
engines = llm_fixtures.engines


def test_a_live_module_is_given_back_unchanged() -> None:
    model = build_tiny_model("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with LLM(model, peft_cache_config=SMALL_CACHE) as engine:
        tokens_of(engine.generate([1, 2, 3], GREEDY))
    engine.close()
    assert model.training
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.generate([1], GREEDY)


def test_a_live_module_is_given_back_when_its_engine_is_dropped() -> None:
    model = build_tiny_model("llama")
    ids = torch.tensor([[3, 1, 4]])
    before = model(ids).logits
    llm = LLM(model, peft_cache_config=SMALL_CACHE)
    assert len(llm.generate([[1]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2
    del llm
    gc.collect()
    assert torch.equal(model(ids).logits, before)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_attached_module_is_refused() -> None:
    """Hooks of both would act in one forward."""
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model)
    cache = PeftCacheManager(config, SMALL_CACHE)
    attached = attach(model, cache, LoraManager(config, cache))
    with pytest.raises(InvalidArgumentError, match=r"is attached: detach\(\) it"):
        LLM(model)
    attached.detach()
    LLM(model, peft_cache_config=SMALL_CACHE).close()
    cache.close()


def test_a_model_from_a_directory_with_its_dtype(tmp_path: Path) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path)
    with (
        LLM(tmp_path, peft_cache_config=SMALL_CACHE) as from_path,
        LLM(build_tiny_model("llama")) as live,
    ):
        assert tokens_of(from_path.generate([1, 2], GREEDY)) == tokens_of(
            live.generate([1, 2], GREEDY)
        )
    with LLM(str(tmp_path), dtype="bfloat16", peft_cache_config=SMALL_CACHE) as engine:
        assert engine._parts.loaded.dtype == torch.bfloat16
        tokens_of(engine.generate([1, 2], GREEDY))


def test_texts_go_in_and_out_with_a_tokenizer() -> None:
    class Tokenizer:
        eos_token_id = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            text.encode()  # as those do that are not written in Python
            return {"input_ids": [ord(c) - ord("a") for c in text]}

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return "".join(chr(ord("a") + token) for token in token_ids)

    with LLM(build_tiny_model("llama"), Tokenizer(), peft_cache_config=SMALL_CACHE) as engine:
        (output,) = engine.generate("cab", GREEDY)
        tokens = output.outputs[0].token_ids
        assert output.prompt_token_ids == [2, 0, 1]
        assert output.outputs[0].text == "".join(chr(ord("a") + token) for token in tokens)
        stop = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[tokens[3]])
        (stopped,) = engine.generate("cab", stop)
        cut = tokens.index(tokens[3])
        assert stopped.outputs[0].text == output.outputs[0].text[:cut]
        right, wrong = engine.generate(["cab", "a\udc80"], GREEDY)
        assert right.outputs[0].text == output.outputs[0].text
        assert isinstance(wrong.error, InvalidArgumentError)
        assert "tokenizer cannot read the prompt 'a\\udc80'" in str(wrong.error)
        assert isinstance(engine.generate_async("\udc80", GREEDY).result(60).error, ValueError)
        with pytest.raises(InvalidArgumentError, match="sampling_params"):
            engine.generate_async("cab", {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "mps"}, "mps"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "bfloat16"}, "convert it yourself"),
        (
            {
                "lora_config": LoraConfig(max_lora_rank=8),
                "peft_cache_config": PeftCacheConfig(max_lora_rank=16),
            },
            r"8.*16",
        ),
    ],
)
def test_bad_construction_is_refused_and_the_module_left_alone(
    arguments: dict[str, Any], words: str
) -> None:
    model = build_tiny_model("llama")
    implementation = model.config._attn_implementation
    with pytest.raises(InvalidArgumentError, match=words):
        LLM(model, **arguments)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("sizes", "tier"), [({"num_blocks": 10**9}, "device"), ({"host_blocks": 10**9}, "host")]
)
def test_more_kv_blocks_than_memory_are_refused(sizes: dict[str, int], tier: str) -> None:
    with pytest.raises(OutOfMemoryError, match=f"{10**9} {tier} blocks") as refused:
        LLM(build_tiny_model("llama"), kv_cache_config=KvCacheConfig(block_size=4096, **sizes))
    assert refused.value.tier == tier
    assert refused.value.bytes > 10**12


def test_a_path_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="/no/such/model"):
        LLM("/no/such/model")


@pytest.mark.parametrize("refused", ["bloom", "mamba", "qwen3_next", "phi3_longrope"])
def test_models_that_would_answer_wrongly_are_refused(refused: str) -> None:
    with pytest.raises(UnsupportedModelError):
        LLM(build_tiny_model(refused))


def test_max_loras_is_room_for_so_many_of_the_largest(
    llama_adapters: dict[str, Path], engines: list[LLM]
) -> None:
    llm = LLM(build_tiny_model("llama"), lora_config=LoraConfig(max_loras=2, max_cpu_loras=3))
    engines.append(llm)
    info = llm.load_lora("r64", llama_adapters["r64"])
    cache = llm.peft_cache_manager
    pages = cache.determine_num_pages(LlmRequest(10**6, lora_task_id=info.task_id))
    assert cache.max_device_pages == 2 * pages
    assert cache.max_host_pages == 3 * pages
