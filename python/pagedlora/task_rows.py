"""The rows of a task put together per module."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from pagedlora import _core

if TYPE_CHECKING:
    import torch

    GatheredRow = tuple[_core.RowShape, torch.Tensor, torch.Tensor]


def join_rows(
    config: _core.LoraModelConfig, rows: Iterable[GatheredRow]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of a task, with the sizes of its modules.

    Args:
        config: The model's modules.
        rows: Shape, A [rank, in length] and B [out length, rank], sorted by module.

    Returns:
        Module name to (A [sum of ranks, in_features], B [out_features, sum of ranks]): the rows of
        a module one behind the other, zero outside their slices.
    """
    modules = config.modules  # a copy: taken once, not per row
    joined: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for index, of_module in groupby(rows, key=lambda row: row[0].module):
        module = modules[index]
        joined[module.name] = _join(module, list(of_module))
    return joined


def _join(module: _core.LoraModule, rows: list[GatheredRow]) -> tuple[torch.Tensor, torch.Tensor]:
    shape, a, b = rows[0]
    whole = ((0, module.in_features), (0, module.out_features))
    if len(rows) == 1 and (shape.in_slice, shape.out_slice) == whole:
        return a, b
    rank = sum(row.rank for row, _, _ in rows)
    all_a = a.new_zeros(rank, module.in_features)
    all_b = b.new_zeros(module.out_features, rank)
    first = 0
    for row, a, b in rows:
        ranks = slice(first, first + row.rank)
        all_a[ranks, _slice(row.in_slice)] = a
        all_b[_slice(row.out_slice), ranks] = b
        first += row.rank
    return all_a, all_b


def _slice(features: tuple[int, int]) -> slice:
    offset, length = features
    return slice(offset, offset + length)
