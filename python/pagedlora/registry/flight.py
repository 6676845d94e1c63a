"""Work that one thread does and others wait for."""

from __future__ import annotations

import threading

from pagedlora.errors import AdapterLoadTimeout
from pagedlora.registry.deadline import Deadline

_SLICE_S = 3600.0


class Flight:
    """The end of one thread's work, with its error. Thread-safe.

    Attributes:
        error: Why it failed; None while it is not over, and when it went well.
    """

    __slots__ = ("_over", "error")

    def __init__(self) -> None:
        self._over = threading.Event()
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Ends it; those who wait go on."""
        self.error = error
        self._over.set()

    def wait(self, deadline: Deadline) -> bool:
        """Waits for the end.

        Returns:
            Whether it came before the deadline.
        """
        while not self._over.wait(deadline.left_s(_SLICE_S)):
            if deadline.has_passed:
                return False
        return True


def is_impatience(error: BaseException) -> bool:
    """Whether the work itself did not fail: the one who did it gave up."""
    return isinstance(error, AdapterLoadTimeout) or not isinstance(error, Exception)
