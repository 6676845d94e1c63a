"""A registry's lock, which no child process waits for."""

from __future__ import annotations

import threading

from pagedlora import _core


class ProcessLock:
    """A reentrant lock and its condition, of the process that made it.

    In a child that was forked from that process it may be held for ever, by a thread that is not
    there: taking it raises instead.
    """

    def __init__(self, what: str) -> None:
        """Starts open.

        Args:
            what: Begins the message of the error.
        """
        self._what = what
        self._process = _core.ProcessMark()
        self._changed = threading.Condition()

    def check(self) -> None:
        """Raises InvalidArgumentError in a child of the process that made this."""
        self._process.check(self._what)

    def __enter__(self) -> None:
        """Takes it.

        Raises:
            InvalidArgumentError: This is a child of the process that made it.
        """
        if not self._process.is_here:
            self.check()
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        """Gives it back."""
        self._changed.release()

    def wait(self, timeout_s: float) -> None:
        """Waits for `notify_all`, with the lock given back meanwhile; the caller holds it."""
        self._changed.wait(timeout_s)

    def notify_all(self) -> None:
        """Wakes those who wait; the caller holds the lock."""
        self._changed.notify_all()
