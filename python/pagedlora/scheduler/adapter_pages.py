"""The pages of adapters that one scheduling pass may hand out, in both tiers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagedlora.errors import AdapterTooLargeError
from pagedlora.scheduler.capacity_inputs import CapacityRequest, PageManager, task_of


@dataclass(slots=True)
class _Claims:
    """Distinct tasks and the sum of their pages in a tier of `limit` pages; None: unbounded."""

    limit: int | None
    pages: int = 0
    tasks: set[int] = field(default_factory=set)

    def fits(self, task: int, pages: int) -> bool:
        return self.limit is None or task in self.tasks or self.pages + pages <= self.limit

    def add(self, task: int, pages: int) -> None:
        if task not in self.tasks:
            self.tasks.add(task)
            self.pages += pages


@dataclass(frozen=True)
class TaskOnly:
    """Stands for a task of a lease when no request of it is active."""

    lora_task_id: int
    request_id: int = -1
    lora_weights: None = None


class AdapterPages:
    """Counts every task once in each tier, however many requests share it. Lives for one pass.

    The device tier must hold the tasks of the batch, of requests that still hold their adapter
    and of open leases; what else lies there can be evicted. The host tier must hold the tasks of
    all requests in progress, scheduled or not: they are pinned until the request ends.
    """

    def __init__(self, peft: PageManager) -> None:
        """Starts with nothing claimed."""
        self._peft = peft
        self._device = _Claims(peft.max_device_pages)
        self._host = _Claims(getattr(peft, "max_host_pages", None))
        self._pages: dict[int, int] = {}
        self._errors: dict[int, Exception] = {}

    @property
    def bounds_host(self) -> bool:
        """Whether the host tier is bounded."""
        return self._host.limit is not None

    def error_of(self, request: CapacityRequest) -> Exception | None:
        """Why the request can never use its adapter, or None.

        The manager is asked once per task; after an error once per request, since another request
        may carry the weights that this one lacks.
        """
        task = task_of(request)
        if task is None:
            return None
        error = self._errors.get(request.request_id)
        if error is None and task not in self._pages:
            try:
                self._pages[task] = self._peft.determine_num_pages(request)
            except Exception as raised:
                error = self._errors[request.request_id] = raised
        return error if error is not None else self._too_large(request, self._pages[task])

    def fits(self, request: CapacityRequest) -> bool:
        """Whether both tiers have room for the request's adapter beside what is claimed.

        `error_of` must have said None before.
        """
        task = task_of(request)
        if task is None:
            return True
        pages = self._pages[task]
        return self._device.fits(task, pages) and self._host.fits(task, pages)

    def claim(self, request: CapacityRequest) -> None:
        """Takes pages in both tiers, whether or not they fit; none for an adapter with an error."""
        self.claim_host(request)
        task = task_of(request)
        if task in self._pages:
            self._device.add(task, self._pages[task])

    def claim_host(self, request: CapacityRequest) -> None:
        """Takes host pages only."""
        task = task_of(request)
        if task is not None and self.error_of(request) is None:
            self._host.add(task, self._pages[task])

    def claim_leases(self, requests: Iterable[CapacityRequest]) -> None:
        """Takes the device pages of open leases; `requests` tell the sizes of their own tasks."""
        open_lease_tasks = getattr(self._peft, "open_lease_tasks", None)
        tasks = set(open_lease_tasks()) if open_lease_tasks is not None else set()
        if not tasks:
            return
        for request in requests:
            task = task_of(request)
            if task is not None and task in tasks and self.error_of(request) is None:
                self._device.add(task, self._pages[task])
                tasks.remove(task)
        for task in tasks:
            if task not in self._pages:
                try:
                    self._pages[task] = self._peft.determine_num_pages(TaskOnly(task))
                except KeyError:
                    continue  # unknown: its lease was closed a moment ago
            self._device.add(task, self._pages[task])

    def _too_large(self, request: CapacityRequest, pages: int) -> AdapterTooLargeError | None:
        for tier, total in (("device", self._device.limit), ("host", self._host.limit)):
            if total is not None and pages > total:
                return AdapterTooLargeError(
                    f"the adapter of request {request.request_id} needs {pages} {tier} pages, but "
                    f"there are {total}; raise PeftCacheConfig.{tier}_cache_size",
                    tier=tier,
                    needed_pages=pages,
                    total_pages=total,
                    page_bytes=int(getattr(self._peft, "page_bytes", 0)),
                )
        return None
