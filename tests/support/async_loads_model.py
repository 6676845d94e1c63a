"""Loads, threads, gates and the pages of tiers, as a PeftCacheManager must have them.

The lowest part of the model in async_peft_model.py: what happens by itself, between the calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.peft_model import PAUSED, UNOWNED, WAITING, Tier

from pagedlora import (
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    PagedLoraError,
)

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
