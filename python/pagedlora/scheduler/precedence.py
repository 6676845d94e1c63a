"""Who goes before whom: what a scheduler remembers of each live request.

Precedence is total: requests past the bound of waiting first, then by priority, then by arrival. It
never falls: a request can only come to be past the bound. So two requests can never take each
other's place in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Record:
    """One live request.

    Attributes:
        request: As the caller gave it; its priority is that of its arrival.
        arrival: Number in the order in which requests were first seen.
        skipped_passes: Passes that let others go ahead while it could have run.
        has_begun: Whether it has, or had, keys and values; None: not looked at.
        is_paused: Whether it owns its adapter as a paused request.
        lost_kv: Whether it was recompute-paused and has not been resumed.
        left_pass: The last pass in which it had to give way.
        precedence: Smaller goes first: whether it is in the bound, priority, arrival.
    """

    request: Any
    arrival: int
    skipped_passes: int = 0
    has_begun: bool | None = None
    is_paused: bool = False
    lost_kv: bool = False
    left_pass: int = -1
    precedence: tuple[bool, int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Takes the request's priority."""
        self.precedence = (True, -self.request.priority, self.arrival)

    @property
    def is_past_bound(self) -> bool:
        """Whether it had to let others go ahead too often; stays."""
        return not self.precedence[0]

    @property
    def is_generating(self) -> bool:
        """Whether its context is complete."""
        return bool(self.request.num_computed_tokens >= self.request.num_context_tokens)

    def was_skipped(self, max_skip_passes: int) -> None:
        """Others went ahead in this pass."""
        self.skipped_passes += 1
        if self.skipped_passes >= max_skip_passes:
            self.precedence = (False, *self.precedence[1:])

    def is_overtaken_by(self, other: Record) -> bool:
        """Whether the other one is behind this one, or only waited too long to be so."""
        if self.precedence < other.precedence:
            return True
        is_behind = other.request.priority <= self.request.priority
        return is_behind and self.arrival < other.arrival

    def may_displace(self, other: Record, *, is_new: bool) -> bool:
        """Whether the other one has to give way to this one.

        Args:
            other: Has keys and values.
            is_new: Whether this one has none yet. A new request takes the place of one that runs
                only for its priority, or past the bound, and never that of an older one.
        """
        if self.precedence >= other.precedence:
            return False
        if not is_new or self.request.priority > other.request.priority:
            return True
        return (
            self.is_past_bound
            and self.arrival < other.arrival
            and self.request.priority == other.request.priority
        )


class Records:
    """The records of the live requests, by request; ids may be used again once one has ended."""

    def __init__(self) -> None:
        """Knows nobody."""
        self._by_id: dict[int, Record] = {}
        self._arrivals = 0

    def update(self, active_requests: Sequence[Any]) -> list[Record]:
        """Forgets who is gone and returns the others' records, in the order given."""
        known = self._by_id
        self._by_id = {}
        for request in active_requests:
            record = known.get(request.request_id)
            if record is None or record.request is not request:
                record = Record(request, self._arrivals)
                self._arrivals += 1
            self._by_id[request.request_id] = record
        return list(self._by_id.values())

    def get(self, request: Any) -> Record | None:
        """The record of a request that the last update named."""
        record = self._by_id.get(request.request_id)
        return record if record is not None and record.request is request else None
