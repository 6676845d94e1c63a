"""The LoRA operator of a model on a GPU, in the shape that the hooks expect of the CPU's.

On the CPU a batch is a table and the operator is told which one at every call. On the GPU the
operator itself holds the batch, because its tables are in the GPU's memory: one operator per row
map, and the hooks' batch argument is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedlora import _core
from pagedlora.engine.devices import gpu_index
from pagedlora.engine.row_map import RowMap


@dataclass(frozen=True, slots=True)
class GpuLoraSizes:
    """How large the tables on the GPU are.

    Attributes:
        layout: Page and part sizes of the cache.
        max_rows: Tokens of a step.
        max_tasks: Adapters that are found without an upload; at least those of one step.
    """

    layout: _core.LayoutParams
    max_rows: int
    max_tasks: int


class GpuLora:
    """The operator of one row map. Works on the current stream of torch."""

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
        ordinal = gpu_index(device)
        self._device = torch.device("cuda", ordinal)
        self._core = _core.GpuLoraOperator(
            config,
            sizes.layout,
            max_rows=sizes.max_rows,
            max_tasks=sizes.max_tasks,
            ordinal=ordinal,
        )
        self._stream = 0

    def set_batch(self, lease: Any, segments: list[tuple[int | None, int]]) -> None:
        """Uploads what the next calls need, on the stream that they will use."""
        self._stream = torch.cuda.current_stream(self._device).cuda_stream
        self._core.set_batch(lease, segments, self._stream)

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

    def set(self, lease: Any, segments: list[tuple[int | None, int]]) -> None:
        """See `RowMap.set`."""
        super().set(lease, segments)
        if self.batch is not None:
            self._lora.set_batch(lease, segments)

    def clear(self) -> None:
        """See `RowMap.clear`."""
        if self.batch is not None:
            self._lora.clear_batch()
        super().clear()
