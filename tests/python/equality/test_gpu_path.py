"""The engine's Python side of a GPU: attention in torch, an operator that holds the batch.

The operator is the CPU's behind the GPU's interface, so this shows what is told to it and when, not
what a GPU computes: tests/gpu does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.equality_bench import FAMILIES, make_cases, open_bench
from tests.support.peft_oracle import PeftOracle, assert_answers_differ, assert_equal_to_peft

from pagedlora import _core
from pagedlora.engine import gpu_lora, lora_hooks, paged_model
from pagedlora.engine.gpu_lora import GpuLora, GpuLoraSizes, GpuRowMap
from pagedlora.engine.torch_attention import TorchAttention

STREAM = 7


class GpuLoraOperatorOnTheCpu:
    """Has the interface of `_core.GpuLoraOperator`."""

    made: list[GpuLoraOperatorOnTheCpu]

    def __init__(
        self,
        config: _core.LoraModelConfig,
        layout: _core.LayoutParams,
        *,
        max_rows: int,
        max_tasks: int,
        ordinal: int,
    ) -> None:
        assert layout.page_bytes > 0
        assert (max_rows, max_tasks, ordinal) == (64, 8, 0)
        self._lora = _core.LoraOperator(config.dtype)
        self.batch: _core.LoraBatch | None = None
        self.num_batches = 0
        self.made.append(self)

    def set_batch(
        self, lease: Any, segments: list[tuple[int | None, int]], stream: int = 0
    ) -> None:
        assert stream == STREAM
        self.batch = _core.LoraBatch(lease, segments)
        self.num_batches += 1

    def clear_batch(self) -> None:
        self.batch = None

    def apply(self, *args: Any) -> None:
        *args, stream = args
        assert stream == STREAM
        self._lora.apply(self.batch, *args)

    def apply_embedding(self, *args: Any) -> None:
        *args, stream = args
        assert stream == STREAM
        self._lora.apply_embedding(self.batch, *args)


@pytest.fixture(autouse=True)
def _gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuLoraOperatorOnTheCpu, "made", [], raising=False)
    monkeypatch.setattr(gpu_lora._core, "GpuLoraOperator", GpuLoraOperatorOnTheCpu)
    monkeypatch.setattr(gpu_lora, "gpu_index", lambda device: 0)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM)
    )
    monkeypatch.setattr(paged_model, "make_backend", TorchAttention)
    sizes = GpuLoraSizes(_core.LayoutParams(4096, 4, 4096), max_rows=64, max_tasks=8)

    def make_site(config: Any, _dtype: Any, device: torch.device, _sizes: Any) -> Any:
        lora = GpuLora(config, sizes, device)
        return lora_hooks._Site(GpuRowMap(lora), lora)

    monkeypatch.setattr(lora_hooks, "_make_site", make_site)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_answer_as_peft_does(
    family: str,
    adapters_of: Callable[[str], dict[str, Path]],
    oracle_of: Callable[[str], PeftOracle],
) -> None:
    cases = make_cases(family)
    with open_bench(family, adapters_of(family), device_adapters=2) as bench:
        answers = bench.ask(cases)
    assert_equal_to_peft(oracle_of(family), cases, answers)
    assert_answers_differ(cases, answers)
    (lora,) = GpuLoraOperatorOnTheCpu.made
    assert lora.num_batches > 1
    assert lora.batch is None, "the lease is let go when a step ends"


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
