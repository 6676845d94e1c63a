"""The rows of a task put together per module."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagedlora import _core

if TYPE_CHECKING:
    import torch

    ModuleWeights: TypeAlias = (
        tuple[torch.Tensor, torch.Tensor]
        | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
    )


class GatheredRow(NamedTuple):
    """One row of a task in tensors of its own.

    Attributes:
        shape: What the row is.
        a: [rank, in length].
        b: [out length, rank].
        bias: [out length] float32; None: it has none.
        dora_scale: Likewise.
    """

    shape: _core.RowShape
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    dora_scale: torch.Tensor | None

    @classmethod
    def empty(cls, shape: _core.RowShape, dtype: torch.dtype) -> GatheredRow:
        """Tensors of the right sizes for a row, not filled."""
        import torch

        out = shape.out_slice[1]
        return cls(
            shape,
            torch.empty(shape.rank, shape.in_slice[1], dtype=dtype),
            torch.empty(out, shape.rank, dtype=dtype),
            torch.empty(out, dtype=torch.float32) if shape.has_bias else None,
            torch.empty(out, dtype=torch.float32) if shape.has_dora_scale else None,
        )

    @property
    def addresses(self) -> tuple[_core.RowShape, int, int, int, int]:
        """What the core fills: the shape, and where the tensors lie (0: there is none)."""
        bias, scale = (0 if v is None else v.data_ptr() for v in (self.bias, self.dora_scale))
        return self.shape, self.a.data_ptr(), self.b.data_ptr(), bias, scale


def join_rows(
    config: _core.LoraModelConfig, rows: Iterable[GatheredRow]
) -> dict[str, ModuleWeights]:
    """The matrices of a task, with the sizes of its modules.

    Args:
        config: The model's modules.
        rows: Filled; sorted by module.

    Returns:
        As `PeftCacheManager.task_weights`. Where only some rows of a module have a bias or a DoRA
        scale, the outputs of the others have a bias of 0 and a scale of 1.
    """
    modules = config.modules  # a copy: taken once, not per row
    joined: dict[str, ModuleWeights] = {}
    for index, of_module in groupby(rows, key=lambda row: row.shape.module):
        module = modules[index]
        joined[module.name] = _join(module, list(of_module))
    return joined


def _join(module: _core.LoraModule, rows: list[GatheredRow]) -> ModuleWeights:
    a, b = _join_matrices(module, rows)
    dora_scale = _join_vectors(module, [(row.shape, row.dora_scale) for row in rows], 1.0)
    bias = _join_vectors(module, [(row.shape, row.bias) for row in rows], 0.0)
    if bias is not None:
        return a, b, dora_scale, bias
    return (a, b) if dora_scale is None else (a, b, dora_scale)


def _join_matrices(
    module: _core.LoraModule, rows: list[GatheredRow]
) -> tuple[torch.Tensor, torch.Tensor]:
    first_row = rows[0]
    whole = ((0, module.in_features), (0, module.out_features))
    if len(rows) == 1 and (first_row.shape.in_slice, first_row.shape.out_slice) == whole:
        return first_row.a, first_row.b
    rank = sum(row.shape.rank for row in rows)
    all_a = first_row.a.new_zeros(rank, module.in_features)
    all_b = first_row.b.new_zeros(module.out_features, rank)
    first = 0
    for row in rows:
        ranks = slice(first, first + row.shape.rank)
        all_a[ranks, _slice(row.shape.in_slice)] = row.a
        all_b[_slice(row.shape.out_slice), ranks] = row.b
        first += row.shape.rank
    return all_a, all_b


def _join_vectors(
    module: _core.LoraModule,
    vectors: list[tuple[_core.RowShape, torch.Tensor | None]],
    elsewhere: float,
) -> torch.Tensor | None:
    joined = None
    for shape, vector in vectors:
        if vector is None:
            continue
        if joined is None:
            joined = vector.new_full((module.out_features,), elsewhere)
        joined[_slice(shape.out_slice)] = vector
    return joined


def _slice(features: tuple[int, int]) -> slice:
    offset, length = features
    return slice(offset, offset + length)
