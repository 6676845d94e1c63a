"""The engine's Python side of a GPU: attention in torch, an operator that holds the batch.

The operator is the CPU's behind the GPU's interface, so this shows what is told to it and when, not
what a GPU computes: tests/gpu does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.equality_bench import (
    FAMILIES,
    assert_answers_as_peft,
    make_cases,
    open_bench,
)
from tests.support.gpu_path import GpuLoraOperatorOnTheCpu, lead_to_gpu
from tests.support.peft_oracle import PeftOracle

from pagedlora.engine import paged_model, parts
from pagedlora.engine.long_runs import LongRunOptions, LongRuns
from pagedlora.engine.pool_view import PoolView
from pagedlora.engine.torch_attention import TorchAttention
from pagedlora.peft_cache import PeftCacheManager

LONG = 5


@pytest.fixture(autouse=True)
def _gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    lead_to_gpu(monkeypatch)
    monkeypatch.setattr(paged_model, "make_backend", TorchAttention)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_answer_as_peft_does(
    family: str,
    adapters_of: Callable[[str], dict[str, Path]],
    oracle_of: Callable[[str], PeftOracle],
) -> None:
    assert_answers_as_peft(family, adapters_of, oracle_of)
    (lora,) = GpuLoraOperatorOnTheCpu.made
    assert lora.num_batches > 1
    assert lora.batch is None, "the lease is let go when a step ends"


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_by_products_of_matrices_answer_as_peft_does(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    adapters_of: Callable[[str], dict[str, Path]],
    oracle_of: Callable[[str], PeftOracle],
) -> None:
    options: list[LongRunOptions] = []
    make_cache, add = parts._adapter_cache, LongRuns.add
    calls = []

    def noted_cache(*args: Any) -> PeftCacheManager:
        cache = make_cache(*args)
        options.append(LongRunOptions(PoolView(cache, torch.device("cpu")), LONG))
        return cache

    def noted_add(runs: LongRuns, *args: Any) -> None:
        calls.append(runs)
        add(runs, *args)

    monkeypatch.setattr(parts, "_adapter_cache", noted_cache)
    monkeypatch.setattr(LongRuns, "add", noted_add)
    lead_to_gpu(monkeypatch, long_runs=options)
    assert_answers_as_peft(family, adapters_of, oracle_of)
    (lora,) = GpuLoraOperatorOnTheCpu.made
    assert calls
    assert all(count < LONG for request, count in lora.segments if request is not None)


def test_a_batch_that_is_not_renewed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    adapters_of: Callable[[str], dict[str, Path]],
) -> None:
    set_batch = GpuLoraOperatorOnTheCpu.set_batch

    def only_the_first(lora: GpuLoraOperatorOnTheCpu, *args: Any) -> None:
        if lora.num_batches == 0:
            set_batch(lora, *args)

    monkeypatch.setattr(GpuLoraOperatorOnTheCpu, "set_batch", only_the_first)
    monkeypatch.setattr(GpuLoraOperatorOnTheCpu, "clear_batch", lambda lora: None)
    cases = make_cases("llama")
    with (
        open_bench("llama", adapters_of("llama"), device_adapters=2) as bench,
        pytest.raises(Exception, match=r"rows|lease"),
    ):
        bench.ask(cases)
