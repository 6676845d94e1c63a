"""Adapters made of rows of any kind, for tests below the loaders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pagedlora import LlmRequest, LoraBatch, LoraOperator, _core
from pagedlora._core import AdapterPlan, CarriedWeights, Dtype, FakeSource, PlannedRow


@dataclass
class RowSource:
    """A source into which float32 tensors are put, with rows that are planned to read it."""

    data: bytearray = field(default_factory=bytearray)
    rows: list[PlannedRow] = field(default_factory=list)

    def put(self, tensor: torch.Tensor) -> int:
        """Appends a tensor; its offset."""
        offset = len(self.data)
        self.data += tensor.contiguous().numpy().tobytes()
        return offset

    def row(
        self, module: int, rank: int, scale: float, a_offset: int, b_offset: int, **more: Any
    ) -> None:
        """Plans a row of float32 matrices."""
        self.rows.append(
            PlannedRow(
                module, rank, scale, a_offset, Dtype.float32, b_offset, Dtype.float32, **more
            )
        )

    def carried_by(self, request_id: int, config: _core.LoraModelConfig) -> LlmRequest:
        """A request that carries the rows."""
        source = FakeSource(bytes(self.data), f"rows of request {request_id}")
        weights = CarriedRows(AdapterPlan(config, self.rows, source))
        return LlmRequest(request_id, lora_task_id=request_id, lora_weights=weights)


@dataclass(frozen=True, eq=False)
class CarriedRows:
    """What a request carries."""

    plan: AdapterPlan

    def carried(self, _: _core.LoraModelConfig) -> CarriedWeights:
        """As `AdapterWeights.carried`."""
        return CarriedWeights(self.plan, str(id(self)))


def apply_rows(
    lease: _core.BatchLease,
    segments: list[tuple[int | None, int]],
    module: int,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    base_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the operator makes of a copy of y."""
    y = y.clone()
    LoraOperator(Dtype.float32).apply(
        LoraBatch(lease, segments),
        module,
        x.data_ptr(),
        y.data_ptr(),
        len(x),
        x.stride(0),
        y.stride(0),
        Dtype.float32,
        0 if base_bias is None else base_bias.data_ptr(),
    )
    return y
