"""A PEFT cache manager that keeps no bytes: it counts pages, records calls and fails on command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedlora.errors import LoraCacheFullError, PagedLoraError, PeftTaskNotCachedError


class RecordedLease:
    """A lease of nothing.

    Attributes:
        request_ids: Requests whose adapters it holds.
        errors: Requests that it does not hold, and why.
        closed: Whether `close()` was called.
        stream: On which it was closed.
    """

    def __init__(self, request_ids: Sequence[int], errors: Mapping[int, PagedLoraError]) -> None:
        self.request_ids = list(request_ids)
        self.errors = dict(errors)
        self.closed = False
        self.stream: int | None = None

    def close(self, stream: int | None = None) -> None:
        """Ends the lease."""
        self.closed = True
        self.stream = stream


class RecordedPeftManager:
    """Counts pages per task in two tiers, with owners, and no memory behind them.

    Attributes:
        calls: (method, request id) in call order: "add", "pause", "done".
        owners: Task to the ids of the requests that added it, the paused ones among them.
        paused: Ids of the requests that are paused.
        loading: Tasks whose load does not end yet.
        load_errors: Task to the error with which its load ends, in the next poll.
        prefetched: Ids of the last window.
        leased_elsewhere: Tasks of leases that others hold.
        add_errors: Task to the error that its next adds raise.
        ensure_errors: Task to the error that its requests get in `ensure_batch`.
        leases: All leases, oldest first.
    """

    def __init__(
        self, pages: Mapping[int, int], *, device_pages: int, host_pages: int = 10**9
    ) -> None:
        """Starts empty.

        Args:
            pages: Task to its pages; other tasks are unknown.
            device_pages: Of the device tier.
            host_pages: Of the host tier; owned tasks are pinned there.
        """
        self._pages = dict(pages)
        self._host_pages = host_pages
        self.max_device_pages = device_pages
        self.page_bytes = 64
        self.calls: list[tuple[str, int]] = []
        self.owners: dict[int, set[int]] = {}
        self.paused: set[int] = set()
        self.failed: dict[int, PagedLoraError] = {}
        self.loading: set[int] = set()
        self.load_errors: dict[int, PagedLoraError] = {}
        self.prefetched: list[int] = []
        self.leased_elsewhere: set[int] = set()
        self.add_errors: dict[int, PagedLoraError] = {}
        self.ensure_errors: dict[int, PagedLoraError] = {}
        self.leases: list[RecordedLease] = []

    @property
    def pinned_host_pages(self) -> int:
        """Host pages of owned tasks."""
        return sum(self._pages[task] for task in self.owners)

    def determine_num_pages(self, request: Any) -> int:
        """Pages of the request's task."""
        pages = self._pages.get(request.lora_task_id)
        if pages is None:
            raise PeftTaskNotCachedError("unknown task", task_id=request.lora_task_id)
        return pages

    def add_request_peft(self, request: Any, try_gpu_cache: bool = True) -> None:
        """Adds an owner; LoraCacheFullError if the host tier has no room beside owned tasks."""
        task = request.lora_task_id
        self.calls.append(("add", request.request_id))
        if task in self.add_errors:
            raise self.add_errors[task]
        needed = 0 if task in self.owners else self.determine_num_pages(request)
        free = self._host_pages - self.pinned_host_pages
        if needed > free:
            raise LoraCacheFullError(
                "host tier is full",
                tier="host",
                needed_pages=needed,
                free_pages=free,
                evictable_pages=0,
            )
        self.owners.setdefault(task, set()).add(request.request_id)
        self.paused.discard(request.request_id)

    def adapter_state(self, request: Any) -> str:
        """As the real one's."""
        task = request.lora_task_id
        if request.request_id in self.failed:
            return "failed"
        if task is None:
            return "ready"
        if request.request_id not in self.owners.get(task, ()):
            return "waiting"
        return "loading" if task in self.loading else "ready"

    def adapter_error(self, request: Any) -> PagedLoraError | None:
        """Why its load failed."""
        return self.failed.get(request.request_id)

    def poll(self, timeout_s: float = 0.0) -> list[int]:
        """Loads that fail do so now."""
        failed: list[int] = []
        for task, error in self.load_errors.items():
            for request_id in sorted(self.owners.pop(task, ())):
                self.failed[request_id] = error
                self.paused.discard(request_id)
                failed.append(request_id)
        return failed

    def prefetch(self, requests: Iterable[Any]) -> None:
        """Remembers the window."""
        self.prefetched = [request.request_id for request in requests]

    def open_lease_tasks(self) -> set[int]:
        """Tasks of leases that others hold."""
        return self.leased_elsewhere

    def mark_request_done(self, request: Any, pause: bool = False) -> None:
        """Removes an owner, or pauses it."""
        self.calls.append(("pause" if pause else "done", request.request_id))
        if pause:
            assert request.request_id in self.owners.get(request.lora_task_id, ()), "no owner"
            self.paused.add(request.request_id)
            return
        self.paused.discard(request.request_id)
        self.failed.pop(request.request_id, None)
        owners = self.owners.get(request.lora_task_id, set())
        owners.discard(request.request_id)
        if not owners:
            self.owners.pop(request.lora_task_id, None)

    def ensure_batch(self, context: Sequence[Any], generation: Sequence[Any]) -> RecordedLease:
        """Leases the tasks of the batch, which must fit the device together."""
        requests = [r for r in (*context, *generation) if r.lora_task_id is not None]
        for request in requests:
            assert request.request_id in self.owners[request.lora_task_id]
            assert request.request_id not in self.paused, "a paused request is in a batch"
        used = sum(self._pages[task] for task in {r.lora_task_id for r in requests})
        assert used <= self.max_device_pages, "the scheduler overspent the device tier"
        errors = {
            r.request_id: self.ensure_errors[r.lora_task_id]
            for r in requests
            if r.lora_task_id in self.ensure_errors
        }
        held = [r.request_id for r in requests if r.request_id not in errors]
        self.leases.append(RecordedLease(held, errors))
        return self.leases[-1]

    def count(self, method: str, request_id: int) -> int:
        """How often a method was called for a request."""
        return self.calls.count((method, request_id))
