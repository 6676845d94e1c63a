"""What a PeftCacheManager with workers must do, in plain Python, one call after the other.

Pages, victims, loads and what they wait for are all predicted: after `settle` the model knows which
loads have ended, which are held by a gate, and which still wait for a thread or for pages. Calls
raise what the cache must raise, with the same fields, and change nothing then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.peft_model import ACTIVE, PAUSED, UNOWNED, WAITING, Tier

from pagedlora import (
    AdapterInUseError,
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    AdapterTooLargeError,
    InvalidArgumentError,
    LoraCacheFullError,
    PagedLoraError,
    PeftTaskNotCachedError,
    RequestConflictError,
)

BEHIND_WINDOW = 1 << 32
MAX_ABANDONED = 16
TIME_OUT = AdapterLoadTimeout


class JobStopped(Exception):  # noqa: N818 - how a load ends that nobody wants
    """The result of a load that was given up."""


@dataclass(eq=False)
class Use:
    """Of device pages: by a closed lease, or by a load that fills them beside the host's."""

    load: Job | None = None
    ended: bool = False

    @property
    def over(self) -> bool:
        """Whether others may write there."""
        return self.ended or (self.load is not None and self.load.over)


@dataclass(eq=False)
class Source:
    """What a fake source was told to do, and how often it was opened."""

    held: bool = False
    failure: type[Exception] | None = None  # of the next pass
    opens: int = 0


@dataclass(eq=False)
class Job:
    """A load: queued, then opened (or for a copy: on its thread), then moving bytes."""

    task: int
    source: Source | None = None  # None: a copy between the tiers
    waits: list[Job | Use] = field(default_factory=list)
    started: float = 0.0
    opened: bool = False
    moving: bool = False
    stopped: bool = False
    ended: bool = False  # as the manager sees it
    returned: bool = False  # its thread is free again
    error: type[Exception] | None = None

    @property
    def over(self) -> bool:
        """Whether it will not write any more."""
        return self.returned or (self.stopped and (self.source is not None or not self.moving))


@dataclass(eq=False)
class Workers:
    """Threads that take jobs in order; those of jobs that took too long are abandoned."""

    size: int
    queue: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    abandoned: list[Job] = field(default_factory=list)


@dataclass(eq=False)
class Entry:
    """A task in a tier."""

    pages: list[int]
    used: int
    resident: bool = False
    place: tuple[int, int] = (UNOWNED, 0)  # class, and distance where that counts
    pins: int = 0
    uses: list[Job | Use] = field(default_factory=list)

    def waits_behind(self, distance: int) -> bool:
        """Whether its turn comes after that of a task so far away."""
        return (WAITING, distance) < self.place < (PAUSED, 0)


class TierModel:
    """Entries, free pages, and what still goes on in pages that were given up."""

    def __init__(self, name: Tier, total: int) -> None:
        self.name, self.total = name, total
        self.free = set(range(total))
        self.entries: dict[int, Entry] = {}
        self.page_uses: dict[int, list[Job | Use]] = {}

    def is_resident(self, task: int) -> bool:
        """Whether it is there and complete."""
        return task in self.entries and self.entries[task].resident

    def evictable(self, distance: int | None = None) -> int:
        """Pages that could be freed, or with a distance: for the sake of a task so far away."""
        return sum(
            len(entry.pages)
            for entry in self.entries.values()
            if entry.pins == 0
            and (distance is None or entry.place[0] == UNOWNED or entry.waits_behind(distance))
        )

    def victim(self) -> int:
        """Who is given up next."""

        def order(task: int) -> tuple[int, int, int]:
            eviction_class, distance = self.entries[task].place
            if eviction_class == WAITING:
                return WAITING, -distance, task
            return eviction_class, self.entries[task].used, 0

        return min((task for task, entry in self.entries.items() if entry.pins == 0), key=order)

    def claim(self, task: int, pages: int, use: int) -> list[Job | Use]:
        """Takes the lowest free pages; returns what must end before they are written."""
        claimed = sorted(self.free)[:pages]
        self.free -= set(claimed)
        self.entries[task] = Entry(claimed, use)
        return [use for page in claimed for use in self.page_uses.get(page, ()) if not use.over]

    def remove(self, task: int) -> None:
        """The entry is absent; its uses stay with its pages."""
        entry = self.entries.pop(task)
        self.free |= set(entry.pages)
        for page in entry.pages:
            old = self.page_uses.get(page, [])
            self.page_uses[page] = [use for use in (*old, *entry.uses) if not use.over]


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


class ModelLoads:
    """Jobs, threads and gates: what happens by itself."""

    def __init__(self, put_workers: int, ensure_workers: int, limit: float, one_pass: bool) -> None:
        self.put, self.ensure = Workers(put_workers), Workers(ensure_workers)
        self.limit, self.one_pass = limit, one_pass
        self.now = 0.0
        self.finished: list[Job] = []
        self.copies_held = self.copy_fails = False
        self.copies = 0

    def settle(self) -> None:
        """Everything goes on as far as it can."""
        while any(self._go_on(workers) for workers in (self.put, self.ensure)):
            pass

    def _go_on(self, workers: Workers) -> bool:
        went_on = False
        while workers.queue and len(workers.running) < workers.size:
            job = workers.queue.pop(0)
            job.started = self.now
            workers.running.append(job)
        for threads in (workers.running, workers.abandoned):
            for job in list(threads):
                if self._run(job):
                    threads.remove(job)
                    went_on = True
        return went_on

    def _run(self, job: Job) -> bool:
        """Whether the job's thread is free again."""
        try:
            if self._copy(job) if job.source is None else self._read(job, job.source):
                return False
            error: type[Exception] | None = None
        except (JobStopped, PagedLoraError, RuntimeError) as caught:
            error = type(caught)
        job.returned = True
        if not job.ended:
            self._finish(job, error)
        return True

    def _finish(self, job: Job, error: type[Exception] | None) -> None:
        job.ended, job.error = True, error
        self.finished.append(job)

    def _read(self, job: Job, source: Source) -> bool:
        """Whether it waits."""
        if not job.opened:
            _check_wanted(job)
            _fail(source, AdapterNotFoundError)
            source.opens += 1
            job.opened = True
        if not job.moving:
            _check_wanted(job)
            job.moving = all(use.over for use in job.waits)
        if not job.moving or source.held:
            return True
        _fail(source, AdapterReadError)
        _check_wanted(job)
        _fail(source, AdapterSourceChangedError)
        return False

    def _copy(self, job: Job) -> bool:
        """Whether it waits."""
        if not job.moving:
            _check_wanted(job)
            if not all(use.over for use in job.waits):
                return True
            job.moving = True
            self.copies += 1
        if self.copies_held:
            return True
        if self.copy_fails:
            self.copy_fails = False
            raise RuntimeError
        return False

    def expire(self) -> None:
        """Ends the loads whose time is up."""
        for workers in (self.put, self.ensure):
            for job in list(workers.running):
                if not job.ended and self.now - job.started >= self.limit:
                    job.stopped = True
                    self._finish(job, TIME_OUT)
                    if len(workers.abandoned) < MAX_ABANDONED:
                        workers.running.remove(job)
                        workers.abandoned.append(job)

    @property
    def threads(self) -> list[Job]:
        """Jobs that a thread is in, wanted or not."""
        return [job for w in (self.put, self.ensure) for job in (*w.running, *w.abandoned)]

    def is_idle(self) -> bool:
        """Whether no load that anybody wants is queued or running."""
        jobs = [job for w in (self.put, self.ensure) for job in (*w.running, *w.queue)]
        return all(job.ended or job.stopped for job in jobs)


def _check_wanted(job: Job) -> None:
    if job.stopped:
        raise JobStopped


def _fail(source: Source, kind: type[Exception]) -> None:
    if source.failure is kind:
        source.failure = None
        raise kind("")


class AsyncPeftModel(ModelLoads):
    """The manager: tasks, owners, victims, leases."""

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

    # ---- loads

    def _submit(self, workers: Workers, job: Job, *tiers: TierModel) -> Job:
        for tier in tiers:
            tier.entries[job.task].uses.append(job)
        workers.queue.append(job)
        return job

    def _bring_into_host(self, task: int, source: Source | None, started: bool) -> None:
        host, record = self.host, self.records[task]
        if task in host.entries:
            self._use(host, task)
            return
        from_device = self.device.is_resident(task)
        if not from_device and source is None:
            raise PeftTaskNotCachedError("", task_id=task)
        revocable = self._revocable(started)
        self._check_room(host, record.pages, revocable=revocable)
        while record.pages > len(host.free) + host.evictable():
            self._revoke(revocable.pop(0))
        self._make_room(host, record.pages)
        self.uses += 1
        waits = host.claim(task, record.pages, self.uses)
        if from_device:
            job = Job(task, None, waits)
            record.host_job = self._submit(self.ensure, job, host, self.device)
        else:
            record.host_job = self._submit(self.put, Job(task, source, waits), host)
        self._update_class(task)

    def _claim_on_device(self, task: int) -> None:
        record = self.records[task]
        self.uses += 1
        record.waits = self.device.claim(task, record.pages, self.uses)
        record.copy_error = None
        self._update_class(task)

    def _fill_device(self, task: int) -> None:
        record = self.records[task]
        if self.host.is_resident(task):
            job = Job(task, None, record.waits)
            record.device_job = self._submit(self.ensure, job, self.device, self.host)
            return
        load = record.host_job  # writes the device's pages as well, if it is not too late
        if load is None or load.source is None or load.stopped or not self.one_pass:
            return
        if all(use.over for use in record.waits) and (load.error or not load.ended):
            record.device_job, record.device_use = load, Use(load)
            self.device.entries[task].uses.append(record.device_use)

    def is_current(self, job: Job) -> bool:
        """Whether a copy waits for the job's end."""
        record = self.records.get(job.task)
        return record is not None and job in (record.host_job, record.device_job)

    def ended(self) -> list[tuple[int, str, bool]]:
        """What an agree callback gets, sorted."""
        return sorted(
            (job.task, self._tier_of(job), job.error is None)
            for job in self.finished
            if self.is_current(job)
        )

    def _tier_of(self, job: Job) -> Tier:
        return "host" if self.records[job.task].host_job is job else "device"

    def poll(self, agreed: Iterable[tuple[int, str, bool]] | None = None) -> None:
        """Without `agreed` everything that has ended takes effect as it ended."""
        outcomes = None if agreed is None else {(task, tier): ok for task, tier, ok in agreed}
        for job in list(self.finished):
            if not self.is_current(job):
                self.finished.remove(job)
                continue
            error, where = job.error, (job.task, self._tier_of(job))
            if outcomes is not None:
                if where not in outcomes:
                    continue
                error = error or (None if outcomes[where] else PagedLoraError)
            self.finished.remove(job)
            self._apply(job, error)

    def _apply(self, job: Job, error: type[Exception] | None) -> None:
        task, record = job.task, self.records[job.task]
        on_host, on_device = record.host_job is job, record.device_job is job
        if on_device and error is None:
            record.device_job = None
            self.device.entries[task].resident = True
        elif on_device:
            self._fail_device(task, error)
        if on_host and error is not None:
            record.pins = 0
            self._fail_dependent(task, error)
            record.host_job = None
            self.host.remove(task)
            self._fail_owners(task, error)
        elif on_host:
            record.host_job = None
            self.host.entries[task].resident = True
            entry = self.device.entries.get(task)
            if entry is not None and not entry.resident and record.device_job is None:
                self._fill_device(task)
        self._forget_if_gone(task)

    def _fail_owners(self, task: int, error: type[Exception]) -> None:
        for request in [r for r, life in self.lives.items() if life.task == task]:
            del self.lives[request]
            self.failures[request] = (task, error)
            self.newly_failed.add(request)
        self._update_class(task)

    # ---- what callers ask for

    def prefetch(self, window: Iterable[int]) -> None:
        """Replaces the window, nearest first."""
        previous = self.window
        for task in previous:
            self.records[task].position = None
        self.window = [task for task in dict.fromkeys(window) if task in self.records]
        for position, task in enumerate(self.window):
            self.records[task].position = position
        for task in (*previous, *self.window):
            self._update_class(task)
        has_room = dict.fromkeys(self.tiers, True)
        for task in list(self.window):
            record = self.records.get(task)
            if record is None:
                continue
            if task not in self.host.entries:
                to_host = self.device.is_resident(task) or record.source is not None
                if to_host and record.pages <= self.device.total and has_room["host"]:
                    has_room["host"] = self._fits_for(self.host, record)
                    if has_room["host"]:
                        self._bring_into_host(task, record.source, started=False)
            elif self.host.is_resident(task) and task not in self.device.entries:
                has_room["device"] = has_room["device"] and self._fits_for(self.device, record)
                if has_room["device"]:
                    self._make_room(self.device, record.pages)
                    self._claim_on_device(task)
                    self._fill_device(task)

    def _fits_for(self, tier: TierModel, record: Record) -> bool:
        return record.pages <= len(tier.free) + tier.evictable(record.position)

    def pin(self, task: int) -> None:
        """One more user pin."""
        record = self._require(task)
        self._check_fits(record)
        if not record.pins:
            kept = max(self.largest, record.pages)
            left = self.host.total - self._pinned_pages()
            if record.pages + kept > left:
                needed = record.pages + kept
                raise LoraCacheFullError(
                    "", tier="host", needed_pages=needed, free_pages=left, evictable_pages=0
                )
            self._bring_into_host(task, record.source, started=False)
            self.host.entries[task].pins += 1
        record.pins += 1

    def unpin(self, task: int) -> None:
        """One user pin less."""
        record = self._require(task)
        if not record.pins:
            raise InvalidArgumentError("")
        record.pins -= 1
        if not record.pins:
            self.host.entries[task].pins -= 1

    def register(self, task: int, pages: int, source: Source) -> None:
        """A task with a source."""
        self.records[task] = Record(pages, source)
        self.largest = max(self.largest, pages)

    def unregister(self, task: int) -> None:
        """Forgets a task that nobody uses."""
        record = self.records.get(task)
        if record is None:
            return
        if self.has_owner(task) or record.pins or self._is_leased(task):
            num_owners = sum(life.task == task for life in self.lives.values())
            raise AdapterInUseError("", task_id=task, num_owners=num_owners)
        self._forget(task)

    def evict_unowned(self, name: Tier) -> None:
        """Gives up what has neither owners nor pins."""
        tier = self.tiers[name]
        for task in list(tier.entries):
            entry = tier.entries.get(task)
            if entry is not None and entry.pins == 0 and not self.has_owner(task):
                self._give_up(tier, task)
                self._forget_if_gone(task)

    def reset_device_cache(self) -> None:
        """All that is not leased counts as unowned."""
        for entry in self.device.entries.values():
            if entry.pins == 0:
                entry.place = (UNOWNED, 0)

    # ---- batches

    def begin_batch(self, requests: Iterable[int], reset: bool = False) -> Batch:
        """Claims; then `settle_batch` until it says so, then `end_batch`."""
        if self.inflight == 1:
            self.close_lease(*self.leases)
        elif len(self.leases) >= self.inflight:
            raise InvalidArgumentError("")
        batch = self.batch = Batch(list(requests))
        for request in batch.requests:
            if request in self.failures:
                batch.errors[request] = self.failures[request][1]
            elif request not in self.lives or self.lives[request].paused:
                batch.errors[request] = InvalidArgumentError
            else:
                task = self.lives[request].task
                batch.claimed[task] = task not in self.device.entries
        needed = sum(self.records[task].pages for task, new in batch.claimed.items() if new)
        present = [task for task, new in batch.claimed.items() if not new]
        kept = sum(self.records[task].pages for task in present if not self._is_leased(task))
        self._check_room(self.device, needed, kept)
        if reset:
            self.reset_device_cache()
        for task in present:
            self.device.entries[task].pins += 1
            self._update_class(task)
        self._make_room(self.device, needed)
        for task, is_new in batch.claimed.items():
            if is_new:
                self._claim_on_device(task)
                self.device.entries[task].pins += 1
                self._fill_device(task)
            else:
                self._use(self.device, task)
        batch.pinned = set(batch.claimed)
        self.hits += len(present)
        self.misses += len(batch.claimed) - len(present)
        return batch

    def unsettled(self, batch: Batch) -> list[int]:
        """Tasks of the batch whose device copy is still to come."""
        return [task for task in batch.pinned if not self.device.is_resident(task)]

    def settle_batch(self, batch: Batch) -> bool:
        """Applies the loads of the batch, and of nobody else, as they end; whether it is done."""
        while self.unsettled(batch):
            self.settle()
            if not self._apply_batch(batch):
                return False
        return True

    def _apply_batch(self, batch: Batch) -> bool:
        ended = [j for j in self.finished if self.is_current(j) and j.task in batch.claimed]
        for job in ended:
            self.finished.remove(job)
            self._apply(job, job.error)
        return bool(ended)

    def time_out_batch(self, batch: Batch) -> None:
        """Its loads have taken too long, and so has it."""
        self.now += self.limit
        self.expire()
        self._apply_batch(batch)
        for task in self.unsettled(batch):
            self.records[task].copy_error = TIME_OUT
            self.device.entries[task].pins -= 1
            batch.pinned.discard(task)
            if batch.claimed[task]:
                self._give_up(self.device, task)

    def end_batch(self, batch: Batch) -> None:
        """The batch becomes a lease of what is there."""
        batch.leased, batch.pinned = batch.pinned, set()
        for request in batch.requests:
            life = self.lives.get(request)
            if request in batch.errors:
                continue
            if life is not None and life.task in batch.leased:
                life.started = life.started or not life.paused
                self._update_class(life.task)
                continue
            copy_error = None if life is None else self.records[life.task].copy_error
            _, error = self.failures.get(request, (0, copy_error))
            batch.errors[request] = error or InvalidArgumentError
        self.leases.append(batch)

    def close_lease(self, *leases: Batch) -> None:
        """The leases' pins are gone; what the device still reads stays with the pages."""
        for lease in leases:
            self.leases.remove(lease)
            reads = Use()
            for task in lease.leased:
                entry = self.device.entries[task]
                entry.pins -= 1
                if self.holds_reads:
                    entry.uses.append(reads)
            self.reads.append(reads)

    def finish_reads(self) -> None:
        """The device is done with what closed leases read."""
        self.holds_reads = False
        for reads in self.reads:
            reads.ended = True
        self.reads.clear()

    def gauges(self) -> dict[str, int]:
        """TensorRT-LLM's, now."""
        tasks = {life.task for life in self.lives.values()}
        active = {task for task in tasks if self.owners(task, paused=False)}
        return {
            "devicePagesTotal": self.device.total,
            "devicePagesAvailable": len(self.device.free),
            "hostPagesTotal": self.host.total,
            "hostPagesAvailable": len(self.host.free),
            "deviceTasksInProgress": len(active & set(self.device.entries)),
            "deviceTasksDone": len(set(self.device.entries) - active),
            "activeTasks": len(active),
            "pausedTasks": sum(bool(self.owners(task, paused=True)) for task in tasks),
        }
