"""Which rows of a step use which adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedlora import _core

if TYPE_CHECKING:
    from pagedlora.engine.long_runs import LongRuns


class RowMap:
    """Which rows use which adapter at a call site, during the current step.

    Attributes:
        batch: The native table; None while no row uses an adapter, and between steps.
        touched: By module index, 1 where an adapter of the step has weights; None without a table.
        num_rows: Rows that the table describes.
        needs_bias: Whether any adapter has DoRA, which needs the modules' own biases.
        long_runs: Adds what the operator leaves to torch; None if that is nothing.
    """

    __slots__ = ("batch", "long_runs", "needs_bias", "num_rows", "touched")

    def __init__(self) -> None:
        self.batch: _core.LoraBatch | None = None
        self.touched: bytes | None = None
        self.num_rows = 0
        self.needs_bias = False
        self.long_runs: LongRuns | None = None

    def set(
        self,
        lease: Any,
        segments: list[tuple[int | None, int]],
        batch: _core.LoraBatch | None = None,
    ) -> None:
        """Describes a step.

        Args:
            lease: The step's lease; holds every request named.
            segments: Request id (None: base model) and number of rows, in row order.
            batch: What this was for the same before, to be used again.
        """
        self.num_rows = sum(rows for _, rows in segments)
        if batch is None and self.num_rows:
            batch = _core.LoraBatch(lease, segments)
        self.batch = batch
        self.touched = None if batch is None else batch.touched_modules or None
        self.needs_bias = batch is not None and batch.has_dora_scales

    def clear(self) -> None:
        """Ends the step."""
        self.batch = None
        self.touched = None
        self.long_runs = None
