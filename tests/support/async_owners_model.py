"""Who owns which task, and who is given up for whom, as a PeftCacheManager must have it.

The middle part of the model in async_peft_model.py. Bringing copies in is left to that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.async_loads_model import Job, ModelLoads, Source, TierModel, Use
from tests.support.peft_model import ACTIVE, PAUSED, UNOWNED, WAITING, Tier

from pagedlora import (
    AdapterTooLargeError,
    LoraCacheFullError,
    PagedLoraError,
    PeftTaskNotCachedError,
    RequestConflictError,
)

BEHIND_WINDOW = 1 << 32


@dataclass(eq=False)
class Record:
    """A task that is known; carried weights have a content and no source."""

    pages: int
    source: Source | None = None
    content: str = ""
    pins: int = 0
    position: int | None = None  # in the window
    host_job: Job | None = None
    device_job: Job | None = None
    device_use: Use = field(default_factory=Use)  # by a host job that is the device's as well
    waits: list[Job | Use] = field(default_factory=list)  # of a device entry without a job
    copy_error: type[Exception] | None = None


@dataclass
class Life:
    """A request that owns a task."""

    task: int
    started: bool
    paused: bool = False


@dataclass(eq=False)
class Batch:
    """A batch that is being ensured, and then its lease."""

    requests: list[int]
    errors: dict[int, type[Exception] | None] = field(default_factory=dict)
    claimed: dict[int, bool] = field(default_factory=dict)  # tasks, in order
    pinned: set[int] = field(default_factory=set)
    leased: set[int] = field(default_factory=set)


class ModelOwners(ModelLoads, ABC):
    """Tasks, owners, classes, and whose pages may be taken."""

    def __init__(
        self, host_pages: int, device_pages: int, page_bytes: int, *, inflight: int, **loads: Any
    ) -> None:
        super().__init__(**loads)
        self.host, self.device = TierModel("host", host_pages), TierModel("device", device_pages)
        self.tiers: dict[Tier, TierModel] = {"host": self.host, "device": self.device}
        self.page_bytes, self.inflight = page_bytes, inflight
        self.records: dict[int, Record] = {}
        self.lives: dict[int, Life] = {}  # active and paused requests
        self.failures: dict[int, tuple[int, type[Exception] | None]] = {}  # with their task
        self.owned_since: dict[int, int] = {}  # number of the add that made the first owner
        self.window: list[int] = []
        self.newly_failed: set[int] = set()  # what the next poll returns
        self.leases: list[Batch] = []
        self.batch = Batch([])  # that is being ensured
        self.counters: Counter[str] = Counter()  # TensorRT-LLM's, since they were last taken
        self.holds_reads = False
        self.reads: list[Use] = []
        self.largest = self.uses = self.adds = 0
        self.hits = self.misses = 0  # of batches

    # ---- owners

    def owners(self, task: int, *, paused: bool) -> set[int]:
        """The task's active, or its paused, requests."""
        return {r for r, life in self.lives.items() if life.task == task and life.paused == paused}

    def has_owner(self, task: int) -> bool:
        """Whether any request owns the task."""
        return any(life.task == task for life in self.lives.values())

    def has_started(self, task: int) -> bool:
        """Whether an active owner has."""
        return any(self.lives[request].started for request in self.owners(task, paused=False))

    def state(self, request: int) -> str:
        """What `adapter_state` says."""
        if request in self.failures:
            return "failed"
        if request not in self.lives:
            return "waiting"
        task = self.lives[request].task
        return "ready" if any(t.is_resident(task) for t in self.tiers.values()) else "loading"

    def task_of(self, request: int) -> int | None:
        """Task of an owner or a failed request."""
        if request in self.failures:
            return self.failures[request][0]
        return self.lives[request].task if request in self.lives else None

    def add(
        self, request: int, task: int, weights: Record | None = None, started: bool = False
    ) -> None:
        """`weights` is the record that the carried weights would make, with their source."""
        if self.task_of(request) not in (None, task):
            raise RequestConflictError("")
        if request in self.failures:
            return
        if weights is not None:
            self._admit(task, weights, started)
        record = self._require(task)
        self._check_fits(record)
        try:
            self._bring_into_host(task, weights.source if weights else record.source, started)
        except PagedLoraError:
            self._forget_if_gone(task)
            raise
        if not self.has_owner(task):
            self.host.entries[task].pins += 1
            self.adds += 1
            self.owned_since[task] = self.adds
        life = self.lives.setdefault(request, Life(task, started))
        self.counters["requestsResumed"] += life.paused
        life.paused = False
        self._update_class(task)
        self._use(self.device, task)

    def done(self, request: int, pause: bool = False) -> None:
        """Ends or pauses a request."""
        if not pause and request in self.failures:
            del self.failures[request]
            self.newly_failed.discard(request)
        life = self.lives.get(request)
        if life is None or (pause and life.paused):
            return
        was_last = self.owners(life.task, paused=False) == {request}
        self.counters["tasksReleasedDevice"] += was_last
        if pause:
            life.paused = life.started = True
            self.counters["requestsPaused"] += 1
        else:
            del self.lives[request]
            self.counters["requestsTerminated"] += 1
            if not self.has_owner(life.task):
                self.counters["tasksReleasedHost"] += 1
                self.host.entries[life.task].pins -= 1
        self._update_class(life.task)

    def _admit(self, task: int, weights: Record, started: bool) -> None:
        old = self.records.get(task)
        if old is not None and not old.content:
            raise RequestConflictError("")
        if old is not None and old.content == weights.content:
            return
        self._check_fits(weights)
        if old is not None:
            if self.has_owner(task) or old.pins or self._is_leased(task):
                raise RequestConflictError("")
            self._check_room(self.host, weights.pages, revocable=self._revocable(started))
            self._forget(task)
        self.largest = max(self.largest, weights.pages)
        self.records[task] = Record(weights.pages, content=weights.content)

    def _is_leased(self, task: int) -> bool:
        return task in self.device.entries and self.device.entries[task].pins > 0

    def _forget(self, task: int) -> None:
        for tier in self.tiers.values():
            if task in tier.entries:
                self._give_up(tier, task)
        if task in self.window:
            self.window.remove(task)
        del self.records[task]

    def _forget_if_gone(self, task: int) -> None:
        record = self.records.get(task)
        gone = not any(task in tier.entries for tier in self.tiers.values())
        if record is not None and record.content and gone and not self.has_owner(task):
            self._forget(task)

    def _require(self, task: int) -> Record:
        if task not in self.records:
            raise PeftTaskNotCachedError("", task_id=task)
        return self.records[task]

    # ---- room

    def _pinned_pages(self) -> int:
        return sum(record.pages for record in self.records.values() if record.pins)

    def _check_fits(self, record: Record) -> None:
        pinned = self._pinned_pages() - (record.pages if record.pins else 0)
        for tier, total in (("host", self.host.total - pinned), ("device", self.device.total)):
            if record.pages > total:
                sizes = {"total_pages": total, "page_bytes": self.page_bytes}
                raise AdapterTooLargeError("", tier=tier, needed_pages=record.pages, **sizes)

    def _check_room(
        self, tier: TierModel, pages: int, kept: int = 0, revocable: Sequence[int] = ()
    ) -> None:
        evictable = tier.evictable() - kept
        if pages > len(tier.free) + evictable:
            evictable += sum(self.records[task].pages for task in revocable)
        if pages > len(tier.free) + evictable:
            raise LoraCacheFullError(
                "",
                tier=tier.name,
                needed_pages=pages,
                free_pages=len(tier.free),
                evictable_pages=evictable,
            )

    def _make_room(self, tier: TierModel, pages: int) -> None:
        self._check_room(tier, pages)
        while len(tier.free) < pages:
            victim = tier.victim()
            self._give_up(tier, victim)
            self._forget_if_gone(victim)

    def _revocable(self, started: bool) -> list[int]:
        """Tasks whose owners, none of which has started, give way to who has; the latest first."""
        tasks = {life.task for life in self.lives.values()} if started else set()
        revocable = [
            task
            for task in tasks
            if not (self.owners(task, paused=True) or self.has_started(task))
            and not (self.records[task].pins or self._is_leased(task))
        ]
        return sorted(revocable, key=self.owned_since.__getitem__, reverse=True)

    def _revoke(self, task: int) -> None:
        for request in self.owners(task, paused=False):
            del self.lives[request]
        self.host.entries[task].pins -= 1
        self._update_class(task)

    def _give_up(self, tier: TierModel, task: int) -> None:
        record, pages = self.records[task], len(tier.entries[task].pages)
        name = tier.name.capitalize()
        self.counters[f"tasksEvicted{name}"] += 1
        self.counters[f"pagesEvicted{name}"] += pages
        if tier is self.host:
            self._fail_dependent(task, None)
            job, record.host_job = record.host_job, None
        else:
            job, record.device_job = record.device_job, None
        if job is not None and job is record.host_job:
            record.device_use.ended = True  # its host part goes on
        elif job is not None:
            job.stopped = True
        tier.remove(task)

    def _fail_dependent(self, task: int, error: type[Exception] | None) -> None:
        """A device copy that was to be made with the host copy, or of it, cannot be."""
        record, entry = self.records[task], self.device.entries.get(task)
        is_loading = entry is not None and not entry.resident
        if is_loading and record.device_job in (None, record.host_job):
            self._fail_device(task, error)

    def _fail_device(self, task: int, error: type[Exception] | None) -> None:
        self.records[task].device_job, self.records[task].copy_error = None, error
        self.device.remove(task)
        self.batch.pinned.discard(task)  # the pin goes with the copy

    def _update_class(self, task: int) -> None:
        record = self.records.get(task)
        if record is None:
            return
        place = (UNOWNED, 0) if record.position is None else (WAITING, record.position)
        if task in self.host.entries:
            self.host.entries[task].place = place
        if self.has_started(task):
            place = (ACTIVE, 0)
        elif self.owners(task, paused=True):
            place = (PAUSED, 0)
        elif self.has_owner(task) and record.position is None:
            place = (WAITING, BEHIND_WINDOW + self.owned_since[task])
        if task in self.device.entries:
            self.device.entries[task].place = place

    def _use(self, tier: TierModel, task: int) -> None:
        self.uses += 1
        if task in tier.entries:
            tier.entries[task].used = self.uses

    @abstractmethod
    def _bring_into_host(self, task: int, source: Source | None, started: bool) -> None:
        """Starts a load into the host tier, if the task is absent there."""
