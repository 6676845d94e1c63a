"""Device pages that the adapters of one batch may take together."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pagedlora.errors import AdapterTooLargeError, PagedLoraError, PeftTaskNotCachedError
from pagedlora.scheduler.adapter_pages import TaskOnly
from pagedlora.scheduler.step import PeftManager


class PageBudget:
    """The distinct tasks of a batch and of open leases against the device tier.

    An adapter counts once, however many requests use it. One budget serves one pass.
    """

    def __init__(self, peft: PeftManager | None) -> None:
        """Counts the tasks of open leases.

        Args:
            peft: None: every adapter counts nothing.
        """
        self._peft = peft
        self._pages_of_task: dict[int, int] = {}
        self._limit = 0 if peft is None else peft.max_device_pages
        self._claimed: set[int] = set()
        self._pages = 0
        # A batch that is the only one in flight ends when the next one is ensured.
        if peft is not None and getattr(peft, "max_inflight_batches", 2) > 1:
            for task_id in peft.open_lease_tasks():
                with suppress(PeftTaskNotCachedError):  # closed, and forgotten, a moment ago
                    self.claim(TaskOnly(task_id))

    def pages_missing_for(self, request: Any) -> int:
        """Pages that the batch needs more with the request; 0 if its adapter is counted.

        Raises:
            AdapterTooLargeError: The tier could not hold the adapter alone.
            PagedLoraError: The manager does not know the adapter.
        """
        task_id = request.lora_task_id
        if self._peft is None or task_id is None or task_id in self._claimed:
            return 0
        if task_id not in self._pages_of_task:
            self._pages_of_task[task_id] = self._peft.determine_num_pages(request)
        pages = self._pages_of_task[task_id]
        if pages > self._limit:
            raise self._too_large(pages)
        return pages

    def fits(self, pages: int) -> bool:
        """Whether so many pages more are left."""
        return self._pages + pages <= self._limit or pages == 0

    def holds_all(self, requests: Iterable[Any]) -> bool:
        """Whether the tier could hold the adapters of all these at a time, beside those counted.

        What cannot be known of a request counts nothing.
        """
        if self._peft is None:
            return True
        pages = self._pages
        seen: set[int | None] = {None, *self._claimed}
        for request in requests:
            if request.lora_task_id not in seen:
                seen.add(request.lora_task_id)
                with suppress(PagedLoraError):
                    pages += self.pages_missing_for(request)
                if pages > self._limit:
                    return False
        return True

    def claim(self, request: Any) -> None:
        """Counts the request's adapter."""
        pages = self.pages_missing_for(request)
        if pages:
            self._pages += pages
            self._claimed.add(request.lora_task_id)

    def _too_large(self, pages: int) -> AdapterTooLargeError:
        page_bytes = int(getattr(self._peft, "page_bytes", 0))
        return AdapterTooLargeError(
            f"the adapter needs {pages} device pages of {page_bytes} bytes, but there are "
            f"{self._limit}; raise PeftCacheConfig.device_cache_size",
            tier="device",
            needed_pages=pages,
            total_pages=self._limit,
            page_bytes=page_bytes,
        )
