"""The LoRA operator of a model on a GPU, in the shape that the hooks expect of the CPU's.

On the CPU a batch is a table and the operator is told which one at every call. On the GPU the
operator itself holds the batch, because its tables are in the GPU's memory: one operator per row
map, and the hooks' batch argument is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedlora import _core
from pagedlora.engine.devices import current_stream, gpu_index
from pagedlora.engine.long_runs import LongRunOptions, LongRuns, Segments
from pagedlora.engine.row_map import RowMap


@dataclass(frozen=True, slots=True)
class GpuLoraSizes:
    """How large the tables on the GPU are.

    Attributes:
        layout: Page and part sizes of the cache.
        max_rows: Tokens of a step.
        max_tasks: Adapters that are found without an upload; at least those of one step.
        long_runs: Which runs torch computes by products of matrices; None: none.
    """

    layout: _core.LayoutParams
    max_rows: int
    max_tasks: int
    long_runs: LongRunOptions | None = None

    def for_batch(self, rows: int, tasks: int) -> GpuLoraSizes:
        """These, or twice as large or more where the batch needs it."""
        max_rows = self.max_rows if rows <= self.max_rows else max(rows, 2 * self.max_rows)
        max_tasks = self.max_tasks if tasks <= self.max_tasks else max(tasks, 2 * self.max_tasks)
        return replace(self, max_rows=max_rows, max_tasks=max_tasks)


class GpuLora:
    """The operator of one row map. Works on the stream that was current in `set_batch`.

    Its tables are made again for a batch that they are too small for, which waits for the GPU.
    """

    def __init__(
        self, config: _core.LoraModelConfig, sizes: GpuLoraSizes, device: torch.device
    ) -> None:
        """Reserves the tables.

        Args:
            config: The cache's.
            sizes: Of the tables.
            device: The GPU.

        Raises:
            GpuUnavailableError: There is no GPU, or it has failed.
            GpuCallError: It has not the memory, for one.
        """
        self._config = config
        self._device = torch.device("cuda", gpu_index(device))
        self._sizes = sizes
        self._core = self._make_core(sizes)
        self._stream = 0

    def _make_core(self, sizes: GpuLoraSizes) -> _core.GpuLoraOperator:
        return _core.GpuLoraOperator(
            self._config,
            sizes.layout,
            max_rows=sizes.max_rows,
            max_tasks=sizes.max_tasks,
            ordinal=self._device.index,
        )

    def set_batch(self, lease: Any, segments: Segments) -> LongRuns | None:
        """Uploads what the next calls need, on the stream that they will use.

        Returns:
            What the calls leave to torch.

        Raises:
            GpuUnavailableError: The GPU has failed.
            GpuCallError: It has no memory for larger tables, for one.
        """
        stream = current_stream(self._device)
        assert stream is not None
        self._stream = stream
        long_runs = None
        if self._sizes.long_runs is not None:
            long_runs, segments = self._sizes.long_runs.split(lease, segments)
        users = {request for request, _ in segments if request is not None}
        sizes = self._sizes.for_batch(sum(rows for _, rows in segments), len(users))
        if sizes != self._sizes:
            self._core = self._make_core(sizes)
            self._sizes = sizes
        self._core.set_batch(lease, segments, stream)
        return long_runs

    def clear_batch(self) -> None:
        """Lets go of the lease."""
        self._core.clear_batch()

    def apply(  # noqa: PLR0917 - the signature of the other operator
        self,
        _batch: _core.LoraBatch,
        module_index: int,
        x_ptr: int,
        y_ptr: int,
        num_rows: int,
        x_row_stride: int,
        y_row_stride: int,
        dtype: _core.Dtype,
        base_bias_ptr: int = 0,
    ) -> None:
        """As `LoraOperator.apply`, whose batch is this one's."""
        self._core.apply(
            module_index,
            x_ptr,
            y_ptr,
            num_rows,
            x_row_stride,
            y_row_stride,
            dtype,
            base_bias_ptr,
            self._stream,
        )

    def apply_embedding(  # noqa: PLR0917 - likewise
        self,
        _batch: _core.LoraBatch,
        module_index: int,
        token_ids_ptr: int,
        y_ptr: int,
        num_rows: int,
        y_row_stride: int,
        dtype: _core.Dtype,
        factor: float = 1.0,
    ) -> None:
        """As `LoraOperator.apply_embedding`."""
        self._core.apply_embedding(
            module_index, token_ids_ptr, y_ptr, num_rows, y_row_stride, dtype, factor, self._stream
        )


class GpuRowMap(RowMap):
    """A row map whose rows are known to an operator on a GPU."""

    __slots__ = ("_lora",)

    def __init__(self, lora: GpuLora) -> None:
        super().__init__()
        self._lora = lora

    def set(self, lease: Any, segments: Segments, batch: _core.LoraBatch | None = None) -> None:
        """See `RowMap.set`."""
        self.clear()
        super().set(lease, segments, batch)
        if self.batch is not None:
            self.long_runs = self._lora.set_batch(lease, segments)

    def clear(self) -> None:
        """See `RowMap.clear`."""
        if self.batch is not None:
            self._lora.clear_batch()
        super().clear()
