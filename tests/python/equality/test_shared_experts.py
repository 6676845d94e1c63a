"""Mixtures of experts: adapters for shared experts and attention answer as PEFT does; adapters for
the routed experts, which are parameters of three dimensions, are refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.adapters import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    weights_of,
    write_adapter,
    write_random_adapter,
)
from tests.support.equality_bench import open_bench
from tests.support.peft_corpus import Entry, save_corpus, save_entry
from tests.support.peft_judge import PeftJudge
from tests.support.peft_oracle import Case, PeftOracle, assert_equal_to_peft
from tests.support.row_kinds import silent_peft
from tests.support.sharded_model import ShardedModel
from tests.support.tiny_models import build_tiny_model

from pagedlora import (
    AdapterFormatError,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    UnsupportedAdapterError,
)

PROMPT = (3, 1, 41, 15, 9, 26, 5, 35, 63, 0)
FAMILY = "qwen2_moe"
GATE, UP, DOWN = (f"shared_expert.{name}_proj" for name in ("gate", "up", "down"))
ENTRIES = {
    name: Entry({"r": 6, "lora_alpha": 12, **fields})
    for name, fields in {
        "shared": {"target_modules": [GATE, UP, DOWN], "r": 5},
        "shared and attention": {
            "target_modules": [GATE, DOWN, "q_proj", "o_proj"],
            "rank_pattern": {GATE: 2},
            "alpha_pattern": {f"1.mlp.{DOWN}": 40},
        },
        "rsLoRA": {"target_modules": [UP], "use_rslora": True, "lora_alpha": 5},
        "DoRA": {"target_modules": [GATE, "q_proj"], "use_dora": True, "r": 3},
        "gate of the shared expert": {"target_modules": ["shared_expert_gate"], "r": 1},
        "all-linear": {"target_modules": "all-linear", "r": 2},
    }.items()
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_corpus(tmp_path_factory.mktemp(FAMILY), FAMILY, ENTRIES)


def test_shared_experts_answer_as_peft_does_also_when_read_again(adapters: dict[str, Path]) -> None:
    cases = [Case(name, PROMPT) for name in (None, *adapters)]
    with silent_peft():
        judge = PeftOracle(FAMILY, adapters)
    with open_bench(FAMILY, adapters, device_adapters=2, host_adapters=2) as bench:
        answers = bench.ask(cases)
        assert_equal_to_peft(judge, cases, answers)
        first = [answer.logits[0] for answer in answers]
        for one, other in itertools.combinations(first, 2):
            assert (one - other).abs().max() > 0.01 * one.std(), "they answer alike"
        cases.reverse()
        assert_equal_to_peft(judge, cases, bench.ask(cases))
        assert bench.llm.peft_cache_manager.stats.source_rereads > 0
        for info in bench.llm.list_loras():
            assert any("shared_expert" in module for module in info.ranks)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_answer_together_as_peft_does(tp_size: int, adapters: dict[str, Path]) -> None:
    inputs = torch.tensor([PROMPT])
    judge = PeftJudge(build_tiny_model(FAMILY), adapters)
    model = ShardedModel(
        FAMILY, build_tiny_model(FAMILY), adapters, tp_size, targets=["all-linear"]
    )
    for name in adapters:
        expected = judge.logits(name, inputs)
        gap = float((model.run(name, inputs) - expected).abs().max() / expected.std())
        assert gap < 1e-4, f"{name}: logits differ by {gap:.2g} of their deviation"
    model.close()


def test_shared_experts_of_deepseek_answer_like_merged_weights(tmp_path: Path) -> None:
    """The installed PEFT turns such targets into parameters of the routed experts: see below."""
    targets = ["shared_experts.gate_proj", "shared_experts.down_proj", "q_b_proj", "kv_b_proj"]
    config = LoraModelConfig.from_module(build_tiny_model("deepseek_v3"), targets)
    scale = 1 / 256  # A and B are integers up to 8
    path = write_random_adapter(
        tmp_path / "a", config, rank=3, seed=1, target_modules=targets, lora_alpha=3 * scale
    )
    merged = build_tiny_model("deepseek_v3")
    tensors = weights_of(load_file(path / WEIGHTS_FILE), torch.float32)
    with torch.no_grad():
        for name, (a, b) in tensors.items():
            merged.get_submodule(name).weight += scale * b @ a
    with open_bench("deepseek_v3", {"a": path}) as bench:
        for _ in range(2):
            (answer,) = bench.ask([Case("a", PROMPT)])
            with torch.inference_mode():
                row = torch.tensor([[*PROMPT, *answer.tokens]])
                logits = merged(input_ids=row).logits[0, len(PROMPT) - 1 : -1]
            assert (answer.logits - logits).abs().max() < 1e-4 * logits.std()
            for tier in ("device", "host"):
                bench.llm.peft_cache_manager.evict_unowned(tier)
        (base,) = bench.ask([Case(None, PROMPT)])
        assert (base.logits[0] - logits[0]).abs().max() > 0.01 * logits.std()


# ---- routed experts ----------------------------------------------------------------------------


@pytest.fixture
def registry() -> Callable[[str], LoraManager]:
    """Family to a registry of its tiny model."""

    def make(family: str) -> LoraManager:
        config = LoraModelConfig.from_module(build_tiny_model(family))
        sizes = PeftCacheConfig(host_cache_size=2**20, device_cache_size=2**20)
        return LoraManager(config, PeftCacheManager(config, sizes))

    return make


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "mixtral"])
def test_adapters_for_fused_routed_experts_are_refused_by_name(
    family: str, registry: Callable[[str], LoraManager], tmp_path: Path
) -> None:
    fields = {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    directory = save_entry(tmp_path / "a", family, Entry({"r": 2, **fields}), seed=1)
    manager = registry(family)
    with pytest.raises(UnsupportedAdapterError) as caught:
        manager.register("a", directory)
    assert caught.value.field == "target_parameters"
    assert "experts" in str(caught.value)
    # Without the field the tensors say the same.
    config = json.loads((directory / CONFIG_FILE).read_text())
    del config["target_parameters"]
    for targets in (["o_proj"], ["o_proj", "experts"]):
        (directory / CONFIG_FILE).write_text(json.dumps({**config, "target_modules": targets}))
        with pytest.raises(AdapterFormatError, match=r"mlp\.experts.*lora_A"):
            manager.register("a", directory)
    assert manager.list() == []
    manager.cache_manager.close()


def test_targets_that_peft_turns_into_parameters_of_experts_are_refused_by_name(
    registry: Callable[[str], LoraManager], tmp_path: Path
) -> None:
    """So it does for DeepSeek: gate_proj and up_proj are one tensor in transformers 5."""
    entry = Entry({"r": 2, "target_modules": ["gate_proj", "up_proj", "o_proj"]})
    directory = save_entry(tmp_path / "a", "deepseek_v3", entry, seed=1)
    manager = registry("deepseek_v3")
    with pytest.raises(UnsupportedAdapterError) as caught:
        manager.register("a", directory)
    assert caught.value.field == "target_parameters"
    manager.cache_manager.close()


@pytest.mark.parametrize("stacked", ["A", "B"])
def test_matrices_of_all_experts_in_one_tensor_are_refused_with_their_shape(
    stacked: str, registry: Callable[[str], LoraManager], tmp_path: Path
) -> None:
    name = f"{PREFIX}model.layers.0.mlp.shared_expert.up_proj.lora_"
    tensors = {f"{name}A.weight": torch.zeros(2, 32), f"{name}B.weight": torch.zeros(24, 2)}
    tensors[f"{name}{stacked}.weight"] = tensors[f"{name}{stacked}.weight"].repeat(4, 1, 1)
    directory = write_adapter(tmp_path / "a", tensors, r=2, target_modules=["up_proj"])
    manager = registry("qwen2_moe")
    with pytest.raises(AdapterFormatError, match=rf"lora_{stacked}.*shape \[4, "):
        manager.register("a", directory)
    manager.cache_manager.close()
