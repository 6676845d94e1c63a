"""Random walks over a cache with workers that are late, compared with a model after every step.

After each rule the cache is looked at until its loads have come as far as the model says that they
can; so both know what the next poll applies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.adapters import assert_same_weights, weights_of
from tests.support.async_loads_model import Source
from tests.support.async_owners_model import Batch, Record
from tests.support.async_peft_model import AsyncPeftModel
from tests.support.cache_fixtures import (
    Call,
    FakeAdapter,
    build_cache,
    check_pages,
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
    PeftCacheManager,
)
from pagedlora._core import BatchLease, FakeDevice, ManualClock

pytestmark = pytest.mark.slow

SHAPES = {"q_proj": (24, 40), "down_proj": (56, 24)}
HOST_PAGES, DEVICE_PAGES, PAGE_BYTES = 36, 24, 256
RANKS = (4, 9, 2, 9, 4, 12)
TOO_LARGE_RANK = 22  # fits the host tier but not the device tier
LIMIT_S = 8.0
NUM_REQUESTS = 6
UNKNOWN_TASK = 77
NEVER = 2**31 - 1
MAX_STUCK = 14  # threads, so that loads are never refused at once

requests = st.integers(0, NUM_REQUESTS - 1)
picks = st.integers(0, 8)
seldom = st.sampled_from((False,) * 4 + (True,))
troubles = st.sampled_from(("",) * 4 + ("late",) * 3 + ("open", "read", "finish"))


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


class AsyncPeftCacheMachine(RuleBasedStateMachine):
    """The cache under test beside its model."""

    # ---- adapters ------------------------------------------------------------------------------

    @initialize(
        put_workers=st.sampled_from((1, 2, 32)),
        ensure_workers=st.sampled_from((1, 2, 32)),
        inflight=st.integers(1, 3),
        one_pass=st.booleans(),
    )
    def start(self, put_workers: int, ensure_workers: int, inflight: int, one_pass: bool) -> None:
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
        for rank in RANKS:
            self.register(rank)
        for request in range(3):
            self.add_registered(request, pick=request, started=False, trouble="", again=False)
        self.poll()
        self.ensure([0, 1], how="release", reset=False, late=False, fail=False)

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

    @precondition(lambda self: any(source.held for source in self.sources.values()))
    @rule(pick=picks)
    def release_a_source(self, pick: int) -> None:
        held = [adapter for adapter, source in self.sources.items() if source.held]
        self.set_held(held[pick % len(held)], False)
        self.settle()

    def hold_copies(self, hold: bool) -> None:
        if hold and not self.model.one_pass:
            self.device.hold_copies()
            self.model.copies_held = True

    @precondition(lambda self: self.model.copies_held)
    @rule(fail=seldom)
    def release_copies(self, fail: bool) -> None:
        held = [job for job in self.model.threads if job.source is None and job.moving]
        self.fail_next_copy(fail and len(held) == 1)
        self.device.release_copies()
        self.model.copies_held = False
        self.settle()

    # ---- requests ------------------------------------------------------------------------------

    @rule(request=requests, pick=picks, started=st.booleans(), trouble=troubles, again=seldom)
    def add_registered(
        self, request: int, pick: int, started: bool, trouble: str, again: bool
    ) -> None:
        """In the place of the request that had this number, or the same one again."""
        task = self.registered[pick % len(self.registered)]
        own = self.model.task_of(request)
        if again and own in self.registered:
            task = own
        elif request in (*self.model.lives, *self.model.failures):
            self.mark_done(request)
        self.make_trouble(self.adapters[task, ""], trouble)
        self.arm(trouble == "open", lambda model: model.add(request, task, None, started))
        self.add(Request(request, task, has_started=started))

    @rule(
        request=requests,
        task=st.sampled_from((0, 1)),
        content=st.tuples(st.sampled_from((1, 4, 9)), st.integers(1, 2)),  # rank and seed
        started=seldom,
        trouble=st.one_of(st.just("do not send"), troubles),
    )
    def add_carried(
        self, request: int, task: int, content: tuple[int, int], started: bool, trouble: str
    ) -> None:
        if trouble == "do not send":
            self.add(Request(request, task, has_started=started))
            return
        adapter = fake_adapter(self.config, *content)
        adapter = self.adapters.setdefault((task, adapter.source.description), adapter)
        source = self.sources.setdefault(adapter, Source())
        self.make_trouble(adapter, trouble)
        pages = self.peft.core.num_pages_of_plan(adapter.plan)
        weights = Record(pages, source, adapter.source.description)
        self.add(Request(request, task, adapter, started), weights)

    @rule(
        request=requests,
        pick=picks,
        what=st.sampled_from(("register", "unregister", "unknown", "carried", "too large")),
    )
    def register_or_ask_in_vain(self, request: int, pick: int, what: str) -> None:
        """A task comes or goes; or an unknown one, or weights for one that has a source."""
        task = self.registered[pick % len(self.registered)]
        if what == "unknown":
            self.add(Request(request, UNKNOWN_TASK))
        elif what == "carried":
            adapter = self.adapters[task, ""]
            weights = Record(1, self.sources[adapter], adapter.source.description)
            self.add(Request(request, task, adapter), weights)
        elif what == "unregister" and len(self.registered) > len(RANKS):
            expected = error_of(lambda: self.model.unregister(task))
            assert_same_error(error_of(lambda: self.peft.core.unregister_task(task)), expected)
            if expected is None:
                self.registered.remove(task)
            self.settle()
        elif len(self.registered) < 8:
            self.register(TOO_LARGE_RANK if what == "too large" else RANKS[pick % len(RANKS)])

    def add(self, request: Request, weights: Record | None = None) -> None:
        task, started = request.lora_task_id, request.has_started
        expected = error_of(
            lambda: self.model.add(request.request_id, task, weights, started),
        )
        assert_same_error(error_of(lambda: self.peft.add_request_peft(request)), expected)
        self.settle()

    @rule(request=requests, pause=st.sampled_from((True, True, False)))
    def pause_or_end(self, request: int, pause: bool) -> None:
        self.mark_done(self.live([request])[0], pause)

    def mark_done(self, request: int, pause: bool = False) -> None:
        self.peft.mark_request_done(Request(request), pause)
        self.model.done(request, pause)
        self.settle()

    @rule(window=st.lists(picks, max_size=5), late=st.booleans(), fail=seldom)
    def prefetch(self, window: list[int], late: bool, fail: bool) -> None:
        self.hold_copies(late)
        known = [*self.registered, 0, 1, 2, UNKNOWN_TASK]
        tasks = [known[pick % len(known)] for pick in window]
        self.arm(fail, lambda model: model.prefetch(tasks))
        self.prefetch_tasks(tasks)

    def prefetch_tasks(self, tasks: list[int]) -> None:
        self.peft.prefetch([Request(90 + i, task) for i, task in enumerate(tasks)])
        self.model.prefetch(tasks)
        self.settle()

    @rule(pick=picks, unpin=st.booleans())
    def pin_or_unpin(self, pick: int, unpin: bool) -> None:
        known = [*self.registered, 0, 1, 2]
        task, name = known[pick % len(known)], "unpin" if unpin else "pin"
        expected = error_of(lambda: getattr(self.model, name)(task))
        assert_same_error(error_of(lambda: getattr(self.peft, name)(task)), expected)
        self.settle()

    # ---- batches -------------------------------------------------------------------------------

    @rule(
        batch=st.lists(requests, min_size=1, max_size=4),
        stranger=seldom,
        poll=st.booleans(),
        how=st.sampled_from(("release", "time out", "pause", "forget", "prefetch")),
        special=st.sampled_from(("",) * 5 + ("reset", "late", "late", "fail")),
    )
    def step(self, batch: list[int], stranger: bool, poll: bool, how: str, special: str) -> None:
        """As an engine does it: finished loads take effect, then a batch of who is there."""
        if poll:
            self.poll()
        if 1 < self.model.inflight == len(self.model.leases) and not stranger:
            self.close_lease(batch[0], late=False)
        flags = {name: special == name for name in ("reset", "late", "fail")}
        self.ensure(batch if stranger else self.live(batch), how, **flags)

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

    @precondition(lambda self: self.leases)
    @rule(pick=picks, late=st.booleans())
    def close_lease(self, pick: int, late: bool) -> None:
        if late:
            self.device.hold_reads()
            self.model.holds_reads = True
        batch = list(self.leases)[pick % len(self.leases)]
        self.leases.pop(batch).close()
        if batch in self.model.leases:  # else another batch has ended it
            self.model.close_lease(batch)
        self.settle()

    @precondition(lambda self: self.model.holds_reads)
    @rule()
    def finish_reads_of_leases(self) -> None:
        self.device.finish_reads()
        self.model.finish_reads()
        self.settle()

    @rule(what=st.sampled_from(("host", "device", "reset")))
    def evict_unowned_or_reset(self, what: Tier | Literal["reset"]) -> None:
        caches: tuple[PeftCacheManager, AsyncPeftModel] = (self.peft, self.model)
        for peft in caches:
            if what == "reset":
                peft.reset_device_cache()
            else:
                peft.evict_unowned(what)
        self.settle()

    # ---- time ----------------------------------------------------------------------------------

    @rule(
        agree=st.sampled_from(("all", "some", "idle")),
        chosen=st.integers(0, 2**6 - 1),
        spoil=seldom,
    )
    def poll_as(self, agree: str, chosen: int, spoil: bool) -> None:
        """Applies all that has ended, or what ranks agree on."""
        model, agreed = self.model, None
        if agree == "some":
            agreed = [
                (task, tier, loaded and not spoil)
                for i, (task, tier, loaded) in enumerate(model.ended())
                if chosen >> i & 1
            ]
        if agree != "idle":
            self.poll(agreed)
            return
        model.poll()
        assert self.peft.wait_idle(0.0) == model.is_idle()
        self.settle()

    def poll(self, agreed: list[tuple[int, str, bool]] | None = None) -> None:
        self.model.poll(agreed)
        failed = self.peft.poll(agree=None if agreed is None else lambda _: agreed)
        assert sorted(failed) == sorted(self.model.newly_failed)
        self.model.newly_failed.clear()
        self.settle()

    @precondition(lambda self: self.model.threads and self.can_time_pass)
    @rule(seconds=st.sampled_from((LIMIT_S / 2, LIMIT_S)))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.now += seconds
        self.model.expire()
        self.settle()

    @property
    def can_time_pass(self) -> bool:
        """Every load that was begun was seen to begin, and not too many threads are stuck."""
        threads = self.model.threads
        return len(threads) < MAX_STUCK and all(job.opened or job.moving for job in threads)

    # ---- always --------------------------------------------------------------------------------

    @invariant()
    def owners_and_states_agree(self) -> None:
        model, peft = self.model, self.peft
        check_pages(peft)
        for paused, owners in ((False, peft.active_tasks), (True, peft.paused_tasks)):
            assert owners == {
                task: model.owners(task, paused=paused)
                for task in model.records
                if model.owners(task, paused=paused)
            }
        for request in range(NUM_REQUESTS):
            llm_request = Request(request)
            assert peft.adapter_state(llm_request) == model.state(request)
            started = request in model.lives and model.lives[request].started
            assert peft.core.has_started(request) == started
            error = model.failures.get(request, (0, type(None)))[1]
            assert type(peft.adapter_error(llm_request)) is error
        leased = {task for lease in model.leases for task in lease.leased}
        assert peft.open_lease_tasks() == leased

    @invariant()
    def tiers_agree(self) -> None:
        for name, tier in self.model.tiers.items():
            assert self.peft.free_pages(name) == len(tier.free)
            assert self.peft.resident_tasks(name) == len(tier.entries)
            for task in self.model.records:
                is_resident = tier.is_resident(task)
                assert self.peft.core.is_task_cached(task, name) == is_resident
                if is_resident and self.verified[name].get(task) is not tier.entries[task]:
                    self.check_content(task, name)
            self.verified[name] = {t: e for t, e in tier.entries.items() if e.resident}

    @invariant()
    def iteration_stats_agree(self) -> None:
        expected = {**self.model.gauges(), **self.model.counters}
        stats = self.peft.get_and_reset_iteration_stats()
        assert stats == {**dict.fromkeys(stats, 0), **expected}
        self.model.counters.clear()

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        self.release_everything()
        assert Call(self.peft.wait_idle).result()
        for name, tier in self.model.tiers.items():
            for task in [
                task for task in tier.entries if self.peft.core.is_task_cached(task, name)
            ]:
                self.check_content(task, name)
        for lease in self.leases.values():
            lease.close()
        for request in range(NUM_REQUESTS):
            self.peft.mark_request_done(Request(request))
        for task in self.model.records:
            while error_of(partial(self.peft.unpin, task)) is None:
                pass
        for name, tier in self.model.tiers.items():
            self.peft.evict_unowned(name)
            assert self.peft.free_pages(name) == tier.total
        Call(self.peft.close).result()
        check_pages(self.peft)

    # ---- helpers -------------------------------------------------------------------------------

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


TestAsyncPeftCacheMachine = AsyncPeftCacheMachine.TestCase
TestAsyncPeftCacheMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
