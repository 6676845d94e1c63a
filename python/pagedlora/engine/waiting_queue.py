"""New requests in the order in which they may begin, however many there are.

A step looks at the front of the queue. What that costs depends on the size of the front, and not on
how many wait behind it.

Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from pagedlora.requests import LlmRequest


class WaitingQueue:
    """By priority, the highest first, then by arrival."""

    def __init__(self) -> None:
        """Starts empty."""
        self._groups: dict[int, dict[int, LlmRequest]] = {}  # by priority; none is empty
        self._order: list[int] = []  # the negative priorities of the groups, ascending
        self._priorities: dict[int, int] = {}  # by request id, as they were on arrival

    def __len__(self) -> int:
        """How many wait."""
        return len(self._priorities)

    def __iter__(self) -> Iterator[LlmRequest]:
        """All of them; the queue must not change meanwhile."""
        for negative in self._order:
            yield from self._groups[-negative].values()

    def append(self, request: LlmRequest) -> None:
        """Behind all that are there of its priority."""
        priority = request.priority
        if priority not in self._groups:
            self._groups[priority] = {}
            insort(self._order, -priority)
        self._groups[priority][request.request_id] = request
        self._priorities[request.request_id] = priority

    def first(self, size: int) -> list[LlmRequest]:
        """At most `size` of them, from the front."""
        return list(islice(self, size))

    def remove(self, request: LlmRequest) -> None:
        """Takes it out, wherever it stands; one that is not there is ignored."""
        priority = self._priorities.pop(request.request_id, None)
        if priority is None:
            return
        group = self._groups[priority]
        del group[request.request_id]
        if not group:
            del self._groups[priority]
            del self._order[bisect_left(self._order, -priority)]

    def clear(self) -> None:
        """Takes all of them out."""
        self._groups.clear()
        self._order.clear()
        self._priorities.clear()
