"""What a PeftCacheManager with workers must do, in plain Python, one call after the other.

Pages, victims, loads and what they wait for are all predicted: after `settle` the model knows which
loads have ended, which are held by a gate, and which still wait for a thread or for pages. Calls
raise what the cache must raise, with the same fields, and change nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.support.async_loads_model import TIME_OUT, Job, Source, TierModel, Use, Workers
from tests.support.async_owners_model import Batch, ModelOwners, Record
from tests.support.peft_model import UNOWNED, Tier

from pagedlora import (
    AdapterInUseError,
    InvalidArgumentError,
    LoraCacheFullError,
    PagedLoraError,
    PeftTaskNotCachedError,
)

Outcome = tuple[int, Tier, bool]  # task, tier, loaded


class AsyncPeftModel(ModelOwners):
    """The manager: loads, prefetch, pins, leases."""

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

    def fills(self, job: Job, tier: Tier) -> bool:
        """Whether the job's end is the end of loading in this tier. It may be so in both."""
        record = self.records.get(job.task)
        if record is None:
            return False
        return (record.host_job if tier == "host" else record.device_job) is job

    def ended(self) -> list[Outcome]:
        """What an agree callback gets, sorted."""
        return sorted(
            (job.task, tier, job.error is None)
            for job in self.finished
            for tier in self.tiers
            if self.fills(job, tier)
        )

    def poll(self, agreed: Sequence[Outcome] | None = None) -> None:
        """Without `agreed` everything that has ended takes effect as it ended."""
        if agreed is None:
            self._settle_jobs(self.fills)
            return
        for task, tier, loaded in agreed:
            for job in self.finished:
                if job.task == task and self.fills(job, tier):
                    self._apply(job, tier, job.error or (None if loaded else PagedLoraError))
                    break
        self._settle_jobs(lambda _job, _tier: False)

    def _settle_jobs(self, wanted: Callable[[Job, Tier], bool]) -> bool:
        """Whether anything took effect."""
        is_any = False
        for job in list(self.finished):
            for tier in self.tiers:
                if self.fills(job, tier) and wanted(job, tier):
                    self._apply(job, tier, job.error)
                    is_any = True
            if not any(self.fills(job, tier) for tier in self.tiers):
                self.finished.remove(job)
        return is_any

    def _apply(self, job: Job, tier: Tier, error: type[Exception] | None) -> None:
        task, record = job.task, self.records[job.task]
        if tier == "device":
            self._apply_to_device(job, error)
        elif error is None:
            record.host_job = None
            self.host.entries[task].resident = True
            entry = self.device.entries.get(task)
            if entry is not None and not entry.resident and record.device_job is None:
                self._fill_device(task)
        elif job.source is None and record.source is not None:  # a refill: then from the source
            load = Job(task, record.source, [job])
            record.host_job = self._submit(self.put, load, self.host)
        else:
            record.pins = 0
            self._fail_dependent(task, error)
            record.host_job = None
            self.host.remove(task)
            self._fail_owners(task, error)
        self._forget_if_gone(task)

    def _apply_to_device(self, job: Job, error: type[Exception] | None) -> None:
        if error is not None:
            self._fail_device(job.task, error)
            return
        self.records[job.task].device_job = None
        self.device.entries[job.task].resident = True

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
        def is_awaited(job: Job, tier: Tier) -> bool:
            if job.task not in batch.claimed or self.device.is_resident(job.task):
                return False
            record = self.records[job.task]
            return tier == "device" or record.device_job in (None, record.host_job)

        return self._settle_jobs(is_awaited)

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
