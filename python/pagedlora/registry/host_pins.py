"""Keeps generations in the host tier for those who hold them, with one pin in the cache each."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pagedlora.errors import InvalidArgumentError
from pagedlora.registry.deadline import Deadline
from pagedlora.registry.flight import Flight, is_impatience
from pagedlora.registry.generations import Generation
from pagedlora.registry.process_lock import ProcessLock

if TYPE_CHECKING:
    from pagedlora.peft_cache import PeftCacheManager

_LOOK_EVERY_S = 0.05
"""A load that ends while others go on is noticed so late."""


class HostPins:
    """Holds of generations. Thread-safe; see each method for who holds the registry's lock.

    The cache drops its pins of a task whose load fails, without telling. So only what is resident
    counts as pinned: until it is, one call at a time brings a generation in.
    """

    def __init__(self, cache: PeftCacheManager, lock: ProcessLock) -> None:
        """Starts without holds.

        Args:
            cache: Has the tasks.
            lock: The registry's.
        """
        self._core = cache.core
        self._lock = lock

    def give_back(self, generation: Generation, count: int = 1) -> None:
        """Takes holds back; the last one takes the pin with it. The caller holds the lock."""
        generation.holds -= count
        if generation.holds == 0 and generation.is_pinned:
            generation.is_pinned = False
            self._unpin(generation)

    def bring_in(self, generation: Generation, deadline: Deadline) -> None:
        """Waits until a generation that the caller holds is resident and pinned.

        The caller does not hold the lock. If this raises, the caller still has its hold.

        Raises:
            AdapterLoadTimeout: The deadline has passed, or the load's own limit.
            PagedLoraError: The load failed, or there is no room for it.
        """
        while True:
            with self._lock:
                if generation.is_pinned:
                    return
                flight = generation.flight
                is_mine = flight is None
                if flight is None:
                    flight = generation.flight = Flight()
            if is_mine:
                self._fly(generation, flight, deadline)
                return
            if not flight.wait(deadline):
                raise deadline.error(generation.last_name)
            error = flight.error
            # The other call's patience may have ended before this one's.
            if error is not None and (deadline.has_passed or not is_impatience(error)):
                raise error

    def _fly(self, generation: Generation, flight: Flight, deadline: Deadline) -> None:
        error: BaseException | None = None
        try:
            self._load(generation, deadline)
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self._lock:
                generation.flight = None
                generation.is_pinned = error is None
            flight.finish(error)

    def _load(self, generation: Generation, deadline: Deadline) -> None:
        """Afterwards the task is resident with one more pin; or this raises, and it has none."""
        task_id = generation.task_id
        failures = self._core.stats.failed_loads
        self._core.pin(task_id)
        try:
            while True:
                if self._core.is_task_cached(task_id, "host"):
                    before, failures = failures, self._core.stats.failed_loads
                    if before == failures:
                        return
                    # If it was this task's load, its pin went with it, and another load followed.
                    self._unpin(generation)
                    self._core.pin(task_id)
                    continue
                error = self._core.load_error(task_id)
                if error is not None:
                    raise error
                if deadline.has_passed:
                    raise deadline.error(generation.last_name)
                self._core.wait_idle(deadline.left_s(_LOOK_EVERY_S))
        except BaseException:
            self._unpin(generation)
            raise

    def _unpin(self, generation: Generation) -> None:
        with suppress(InvalidArgumentError):  # a load that failed took the pin
            self._core.unpin(generation.task_id)
