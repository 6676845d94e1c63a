"""The Python side of a GPU on the CPU: the CPU's operator behind the GPU's interface.

It shows what is told to the operator and when, not what a GPU computes: tests/gpu does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedlora import _core
from pagedlora.engine import gpu_lora, lora_hooks
from pagedlora.engine.gpu_lora import GpuLora, GpuLoraSizes, GpuRowMap
from pagedlora.engine.long_runs import LongRunOptions

STREAM = 7
SIZES = GpuLoraSizes(_core.LayoutParams(4096, 4, 4096), max_rows=64, max_tasks=8)


class GpuLoraOperatorOnTheCpu:
    """Has the interface of `_core.GpuLoraOperator`.

    Attributes:
        made: All of a test, in the order in which they were made.
        batch: The present one.
        num_batches: How many there were.
        segments: Of the last one.
        stream: On which everything has to be.
        sizes: Rows of a batch, and tasks.
    """

    made: list[GpuLoraOperatorOnTheCpu]
    stream: int = STREAM

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
        assert ordinal == 0
        self.sizes = (max_rows, max_tasks)
        self._lora = _core.LoraOperator(config.dtype)
        self.batch: _core.LoraBatch | None = None
        self.segments: list[tuple[int | None, int]] = []
        self.num_batches = 0
        self.made.append(self)

    def set_batch(
        self, lease: Any, segments: list[tuple[int | None, int]], stream: int = 0
    ) -> None:
        assert stream == self.stream
        self.batch = _core.LoraBatch(lease, segments)
        assert self.batch.num_rows <= self.sizes[0]
        assert len({request for request, _ in segments} - {None}) <= self.sizes[1]
        self.segments = list(segments)
        self.num_batches += 1

    def clear_batch(self) -> None:
        self.batch = None

    def apply(self, *args: Any) -> None:
        *args, stream = args
        assert stream == self.stream
        self._lora.apply(self.batch, *args)

    def apply_embedding(self, *args: Any) -> None:
        *args, stream = args
        assert stream == self.stream
        self._lora.apply_embedding(self.batch, *args)


def lead_to_gpu(
    monkeypatch: pytest.MonkeyPatch,
    sizes: GpuLoraSizes = SIZES,
    long_runs: list[LongRunOptions] | None = None,
) -> None:
    """Lets hooks on the CPU take the way to a GPU, until the end of the test.

    Args:
        monkeypatch: Undoes it.
        sizes: Of the tables.
        long_runs: Its last element, if any, says what torch computes.
    """
    monkeypatch.setattr(GpuLoraOperatorOnTheCpu, "made", [], raising=False)
    monkeypatch.setattr(GpuLoraOperatorOnTheCpu, "stream", STREAM)
    monkeypatch.setattr(gpu_lora._core, "GpuLoraOperator", GpuLoraOperatorOnTheCpu)
    monkeypatch.setattr(gpu_lora, "gpu_index", lambda device: 0)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(cuda_stream=GpuLoraOperatorOnTheCpu.stream),
    )

    def make_site(config: Any, _dtype: Any, device: torch.device, _sizes: Any) -> Any:
        options = long_runs[-1] if long_runs else None
        lora = GpuLora(
            config,
            GpuLoraSizes(sizes.layout, sizes.max_rows, sizes.max_tasks, options),
            device,
        )
        return lora_hooks._Site(GpuRowMap(lora), lora)

    monkeypatch.setattr(lora_hooks, "_make_site", make_site)
