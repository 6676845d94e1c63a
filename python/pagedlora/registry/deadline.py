"""How long a call may go on."""

from __future__ import annotations

import math
import time

from pagedlora.errors import AdapterLoadTimeout, InvalidArgumentError


class Deadline:
    """A moment in the future, or never; immutable."""

    def __init__(self, timeout_s: float | None) -> None:
        """Starts now.

        Args:
            timeout_s: Seconds from now; None: never.

        Raises:
            InvalidArgumentError: It is negative or no number.
        """
        is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and timeout_s >= 0):
            raise InvalidArgumentError(
                f"timeout_s is {timeout_s!r:.80}: it must be seconds, 0 or more, or None"
            )
        self._limit_s = math.inf if timeout_s is None else float(timeout_s)
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
            f"adapter '{name}' was not loaded within {self._limit_s:g} s; the load was given up",
            limit_seconds=self._limit_s,
            stuck_readers=0,
        )
