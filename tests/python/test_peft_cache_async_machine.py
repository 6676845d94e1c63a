"""Random walks over a cache with workers that are late, compared with a model after every step.

After each rule the cache is looked at until its loads have come as far as the model says that they
can; so both know what the next poll applies.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.async_loads_model import Source
from tests.support.async_owners_model import Record
from tests.support.async_peft_model import AsyncPeftModel
from tests.support.async_walk import (
    LIMIT_S,
    NUM_REQUESTS,
    RANKS,
    TOO_LARGE_RANK,
    UNKNOWN_TASK,
    Request,
    WalkedCache,
    assert_same_error,
    error_of,
)
from tests.support.cache_fixtures import Call, check_pages, fake_adapter
from tests.support.peft_model import Tier

from pagedlora import PeftCacheManager

pytestmark = pytest.mark.slow

requests = st.integers(0, NUM_REQUESTS - 1)
picks = st.integers(0, 8)
seldom = st.sampled_from((False,) * 4 + (True,))
troubles = st.sampled_from(("",) * 4 + ("late",) * 3 + ("open", "read", "finish"))


class AsyncPeftCacheMachine(WalkedCache, RuleBasedStateMachine):
    """The cache under test beside its model."""

    # ---- adapters ------------------------------------------------------------------------------

    @initialize(
        put_workers=st.sampled_from((1, 2, 32)),
        ensure_workers=st.sampled_from((1, 2, 32)),
        inflight=st.integers(1, 3),
        one_pass=st.booleans(),
    )
    def start(self, put_workers: int, ensure_workers: int, inflight: int, one_pass: bool) -> None:
        self.build(put_workers, ensure_workers, inflight, one_pass)
        for rank in RANKS:
            self.register(rank)
        for request in range(3):
            self.add_registered(request, pick=request, started=False, trouble="", again=False)
        self.poll()
        self.ensure([0, 1], how="release", reset=False, late=False, fail=False)

    @precondition(lambda self: any(source.held for source in self.sources.values()))
    @rule(pick=picks)
    def release_a_source(self, pick: int) -> None:
        held = [adapter for adapter, source in self.sources.items() if source.held]
        self.set_held(held[pick % len(held)], False)
        self.settle()

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

    @rule(request=requests, pause=st.sampled_from((True, True, False)))
    def pause_or_end(self, request: int, pause: bool) -> None:
        self.mark_done(self.live([request])[0], pause)

    @rule(window=st.lists(picks, max_size=5), late=st.booleans(), fail=seldom)
    def prefetch(self, window: list[int], late: bool, fail: bool) -> None:
        self.hold_copies(late)
        known = [*self.registered, 0, 1, 2, UNKNOWN_TASK]
        tasks = [known[pick % len(known)] for pick in window]
        self.arm(fail, lambda model: model.prefetch(tasks))
        self.prefetch_tasks(tasks)

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

    @precondition(lambda self: self.model.threads and self.can_time_pass)
    @rule(seconds=st.sampled_from((LIMIT_S / 2, LIMIT_S)))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.model.now += seconds
        self.model.expire()
        self.settle()

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


TestAsyncPeftCacheMachine = AsyncPeftCacheMachine.TestCase
TestAsyncPeftCacheMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
