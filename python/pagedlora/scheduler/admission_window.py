"""Which waiting requests may own their adapters before they run, and what is loaded ahead.

A request that owns its adapter has room for it in the host tier, and its load has begun. Owners
come from the front of the queue, so that what is loaded is what is needed next. One that finds no
room waits; those behind it may go ahead, but the first one refused is the head (S5):

- nothing behind it is brought into the host tier ahead of its time;
- after `max_skip_passes` passes that let others in ahead of it, nobody behind it is let in until
  it is.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

from pagedlora.arguments import refuse_requests, to_integer
from pagedlora.errors import LoraCacheFullError, PagedLoraError


class PeftQueueManager(Protocol):
    """What is used of a `PeftCacheManager`."""

    def add_request_peft(self, request: Any, try_gpu_cache: bool = True, /) -> None:
        """Makes the request an owner of its task, or raises and changes nothing."""

    def adapter_state(self, request: Any, /) -> str:
        """Says "waiting", "loading", "ready" or "failed"."""

    def prefetch(self, requests: Iterable[Any], /) -> None:
        """Brings in what these will need, next first."""


class AdmissionWindow:
    """The front of the queue, as far as adapters are concerned; see the module."""

    def __init__(
        self, peft_cache_manager: PeftQueueManager, *, size: int, max_skip_passes: int = 8
    ) -> None:
        """Starts without a head.

        Args:
            peft_cache_manager: The adapter caches.
            size: Requests looked at in a pass, at least 1: what a pass costs does not grow with the
                queue.
            max_skip_passes: Passes that may let others in ahead of the head.
        """
        to_integer(size, "size", 1)
        to_integer(max_skip_passes, "max_skip_passes", 0)
        self._peft = peft_cache_manager
        self._size = size
        self._max_skip_passes = max_skip_passes
        self._head: Any = None
        self._head_passes = 0
        self._refusal: LoraCacheFullError | None = None

    @property
    def head(self) -> tuple[Any, LoraCacheFullError] | None:
        """The first request refused for host space in the last pass, and why; None: all are in."""
        return None if self._refusal is None else (self._head, self._refusal)

    def update(self, waiting: Sequence[Any]) -> list[tuple[Any, PagedLoraError]]:
        """One pass: adds requests, then prefetches.

        Args:
            waiting: Live requests that do not run, those to run first in front.

        Returns:
            Requests whose adapter cannot be had at all, and why.
        """
        failed: list[tuple[Any, PagedLoraError]] = []
        try:
            window = [r for r in islice(waiting, self._size) if r.lora_task_id is not None]
        except (AttributeError, TypeError) as error:
            refuse_requests(waiting, "waiting", error, ("request_id", "lora_task_id"))
        wanted: list[Any] = []  # to be prefetched
        head, refusal, is_overtaken = None, None, False
        for request in window:
            if self._peft.adapter_state(request) != "waiting":
                wanted.append(request)
                continue
            if head is not None and self._is_past_bound(head):
                break
            try:
                self._peft.add_request_peft(request)
            except LoraCacheFullError as error:
                if head is None:
                    head, refusal = request, error
                    wanted.append(request)
            except PagedLoraError as error:
                failed.append((request, error))
            else:
                wanted.append(request)
                is_overtaken = head is not None
        self._note_head(head, refusal, is_overtaken)
        self._peft.prefetch(wanted)
        return failed

    def _is_past_bound(self, head: Any) -> bool:
        return head is self._head and self._head_passes >= self._max_skip_passes

    def _note_head(self, head: Any, refusal: LoraCacheFullError | None, is_overtaken: bool) -> None:
        if head is not self._head:
            self._head, self._head_passes = head, 0
        self._head_passes += is_overtaken
        self._refusal = refusal
