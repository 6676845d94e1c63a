"""The cache with workers, through its Python API: levels, polls, batches, windows, pins, closing.

Names quote the rules of the design: C of one tier, O of ownership, L of leases and loads. A
`ManualClock` stands still unless a test advances it: what could wait for time is called on a
thread.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.support.adapters import assert_same_weights, weights_of
from tests.support.cache_fixtures import (
    Cache,
    Call,
    FakeAdapter,
    fake_adapter,
    look_at_loads,
    wait_until,
)

from pagedlora import (
    AdapterInUseError,
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    AdapterTooLargeError,
    InvalidArgumentError,
    LeaseClosedError,
    LlmRequest,
    LoraCacheFullError,
    PagedLoraError,
    PeftCacheManager,
)
from pagedlora._core import BatchLease, FakeDevice, FakeSource, ManualClock

PAGES = 5  # of every adapter here
LIMIT_S = 10.0


@dataclass
class Bench:
    """A cache whose sources, copies and time do what a test says.

    Attributes:
        peft: The cache; adapters are its unit here.
        clock: Its time.
        device: Its device.
        adapters: By task.
    """

    peft: PeftCacheManager
    clock: ManualClock
    device: FakeDevice
    adapters: dict[int, FakeAdapter] = field(default_factory=dict)

    def register(self) -> int:
        """Another adapter."""
        adapter = fake_adapter(self.peft.model_config, rank=4, seed=len(self.adapters))
        task = self.peft.core.register_task(adapter.plan)
        assert self.peft.core.num_pages_of_task(task) == PAGES
        self.adapters[task] = adapter
        return task

    def register_late(self) -> int:
        """Another adapter, whose reads hang until they are released."""
        task = self.register()
        self.source(task).hold_reads()
        return task

    def source(self, task: int) -> FakeSource:
        """Where its bytes come from."""
        return self.adapters[task].source

    def add(self, request_id: int, task: int, *, started: bool = False) -> LlmRequest:
        """A request that owns the task."""
        request = LlmRequest(request_id, task, num_computed_tokens=int(started))
        self.peft.add_request_peft(request)
        return request

    def add_and_load(self, request_id: int, task: int, *, started: bool = False) -> LlmRequest:
        """A request whose adapter is there."""
        request = self.add(request_id, task, started=started)
        assert self.peft.wait_idle()
        assert self.peft.adapter_state(request) == "ready"
        return request

    def ensure(self, *requests: LlmRequest) -> BatchLease:
        """A batch of them."""
        return self.peft.ensure_batch(requests, [])

    def ended(self) -> list[tuple[int, str, bool]]:
        """Loads that have ended and have not taken effect."""
        return look_at_loads(self.peft)[0]

    def states(self, *requests: LlmRequest) -> list[str]:
        """Of each."""
        return [self.peft.adapter_state(request) for request in requests]

    def on_host(self, *tasks: int) -> list[bool]:
        """Which of them are resident there."""
        return [self.peft.is_task_cached(task) for task in tasks]

    def check_content(self, task: int, tier: Any = "host") -> None:
        """Fails unless the copy is what was registered."""
        expected = weights_of(self.adapters[task].tensors, torch.float16)
        assert_same_weights(self.peft.task_weights(task, tier), expected)


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(make_cache: Callable[..., Cache]) -> Iterator[MakeBench]:
    """Makes caches that hold so many adapters; at the end everything that hangs is released."""
    made: list[Bench] = []

    def make(host: int = 8, device: int = 8, *, one_pass: bool = False, **options: Any) -> Bench:
        clock, fake = ManualClock(), FakeDevice(is_host_memory=one_pass)
        cache = make_cache(
            torch.float16,
            host_pages=host * PAGES,
            device_pages=device * PAGES,
            page_bytes=256,
            shapes={"q_proj": (24, 40), "down_proj": (56, 24)},
            num_layers=1,
            clock=clock,
            device=fake,
            options={"load_timeout_s": LIMIT_S, **options},
        )
        made.append(Bench(cache.peft, clock, fake))
        return made[-1]

    yield make
    for bench in made:
        bench.device.release_copies()
        for adapter in bench.adapters.values():
            adapter.source.release_reads()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """Room for many."""
    return make_bench()


# ---- levels ------------------------------------------------------------------------------------


def test_o5_a_request_is_loading_until_a_poll_says_that_it_is_ready(bench: Bench) -> None:
    task = bench.register_late()
    request = LlmRequest(1, task)
    assert bench.states(request, LlmRequest(2)) == ["waiting", "ready"], "2 has no adapter"
    bench.add(1, task)
    bench.source(task).wait_for_reads(1)
    assert bench.peft.poll() == []
    assert bench.peft.free_pages("host") == 7 * PAGES, "claimed by the call"
    bench.source(task).release_reads()
    assert wait_until(lambda: len(bench.ended()) == 1)
    assert bench.states(request) == ["loading"], "nothing takes effect outside a call"
    assert bench.peft.poll() == []
    assert bench.states(request) == ["ready"]
    bench.check_content(task)
    bench.peft.mark_request_done(request)
    assert bench.states(request) == ["waiting"]


@pytest.mark.parametrize(
    ("fail", "error", "fields"),
    [
        ("fail_open", AdapterNotFoundError, {"name": "fake of rank 4, seed 0"}),
        ("fail_read_after", AdapterReadError, {"path": "fake of rank 4, seed 0", "errno": 5}),
        ("fail_finish", AdapterSourceChangedError, {"path": "fake of rank 4, seed 0"}),
    ],
)
def test_c1_a_failure_is_a_level_until_the_request_is_done(
    bench: Bench, fail: str, error: type[PagedLoraError], fields: dict[str, Any]
) -> None:
    task = bench.register()
    getattr(bench.source(task), fail)(*([0] if fail == "fail_read_after" else []))
    first, second = bench.add(1, task), bench.add(2, task)
    assert bench.peft.wait_idle()
    assert bench.peft.poll() == [1, 2]
    assert bench.peft.poll() == [], "told once, kept as a level"
    for _ in range(2):
        assert bench.states(first, LlmRequest(2)) == ["failed", "failed"], "whatever 2 says now"
        caught = bench.peft.adapter_error(first)
        assert type(caught) is error
        assert {name: getattr(caught, name) for name in fields} == fields
        assert type(bench.ensure(first).errors[1]) is error
        bench.add(1, task)  # changes nothing
        bench.peft.mark_request_done(first, pause=True)  # neither
    assert bench.peft.active_tasks == bench.peft.paused_tasks == {}
    assert bench.peft.free_pages("host") == 8 * PAGES
    third = bench.add_and_load(3, task)  # starts anew, and heals nobody
    assert bench.states(first, second, third) == ["failed", "failed", "ready"]
    bench.peft.mark_request_done(first)
    assert bench.states(first) == ["waiting"]
    assert bench.peft.adapter_error(first) is None
    bench.add_and_load(1, task)


def test_c4_a_time_out_is_an_error_of_its_own_and_frees_the_pages(bench: Bench) -> None:
    task = bench.register_late()
    request = bench.add(1, task)
    bench.source(task).wait_for_reads(1)
    bench.clock.advance(LIMIT_S / 2)
    assert bench.peft.poll() == []
    bench.clock.advance(LIMIT_S / 2)
    assert bench.peft.poll() == [1]
    error = bench.peft.adapter_error(request)
    assert isinstance(error, AdapterLoadTimeout)
    assert isinstance(error, TimeoutError)
    assert (error.limit_seconds, error.stuck_readers) == (LIMIT_S, 0)
    assert error.code == "adapter_load_timeout"
    assert "load_timeout_s" in str(error)
    assert bench.peft.free_pages("host") == 8 * PAGES
    bench.source(task).release_reads()
    bench.peft.mark_request_done(request)
    bench.add_and_load(1, task)
    bench.check_content(task)


def test_c4_beyond_sixteen_stuck_readers_loads_fail_at_once(make_bench: MakeBench) -> None:
    bench = make_bench(host=20, num_put_workers=1)
    for request_id in range(17):
        task = bench.register_late()
        bench.add(request_id, task)
        bench.source(task).wait_for_reads(1)
        bench.clock.advance(LIMIT_S)
        assert bench.peft.poll() == [request_id]
    healthy = bench.add(99, bench.register())
    assert bench.peft.poll() == [99]
    error = bench.peft.adapter_error(healthy)
    assert isinstance(error, AdapterLoadTimeout)
    assert error.stuck_readers == 17


def test_an_adapter_in_use_cannot_be_unregistered(bench: Bench) -> None:
    task = bench.register()
    unregister = bench.peft.core.unregister_task
    request = bench.add_and_load(1, task)
    bench.add(2, task)
    bench.peft.mark_request_done(LlmRequest(2), pause=True)
    with pytest.raises(AdapterInUseError) as owned:
        unregister(task)
    assert (owned.value.task_id, owned.value.num_owners) == (task, 2)
    lease = bench.ensure(request)
    bench.peft.mark_request_done(request)
    bench.peft.mark_request_done(LlmRequest(2))
    with pytest.raises(AdapterInUseError) as leased:
        unregister(task)
    assert leased.value.num_owners == 0
    lease.close()
    bench.peft.pin(task)
    with pytest.raises(AdapterInUseError):
        unregister(task)
    bench.peft.unpin(task)
    unregister(task)
    unregister(task)  # unknown now: ignored
    assert bench.peft.resident_tasks("host") == bench.peft.resident_tasks("device") == 0


# ---- poll --------------------------------------------------------------------------------------


def test_c5_poll_applies_what_the_ranks_agree_on(bench: Bench) -> None:
    tasks = [bench.register() for _ in range(3)]
    bench.source(tasks[2]).fail_open()
    requests = [bench.add(number, task) for number, task in enumerate(tasks)]
    assert wait_until(lambda: len(bench.ended()) == 3)
    assert bench.ended() == [(task, "host", task != tasks[2]) for task in tasks]
    assert bench.states(*requests) == ["loading"] * 3
    assert bench.peft.poll(agree=lambda _: [(tasks[0], "host", True)]) == []
    assert bench.states(*requests) == ["ready", "loading", "loading"]
    agreed = [(tasks[1], "host", False), (tasks[2], "host", True), (12345, "device", True)]
    assert bench.peft.poll(agree=lambda _: agreed) == [1, 2]
    assert bench.states(*requests) == ["ready", "failed", "failed"]
    assert "another rank" in str(bench.peft.adapter_error(requests[1]))
    assert type(bench.peft.adapter_error(requests[1])) is PagedLoraError
    assert isinstance(bench.peft.adapter_error(requests[2]), AdapterNotFoundError)


@pytest.mark.parametrize(
    ("agree", "error"),
    [
        (lambda _: 1 / 0, ZeroDivisionError),
        (lambda _: [(1, "disk", True)], InvalidArgumentError),
        (lambda _: "no outcomes", RuntimeError),
    ],
)
def test_c5_a_callback_that_raises_changes_nothing(
    bench: Bench, agree: Any, error: type[Exception]
) -> None:
    fine, broken = bench.register(), bench.register()
    bench.source(broken).fail_open()
    requests = bench.add(1, fine), bench.add(2, broken)
    for _ in range(2):
        with pytest.raises(error):
            bench.peft.poll(agree=agree)
        assert bench.states(*requests) == ["loading", "loading"]
        bench.peft.check_invariants()
    assert bench.peft.wait_idle()
    assert bench.states(*requests) == ["ready", "failed"]
    assert bench.peft.poll() == [2]


def test_c5_a_callback_may_call_the_cache(bench: Bench) -> None:
    first, second = bench.register(), bench.register()
    request = bench.add(1, first)
    bench.source(first).wait_for_reads(1)

    def agree(ended: list[tuple[int, str, bool]]) -> list[tuple[int, str, bool]]:
        if ended:
            bench.add(2, second)
            bench.peft.mark_request_done(bench.add(3, second))
            bench.peft.poll()  # applies it already
            assert bench.states(request) == ["ready"]
        return ended

    def poll_until_ready() -> bool:
        return bench.peft.poll(agree=agree) == [] and bench.states(request) == ["ready"]

    assert Call(wait_until, poll_until_ready).result()
    assert bench.peft.active_tasks == {first: {1}, second: {2}}


def test_c5_poll_waits_for_a_load_and_no_longer_than_it_is_told(bench: Bench) -> None:
    task = bench.register_late()
    request = bench.add(1, task)
    in_time = Call(bench.peft.poll, 5.0)
    bench.source(task).release_reads()
    assert in_time.result() == []  # the time stands still: it was the load
    assert bench.states(request) == ["ready"]
    late = bench.register_late()
    bench.add(2, late)
    in_vain = Call(bench.peft.poll, 5.0)

    def has_returned_later() -> bool:
        bench.clock.advance(0.5)
        return in_vain.has_returned

    assert wait_until(has_returned_later)
    assert in_vain.result() == []


def test_c1_who_is_done_before_the_poll_is_not_told_of(bench: Bench) -> None:
    task = bench.register()
    bench.source(task).fail_open()
    bench.add(1, task)
    assert bench.peft.wait_idle()  # the failure takes effect here
    bench.peft.mark_request_done(LlmRequest(1))
    bench.source(task).hold_reads()
    request = bench.add(1, task)  # the number is used again
    assert bench.peft.poll() == []
    assert bench.states(request) == ["loading"]


def test_a_time_may_be_infinite_but_not_negative(bench: Bench) -> None:
    task = bench.register_late()
    bench.add(1, task)
    for call in (bench.peft.poll, bench.peft.wait_idle):
        for wrong in (-1.0, math.nan):
            with pytest.raises(InvalidArgumentError):
                call(wrong)
    calls = [Call(bench.peft.poll, math.inf), Call(bench.peft.wait_idle, math.inf)]
    bench.clock.advance(LIMIT_S / 2)
    assert not any(call.has_returned for call in calls)
    bench.source(task).release_reads()
    assert [call.result() for call in calls] == [[], True]


# ---- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("one_pass", [False, True])
def test_o5_ensure_batch_waits_for_the_loads_of_its_tasks(
    make_bench: MakeBench, one_pass: bool
) -> None:
    bench = make_bench(one_pass=one_pass)
    task, other = bench.register_late(), bench.register_late()
    request = bench.add(1, task)
    bench.add(2, other)
    call = Call(bench.ensure, request)
    assert wait_until(lambda: bench.peft.stats.device.misses == 1)
    assert not call.has_returned
    bench.source(task).release_reads()
    lease = call.result()
    assert list(lease) == [1]
    assert bench.device.num_copies == int(not one_pass)
    bench.check_content(task, "device")
    bench.check_content(task, "host")
    assert bench.states(LlmRequest(2, other)) == ["loading"], "of no other task"


def test_l1_a_batch_gives_up_what_takes_too_long_and_leases_the_others(bench: Bench) -> None:
    task, late = bench.register(), bench.register_late()
    fine, request = bench.add_and_load(1, task), bench.add(2, late)
    bench.source(late).wait_for_reads(1)
    call = Call(bench.ensure, fine, request)
    assert wait_until(lambda: bench.peft.is_task_cached_device(task))
    bench.clock.advance(LIMIT_S)
    lease = call.result()
    assert list(lease) == [1]
    assert isinstance(lease.errors[2], AdapterLoadTimeout)
    assert lease.errors[2].limit_seconds == LIMIT_S
    assert bench.states(fine, request) == ["ready", "failed"]


def test_l1_a_copy_that_fails_is_an_error_of_its_requests(bench: Bench) -> None:
    request = bench.add_and_load(1, bench.register())
    bench.device.fail_copy_after(0)
    lease = bench.ensure(request)
    assert type(lease.errors[1]) is RuntimeError, "what the device threw"
    assert bench.states(request) == ["ready"], "its host copy is there"
    assert list(bench.ensure(request)) == [1]


def test_l2_as_many_leases_are_open_together_as_were_asked_for(make_bench: MakeBench) -> None:
    bench = make_bench(max_inflight_batches=2)
    tasks = [bench.register() for _ in range(3)]
    requests = [bench.add_and_load(number, task) for number, task in enumerate(tasks)]
    first, second = bench.ensure(requests[0]), bench.ensure(requests[0], requests[1])
    assert bench.peft.open_lease_tasks() == {tasks[0], tasks[1]}
    with pytest.raises(InvalidArgumentError, match="max_inflight_batches is 2"):
        bench.ensure(requests[2])
    assert first.is_open
    assert second.is_open
    assert not bench.peft.is_task_cached_device(tasks[2])
    second.close()
    assert bench.peft.open_lease_tasks() == {tasks[0]}
    third = bench.ensure(requests[2])
    assert bench.peft.open_lease_tasks() == {tasks[0], tasks[2]}
    del first
    third.close()
    assert bench.peft.open_lease_tasks() == set(), "a lease that nobody has is closed"


def test_l2_with_one_in_flight_the_next_batch_closes_the_lease(bench: Bench) -> None:
    requests = [bench.add_and_load(number, bench.register()) for number in range(2)]
    first = bench.ensure(requests[0])
    second = bench.ensure(requests[1])
    assert second.is_open
    assert bench.peft.open_lease_tasks() == {requests[1].lora_task_id}
    with pytest.raises(LeaseClosedError):
        _ = first[0]


# ---- prefetch and pins -------------------------------------------------------------------------


def test_l4_the_window_is_brought_in_nearest_first_and_never_gives_up_a_nearer_one(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=2, device=1)
    a, b, c = tasks = [bench.register() for _ in range(3)]

    def prefetch(*window: int) -> list[bool]:
        bench.peft.prefetch([LlmRequest(50 + task, task) for task in window])
        assert bench.peft.wait_idle()
        return bench.on_host(*tasks)

    assert prefetch(a, b, c) == [True, True, False], "c would take the place of a nearer one"
    assert prefetch(b, a, c) == [True, True, False]
    on_device = bench.peft.is_task_cached_device
    assert [on_device(task) for task in tasks] == [False, True, False], "once it is on the host"
    assert prefetch(c, b) == [False, True, True], "a is not in the window any more"
    assert prefetch(c, a) == [True, False, True], "nor is b"
    assert [on_device(task) for task in tasks] == [False, False, True], "the nearest one"
    assert prefetch() == [True, False, True]
    assert prefetch(12345, b) == [True, True, False], "unknown ones are ignored"


def test_l4_the_window_takes_nothing_from_who_is_started_paused_or_leased(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=2, device=1)
    a, b, c = (bench.register() for _ in range(3))
    started, paused = bench.add_and_load(1, a), bench.add_and_load(2, b)
    bench.ensure(started)
    bench.peft.mark_request_done(paused, pause=True)
    for _ in range(2):
        bench.peft.prefetch([LlmRequest(3, c), LlmRequest(2, b)])
        assert bench.peft.wait_idle()
        assert bench.on_host(a, b, c) == [True, True, False]
        assert bench.peft.is_task_cached_device(a)


def test_o2_a_pin_keeps_the_host_copy(make_bench: MakeBench) -> None:
    bench = make_bench(host=3)
    a, b, c = (bench.register() for _ in range(3))
    bench.peft.pin(a)
    bench.peft.pin(a)
    bench.peft.pin(b)
    with pytest.raises(LoraCacheFullError) as full:
        bench.peft.pin(c)  # it and the largest adapter would not fit beside them
    assert (full.value.tier, full.value.needed_pages, full.value.free_pages) == ("host", 10, 5)
    assert bench.peft.wait_idle()
    bench.peft.unpin(a)
    bench.peft.evict_unowned("host")
    assert bench.on_host(a, b) == [True, True]
    bench.peft.unpin(a)
    bench.peft.evict_unowned("host")
    assert bench.on_host(a, b) == [False, True]
    with pytest.raises(InvalidArgumentError, match="not pinned"):
        bench.peft.unpin(a)


def test_o2_a_pin_does_not_outlive_a_load_that_failed(bench: Bench) -> None:
    task = bench.register()
    bench.source(task).fail_open()
    bench.peft.pin(task)
    assert bench.peft.wait_idle()
    assert isinstance(bench.peft.core.load_error(task), AdapterNotFoundError)
    with pytest.raises(InvalidArgumentError, match="not pinned"):
        bench.peft.unpin(task)
    bench.peft.pin(task)
    assert bench.peft.core.load_error(task) is None, "another one was begun"
    assert bench.peft.wait_idle()
    bench.check_content(task)


def test_o3_an_adapter_that_does_not_fit_beside_the_pins_is_too_large(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=2)
    small = bench.register()
    bench.peft.pin(small)
    weights = fake_adapter(bench.peft.model_config, rank=8)
    with pytest.raises(AdapterTooLargeError) as caught:
        bench.peft.add_request_peft(LlmRequest(1, 7, weights))
    assert (caught.value.tier, caught.value.total_pages) == ("host", PAGES)


def test_o4_who_has_started_takes_the_place_of_the_latest_who_have_not(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=4)
    tasks = [bench.register() for _ in range(6)]
    started = bench.add_and_load(0, tasks[0])
    bench.ensure(started).close()
    paused = bench.add_and_load(1, tasks[1])
    bench.peft.mark_request_done(paused, pause=True)
    early, late = bench.add(2, tasks[2]), bench.add_and_load(3, tasks[3])
    with pytest.raises(LoraCacheFullError):
        bench.add(4, tasks[4])
    newcomer = bench.add_and_load(4, tasks[4], started=True)
    assert bench.states(started, paused, early, late) == ["ready", "ready", "ready", "waiting"]
    assert bench.peft.poll() == [], "that is no failure"
    another = bench.add_and_load(5, tasks[5], started=True)
    assert bench.states(early, newcomer, another) == ["waiting", "ready", "ready"]
    with pytest.raises(LoraCacheFullError) as full:
        bench.add(6, tasks[2], started=True)  # now all have started, or are paused
    assert full.value.evictable_pages == 0
    bench.peft.mark_request_done(started)
    bench.add_and_load(3, tasks[3])


# ---- counters ----------------------------------------------------------------------------------

COUNTERS = (
    *("requestsPaused", "requestsResumed", "requestsTerminated"),
    *("tasksReleasedDevice", "tasksReleasedHost"),
    *("tasksEvictedDevice", "pagesEvictedDevice", "tasksEvictedHost", "pagesEvictedHost"),
)
GAUGES = (
    *("devicePagesTotal", "devicePagesAvailable", "hostPagesTotal", "hostPagesAvailable"),
    *("deviceTasksInProgress", "deviceTasksDone", "activeTasks", "pausedTasks"),
)


def test_iteration_stats_count_each_transition_once(make_bench: MakeBench) -> None:
    bench = make_bench(host=2, device=1)
    stats, done = bench.peft.get_and_reset_iteration_stats, bench.peft.mark_request_done
    a, b, c = (bench.register() for _ in range(3))
    first, second, third = bench.add(1, a), bench.add(2, a), bench.add_and_load(3, b)

    def expect(**expected: int) -> None:
        found = stats()
        assert set(found) == {*COUNTERS, *GAUGES}
        assert len(found) == 17
        assert {name: found[name] for name in COUNTERS} == {
            name: expected.pop(name, 0) for name in COUNTERS
        }
        totals = {"devicePagesTotal": PAGES, "hostPagesTotal": 2 * PAGES, "hostPagesAvailable": 0}
        assert {name: found[name] for name in GAUGES} == {
            **dict.fromkeys(GAUGES, 0),
            **totals,
            **expected,
        }

    expect(devicePagesAvailable=PAGES, activeTasks=2)
    bench.ensure(first).close()
    for _ in range(2):
        bench.peft.mark_request_done(first, pause=True)
    expect(requestsPaused=1, deviceTasksInProgress=1, activeTasks=2, pausedTasks=1)
    done(second, pause=True)
    expect(requestsPaused=1, tasksReleasedDevice=1, deviceTasksDone=1, activeTasks=1, pausedTasks=1)
    for _ in range(2):
        bench.add(1, a)
    expect(requestsResumed=1, deviceTasksInProgress=1, activeTasks=2, pausedTasks=1)
    for _ in range(2):
        done(second)
        done(first)
    expect(
        requestsTerminated=2,
        tasksReleasedDevice=1,
        tasksReleasedHost=1,
        deviceTasksDone=1,
        activeTasks=1,
    )
    bench.ensure(third).close()
    expect(tasksEvictedDevice=1, pagesEvictedDevice=PAGES, deviceTasksInProgress=1, activeTasks=1)
    bench.add_and_load(4, c)
    expect(tasksEvictedHost=1, pagesEvictedHost=PAGES, deviceTasksInProgress=1, activeTasks=2)
    expect(deviceTasksInProgress=1, activeTasks=2)


# ---- closing, and the GIL ----------------------------------------------------------------------


def test_l8_close_gives_up_what_hangs_and_returns(make_bench: MakeBench) -> None:
    bench = make_bench(max_inflight_batches=2)
    peft, task = bench.peft, bench.register_late()
    fine, copied = bench.add_and_load(1, bench.register()), bench.add_and_load(2, bench.register())
    hanging = bench.add(3, task)
    bench.source(task).wait_for_reads(1)
    lease = bench.ensure(fine)
    bench.device.hold_copies()
    peft.prefetch([copied])
    batch, waiting = Call(bench.ensure, hanging), Call(peft.poll, 1e6)
    assert wait_until(lambda: peft.stats.device.misses == 2)
    for _ in range(2):
        Call(peft.close).result()
    waiting.result()
    with pytest.raises(InvalidArgumentError, match="closed"):
        batch.result()
    assert not lease.is_open
    assert bench.states(fine, hanging) == ["ready", "failed"]
    assert isinstance(peft.adapter_error(hanging), InvalidArgumentError)
    for call in (
        bench.register,
        lambda: bench.add(4, task),
        lambda: bench.ensure(fine),
        lambda: peft.prefetch([fine]),
        lambda: peft.pin(task),
    ):
        with pytest.raises(InvalidArgumentError, match="closed"):
            call()
    peft.mark_request_done(fine)
    assert peft.poll() == []


SETUP = """
import threading, time
from pagedlora import _core

config = _core.LoraModelConfig([_core.LoraModule("m", 8, 8)], _core.Dtype.float32, 4)
source = _core.FakeSource(bytes(256))
row = _core.PlannedRow(0, 4, 1.0, 0, _core.Dtype.float32, 128, _core.Dtype.float32)
device = _core.FakeDevice()
manager = _core.PeftCacheManager(
    config, host_cache_bytes=8192, device_cache_bytes=8192, page_bytes=1024, device=device
)
tasks = [manager.register_task(_core.AdapterPlan(config, [row], source)) for _ in range(3)]
"""


def run_script(script: str) -> list[str]:
    """Lines that it prints; fails if it hangs."""
    command = [sys.executable, "-c", SETUP + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_l8_the_gil_is_released_while_calls_wait() -> None:
    """In another process: a call that kept it would never come to its end."""
    lines = run_script("""
calls = [lambda: manager.ensure_batch([0]), lambda: manager.wait_idle(50), lambda: manager.poll(50)]
for number, (task, call) in enumerate(zip(tasks, calls)):
    source.hold_reads()
    manager.add_request_peft(number, task)
    thread = threading.Thread(target=call)
    thread.start()
    source.wait_for_reads(number + 1)
    for _ in range(20):  # goes on while the other thread waits
        time.sleep(0.001)
    print(thread.is_alive())
    source.release_reads()
    thread.join()
    print(manager.adapter_state(number))
""")
    assert lines == ["True", "ready"] * 3


def test_l8_giving_up_a_load_wakes_who_waits_for_it() -> None:
    """By the system's clock: who waits by a manual one looks at it again and again."""
    lines = run_script("""
calls = [lambda: manager.ensure_batch([0]), lambda: manager.wait_idle(50), lambda: manager.poll(50)]
source.hold_reads()
for number, call in enumerate(calls):
    manager.add_request_peft(0, tasks[0])
    thread = threading.Thread(target=call)
    thread.start()
    source.wait_for_reads(number + 1)
    time.sleep(0.02)
    manager.mark_request_done(0)
    manager.evict_unowned("host")
    thread.join(20)
    print(thread.is_alive())
""")
    assert lines == ["False"] * 3


def test_l8_dropping_a_manager_whose_loads_hang_does_not_hang_the_interpreter() -> None:
    lines = run_script("""
manager.add_request_peft(0, tasks[0])
manager.wait_idle(50)
device.hold_copies()
manager.prefetch([tasks[0]])
source.hold_reads()
manager.add_request_peft(1, tasks[1])
source.wait_for_reads(2)
del manager
print("dropped")
""")
    assert lines == ["dropped"]


def test_a_cache_takes_a_device_and_a_clock_and_no_other_names(bench: Bench) -> None:
    request = bench.add_and_load(1, bench.register())
    bench.ensure(request)
    assert bench.device.num_copies == 1
    with pytest.raises(InvalidArgumentError, match="only 'cpu'"):
        PeftCacheManager(bench.peft.model_config, device="cuda")
