"""A cache with workers that are late, beside its model: what walks over both do, step by step.

After each step the cache is looked at until its loads have come as far as the model says that they
can; so both know what the next poll applies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import event
from tests.support.adapters import assert_same_weights, weights_of
from tests.support.async_loads_model import Source
from tests.support.async_owners_model import Batch, Record
from tests.support.async_peft_model import AsyncPeftModel
from tests.support.cache_fixtures import (
    Call,
    FakeAdapter,
    build_cache,
    fake_adapter,
    look_at_loads,
    wait_until,
)
from tests.support.peft_model import Tier

from pagedlora import (
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    PagedLoraError,
)
from pagedlora._core import BatchLease, FakeDevice, ManualClock

SHAPES = {"q_proj": (24, 40), "down_proj": (56, 24)}
HOST_PAGES, DEVICE_PAGES, PAGE_BYTES = 36, 24, 256
RANKS = (4, 9, 2, 9, 4, 12)
TOO_LARGE_RANK = 22  # fits the host tier but not the device tier
LIMIT_S = 8.0
NUM_REQUESTS = 6
UNKNOWN_TASK = 77
NEVER = 2**31 - 1
MAX_STUCK = 14  # threads, so that loads are never refused at once


@dataclass
class Request:
    """What the cache reads of a request."""

    request_id: int
    lora_task_id: int = 5
    lora_weights: FakeAdapter | None = None
    has_started: bool = False


def error_of(call: Callable[[], Any]) -> PagedLoraError | None:
    try:
        call()
    except PagedLoraError as error:
        return error
    return None


def assert_same_error(caught: PagedLoraError | None, expected: PagedLoraError | None) -> None:
    event(f"refused: {type(expected).__name__}" if expected else "accepted")
    assert type(caught) is type(expected)
    if expected is not None:
        assert {**vars(caught), "message": ""} == {**vars(expected), "message": ""}


class WalkedCache:
    """The cache under test and its model."""

    def build(self, put_workers: int, ensure_workers: int, inflight: int, one_pass: bool) -> None:
        """Makes both, empty."""
        self.clock, self.device = ManualClock(), FakeDevice(is_host_memory=one_pass)
        cache = build_cache(
            torch.float16,
            host_pages=HOST_PAGES,
            device_pages=DEVICE_PAGES,
            page_bytes=PAGE_BYTES,
            device=self.device,
            clock=self.clock,
            options={
                "num_put_workers": put_workers,
                "num_ensure_workers": ensure_workers,
                "max_inflight_batches": inflight,
                "load_timeout_s": LIMIT_S,
            },
            shapes=SHAPES,
            num_layers=1,
            max_lora_rank=TOO_LARGE_RANK,
        )
        self.config, self.peft = cache.config, cache.peft
        self.model = AsyncPeftModel(
            HOST_PAGES,
            DEVICE_PAGES,
            PAGE_BYTES,
            inflight=inflight,
            put_workers=put_workers,
            ensure_workers=ensure_workers,
            limit=LIMIT_S,
            one_pass=one_pass,
        )
        self.adapters: dict[tuple[int, str], FakeAdapter] = {}
        self.sources: dict[FakeAdapter, Source] = {}
        self.registered: list[int] = []
        self.leases: dict[Batch, BatchLease] = {}
        self.verified: dict[Tier, dict[int, Any]] = {"host": {}, "device": {}}

    def register(self, rank: int) -> None:
        adapter = fake_adapter(self.config, rank, seed=100 + len(self.sources))
        task = self.peft.core.register_task(adapter.plan)
        self.registered.append(task)
        self.adapters[task, ""] = adapter
        self.sources[adapter] = Source()
        pages = self.peft.core.num_pages_of_task(task)
        self.model.register(task, pages, self.sources[adapter])

    def make_trouble(self, adapter: FakeAdapter, trouble: str) -> None:
        """Its next pass is late or fails: when it is opened, read, or looked at at the end."""
        fake, source = adapter.source, self.sources[adapter]
        if trouble == "late":
            self.set_held(adapter, True)
        elif trouble and source.failure is None and self.num_held(source) < 2:
            fail, source.failure = {
                "open": (fake.fail_open, AdapterNotFoundError),
                "read": (lambda: fake.fail_read_after(0), AdapterReadError),
                "finish": (fake.fail_finish, AdapterSourceChangedError),
            }[trouble]
            fail()

    def hold_copies(self, hold: bool) -> None:
        if hold and not self.model.one_pass:
            self.device.hold_copies()
            self.model.copies_held = True

    def add(self, request: Request, weights: Record | None = None) -> None:
        task, started = request.lora_task_id, request.has_started
        expected = error_of(
            lambda: self.model.add(request.request_id, task, weights, started),
        )
        assert_same_error(error_of(lambda: self.peft.add_request_peft(request)), expected)
        self.settle()

    def mark_done(self, request: int, pause: bool = False) -> None:
        self.peft.mark_request_done(Request(request), pause)
        self.model.done(request, pause)
        self.settle()

    def prefetch_tasks(self, tasks: list[int]) -> None:
        self.peft.prefetch([Request(90 + i, task) for i, task in enumerate(tasks)])
        self.model.prefetch(tasks)
        self.settle()

    def live(self, numbers: list[int]) -> list[int]:
        """Requests that own a task, if there are any."""
        live = sorted(self.model.lives) or [0]
        return [live[number % len(live)] for number in numbers]

    def ensure(self, batch: list[int], how: str, *, reset: bool, late: bool, fail: bool) -> None:
        self.hold_copies(late)
        model, begun = self.model, []
        batch = [request for request in batch if not self.has_two_loads(request)]
        self.arm(fail, lambda clone: clone.settle_batch(clone.begin_batch(batch, reset)))
        expected = error_of(lambda: begun.append(model.begin_batch(batch, reset)))
        llm_requests = [Request(r, model.task_of(r) or 5) for r in batch]
        call = Call(self.peft.ensure_batch, llm_requests, [], reset)
        if expected is not None:
            assert_same_error(error_of(call.result), expected)
            self.settle()
            return
        if not model.settle_batch(begun[0]):
            self.settle()  # as far as it comes
            assert not call.has_returned
            self.unblock(begun[0], how)
        model.end_batch(begun[0])
        lease = self.leases[begun[0]] = call.result()
        assert set(lease) == set(batch) - set(begun[0].errors)
        assert {r: type(error) for r, error in lease.errors.items()} == begun[0].errors
        self.settle()

    def unblock(self, batch: Batch, how: str) -> None:
        """Brings an end to a batch that waits for something that is held."""
        model = self.model
        if how == "time out" and self.can_time_pass:
            event("batch: timed out")
            model.time_out_batch(batch)
            self.clock.advance(LIMIT_S)
            return
        event(f"batch: {how} while it waits")
        if how == "pause":
            self.peft.mark_request_done(Request(batch.requests[0]), True)
            model.done(batch.requests[0], True)
        elif how == "forget":  # what was loaded for them as well
            for request in batch.requests:
                self.peft.mark_request_done(Request(request))
                model.done(request)
            self.peft.evict_unowned("host")
            model.evict_unowned("host")
        elif how == "prefetch" and batch.pinned == set(batch.claimed):
            # Else it would load what failed in this batch once more, and the batch may see its end.
            self.prefetch_tasks(list(batch.claimed))
        self.release_everything()
        assert model.settle_batch(batch)

    def poll(self, agreed: list[tuple[int, str, bool]] | None = None) -> None:
        self.model.poll(agreed)
        failed = self.peft.poll(agree=None if agreed is None else lambda _: agreed)
        assert sorted(failed) == sorted(self.model.newly_failed)
        self.model.newly_failed.clear()
        self.settle()

    @property
    def can_time_pass(self) -> bool:
        """Every load that was begun was seen to begin, and not too many threads are stuck."""
        threads = self.model.threads
        return len(threads) < MAX_STUCK and all(job.opened or job.moving for job in threads)

    def settle(self) -> None:
        """Returns when the loads have come as far as the model says."""
        model = self.model
        failed: set[int] = set()
        model.settle()
        expected = (
            model.ended(),
            (model.copies, sum(job.source is None and job.moving for job in model.threads)),
            [(source.opens, self.num_held(source)) for source in self.sources.values()],
            (model.hits, model.misses),  # tell that a batch on another thread has begun
        )
        seen: list[Any] = []

        def look() -> bool:
            ended, told = look_at_loads(self.peft)
            failed.update(told)
            fakes = [adapter.source for adapter in self.sources]
            sources = [(fake.num_opens, fake.num_held) for fake in fakes]
            copies = (self.device.num_copies, self.device.num_held)
            stats = self.peft.stats.device
            seen[:] = ended, copies, sources, (stats.hits, stats.misses)
            return tuple(seen) == expected

        assert wait_until(look, patience_s=15), f"is at {seen}, should be at {expected}"
        assert failed == model.newly_failed
        model.newly_failed.clear()

    def num_held(self, source: Source) -> int:
        return sum(job.source is source and job.moving for job in self.model.threads)

    def set_held(self, adapter: FakeAdapter, hold: bool) -> None:
        source = self.sources[adapter]
        source.held = hold
        if hold:
            adapter.source.hold_reads()
            return
        if source.failure is AdapterReadError and self.num_held(source) > 1:
            adapter.source.fail_read_after(NEVER)  # whose read would it be?
            source.failure = None
        adapter.source.release_reads()

    def release_everything(self) -> None:
        for adapter in self.sources:
            self.set_held(adapter, False)
        self.device.finish_reads()
        self.model.finish_reads()
        self.device.release_copies()
        self.model.copies_held = False

    def arm(self, fail: bool, predict: Callable[[AsyncPeftModel], Any]) -> None:
        """Makes the copy of the next call fail, if it is the only one and is not held."""
        if not fail or self.model.copies_held:
            return
        clone = copy.deepcopy(self.model)
        if error_of(lambda: predict(clone)) is None:
            clone.settle()
            self.fail_next_copy(clone.copies == self.model.copies + 1)

    def fail_next_copy(self, fail: bool) -> None:
        if fail:
            event("a copy fails")
            self.device.fail_copy_after(0)
            self.model.copy_fails = True

    def has_two_loads(self, request: int) -> bool:
        """Whether its batch, if it waits, may or may not see the end of a load it does not need."""
        life = self.model.lives.get(request)
        if life is None:
            return False
        record = self.model.records[life.task]
        if record.host_job is None or record.host_job.ended:
            return False
        is_there = self.model.device.is_resident(life.task)
        return is_there or record.device_job not in (None, record.host_job)

    def check_content(self, task: int, tier: Tier) -> None:
        adapter = self.adapters[task, self.model.records[task].content]
        expected = weights_of(adapter.tensors, torch.float16)
        assert_same_weights(self.peft.task_weights(task, tier), expected)
