"""The adapters of long runs of rows, by torch's matrix products.

The kernels read an adapter's weights once for a few rows, and give a row the same bits whatever
stands beside it. For a prompt of many rows a product of matrices may be faster, and its last bits
depend on the number of rows; adr/0018 has the reasons and the choice.

The formula is the kernels' (adapter_plan.h); A x and B t are float32 and y is rounded once per row
of the adapter. Error of an output, beside that rounding, relative to the sum of the magnitudes of
all its terms, in units of float32's roundoff, in whatever order the sums are made:

    in length + 1 + rank + 1        the products, the scale, and y
    6 more                          where there is a bias or a DoRA scale

twice that on a GPU, whose tensor cores cut off instead of rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from pagedlora import _core
from pagedlora.engine.float32_products import full_float32
from pagedlora.engine.pool_view import PoolView, Row
from pagedlora.errors import InvalidArgumentError

Segments: TypeAlias = list[tuple[int | None, int]]
"""Request (None: the base model) and number of rows, in row order."""

_HAS_FLOAT32_OUTPUT = hasattr(torch.ops.aten.mm, "dtype")


@dataclass(frozen=True, slots=True)
class LongRunOptions:
    """Which runs are computed by torch, and from where.

    Attributes:
        pool: The device tier.
        min_rows: Of a run; shorter ones are left to the kernels.

    Raises:
        InvalidArgumentError: `min_rows` is below 1.
    """

    pool: PoolView
    min_rows: int

    def __post_init__(self) -> None:
        if self.min_rows < 1:
            raise InvalidArgumentError(f"min_rows is {self.min_rows}: a run has at least 1 row")

    def split(self, lease: Any, segments: Segments) -> tuple[LongRuns | None, Segments]:
        """The long runs of a step, and the step without them.

        Args:
            lease: Holds every request named.
            segments: Neighbours that use one task are one run.

        Returns:
            None if there are no long runs; and segments for the kernels, in which the rows of long
            runs are the base model's.
        """
        runs: dict[int, tuple[int, list[slice]]] = {}
        rest: Segments = []
        first = 0
        for task, run in _by_task(lease, segments):
            num_rows = sum(rows for _, rows in run)
            if task is None or num_rows < self.min_rows:
                rest += run
            else:
                request = run[0][0]
                assert request is not None
                runs.setdefault(task, (request, []))[1].append(slice(first, first + num_rows))
                rest.append((None, num_rows))
            first += num_rows
        if not runs:
            return None, rest
        return LongRuns(self.pool, lease, list(runs.values())), rest


class LongRuns:
    """The long runs of one step. Thread-compatible; works on the current stream of torch."""

    def __init__(
        self, pool: PoolView, lease: _core.BatchLease, runs: Sequence[tuple[int, list[slice]]]
    ) -> None:
        """As `LongRunOptions.split` finds them.

        Args:
            pool: The lease's.
            lease: Is kept open during each call.
            runs: Per task a request of it, and the rows that use it.
        """
        self._pool = pool
        self._lease = lease
        self._runs = runs

    def add(
        self, module_index: int, x: torch.Tensor, y: torch.Tensor, base_bias: torch.Tensor | None
    ) -> None:
        """Adds the adapters' outputs for a linear module to the rows of long runs, in place.

        Args:
            module_index: The module.
            x: [rows of the step, in_features].
            y: [rows of the step, out_features]; others' rows are neither read nor written.
            base_bias: [out_features], the module's own, for DoRA; None: it has none.

        Raises:
            LeaseClosedError: The lease was closed.
        """
        with _core.LeasePages(self._lease) as held, full_float32():
            for request, runs in self._runs:
                for pages in held.rows(request, module_index):
                    row = self._pool.row(pages)
                    for rows in runs:
                        t = _shrink(x[rows, _slice(pages.in_slice)], row.a)
                        _expand(pages, row, t.mul_(pages.scale), y[rows], base_bias)

    def add_embedding(
        self, module_index: int, token_ids: torch.Tensor, y: torch.Tensor, factor: float
    ) -> None:
        """The same for an embedding.

        Args:
            module_index: The module.
            token_ids: [rows of the step] int64.
            y: [rows of the step, out_features].
            factor: By which the module multiplies what it looks up.

        Raises:
            LeaseClosedError: The lease was closed.
        """
        with _core.LeasePages(self._lease) as held, full_float32():
            for request, runs in self._runs:
                for pages in held.rows(request, module_index):
                    b = self._pool.b(pages)
                    vectors = map(self._pool.vector, (pages.bias, pages.dora_scale))
                    row = Row(b[:0], b, *vectors)
                    for rows in runs:
                        t = self._look_up(pages, token_ids[rows])
                        _expand(pages, row, t.mul_(factor * pages.scale), y[rows], None)

    def _look_up(self, pages: _core.RowPages, token_ids: torch.Tensor) -> torch.Tensor:
        """A[:, token], or zeros for tokens outside of the row's slice: float32 [n, rank]."""
        first, length = pages.in_slice
        places = token_ids - first
        inside = (places >= 0) & (places < length)
        found = self._pool.columns(pages, places.clamp(0, length - 1)).float()
        return found.masked_fill_(~inside[:, None], 0.0)


def _by_task(lease: Any, segments: Segments) -> list[tuple[int | None, Segments]]:
    """Neighbouring segments of a task put together."""
    grouped: list[tuple[int | None, Segments]] = []
    for request, rows in segments:
        task = None if request is None else lease.task_of(request)
        if grouped and grouped[-1][0] == task:
            grouped[-1][1].append((request, rows))
        else:
            grouped.append((task, [(request, rows)]))
    return grouped


def _shrink(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """A x in float32: [n, rank]. Products of two half-precision numbers are exact in it."""
    if _HAS_FLOAT32_OUTPUT and x.is_cuda and x.dtype == a.dtype != torch.float32:
        return torch.mm(x, a.T, out_dtype=torch.float32)  # the CPU has none
    return torch.mm(x.float(), a.float().T)


def _expand(
    pages: _core.RowPages,
    row: Row,
    t: torch.Tensor,
    y: torch.Tensor,
    base_bias: torch.Tensor | None,
) -> None:
    """Adds B t, the bias and the DoRA scale to y [n, out_features]; t has the scale already."""
    outputs = _slice(pages.out_slice)
    place, b = y[:, outputs], row.b.float().T
    if row.bias is None and row.dora_scale is None:
        if place.dtype == torch.float32:
            place.addmm_(t, b)
        else:
            place.copy_(torch.addmm(place.float(), t, b))
        return
    before, delta = place.float(), torch.mm(t, b)
    if row.bias is not None:
        delta += row.bias * pages.scale
    if row.dora_scale is not None:
        base = before if base_bias is None else before - base_bias[outputs].float()
        delta = (row.dora_scale - 1.0) * base + row.dora_scale * delta
    place.copy_(before + delta)


def _slice(features: tuple[int, int]) -> slice:
    first, length = features
    return slice(first, first + length)
