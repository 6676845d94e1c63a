"""Promise 5: a run on the CPU and a run on a GPU differ only by rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.equality_bench import FAMILIES, make_cases, open_bench
from tests.support.peft_oracle import PeftOracle, assert_answers_differ, assert_equal_to_peft

AdaptersOf = Callable[[str], dict[str, Path]]


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_answer_as_peft_does_on_the_cpu(
    family: str, adapters_of: AdaptersOf, oracle_of: Callable[[str], PeftOracle]
) -> None:
    cases = make_cases(family)
    with open_bench(
        family, adapters_of(family), device_adapters=2, host_adapters=3, device="cuda"
    ) as bench:
        for _ in range(2):
            answers = bench.ask(cases)
            assert_equal_to_peft(oracle_of(family), cases, answers)
            assert_answers_differ(cases, answers)
        stats = bench.llm.peft_cache_manager.stats
        assert stats.device.tasks_evicted >= 3
        assert stats.source_rereads >= 1


def test_suspended_requests_come_back_with_their_keys(
    adapters_of: AdaptersOf, oracle_of: Callable[[str], PeftOracle]
) -> None:
    cases = make_cases("llama")
    with open_bench(
        "llama",
        adapters_of("llama"),
        num_blocks=24,
        host_blocks=48,
        policy="max_utilization",
        device="cuda",
    ) as bench:
        answers = bench.ask(cases)
    assert_equal_to_peft(oracle_of("llama"), cases, answers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_runs(dtype: torch.dtype, adapters_of: AdaptersOf) -> None:
    cases = make_cases("qwen2")
    with open_bench("qwen2", adapters_of("qwen2"), dtype=dtype, device="cuda") as bench:
        answers = bench.ask(cases)
    assert all(torch.isfinite(answer.logits).all() for answer in answers)
    assert len({tuple(answer.tokens) for answer in answers}) > 1


def test_the_model_is_given_back_on_its_gpu(adapters_of: AdaptersOf) -> None:
    with open_bench("llama", adapters_of("llama"), device="cuda") as bench:
        model = bench.llm._parts.loaded.model
        bench.ask(make_cases("llama"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert not any(module._forward_hooks for module in model.modules())
