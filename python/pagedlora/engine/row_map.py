"""Which rows of a step use which adapter."""

from __future__ import annotations

from typing import Any

from pagedlora import _core


class RowMap:
    """Which rows use which adapter at a call site, during the current step.

    Attributes:
        batch: The native table; None while no row uses an adapter, and between steps.
        num_rows: Rows that the table describes.
        needs_bias: Whether any adapter has DoRA, which needs the modules' own biases.
    """

    __slots__ = ("batch", "needs_bias", "num_rows")

    def __init__(self) -> None:
        self.batch: _core.LoraBatch | None = None
        self.num_rows = 0
        self.needs_bias = False

    def set(self, lease: Any, segments: list[tuple[int | None, int]]) -> None:
        """Describes a step.

        Args:
            lease: The step's lease; holds every request named.
            segments: Request id (None: base model) and number of rows, in row order.
        """
        self.num_rows = sum(rows for _, rows in segments)
        self.batch = _core.LoraBatch(lease, segments) if self.num_rows else None
        self.needs_bias = self.batch is not None and self.batch.has_dora_scales

    def clear(self) -> None:
        """Ends the step."""
        self.batch = None

    def copy_from(self, other: RowMap) -> None:
        """Describes what another map does."""
        for name in RowMap.__slots__:
            setattr(self, name, getattr(other, name))
