"""How long a call may go on."""

from __future__ import annotations

import math
import time

from pagedlora.arguments import to_seconds
from pagedlora.errors import AdapterLoadTimeout
from pagedlora.shown import quoted


class Deadline:
    """A moment in the future, or never; immutable."""

    def __init__(self, timeout_s: float | None) -> None:
        """Starts now.

        Args:
            timeout_s: Seconds from now; None: never.

        Raises:
            InvalidArgumentError: It is negative or no number.
        """
        self._limit_s = math.inf if timeout_s is None else to_seconds(timeout_s, "timeout_s")
        self._end = time.monotonic() + self._limit_s

    def left_s(self, at_most: float) -> float:
        """Seconds until then, 0 or more, but not more than `at_most`."""
        return max(0.0, min(at_most, self._end - time.monotonic()))

    @property
    def has_passed(self) -> bool:
        """Whether the moment has come."""
        return time.monotonic() >= self._end

    def error(self, name: str) -> AdapterLoadTimeout:
        """What to raise when an adapter is not loaded by then."""
        return AdapterLoadTimeout(
            f"adapter {quoted(name)} was not loaded within {self._limit_s:g} s; the load was "
            "given up",
            limit_seconds=self._limit_s,
            stuck_readers=0,
        )
