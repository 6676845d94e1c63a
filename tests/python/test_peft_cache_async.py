"""The cache with workers, through its Python API: levels, time-outs and polls.

Names quote the rules of the design: C of one tier, O of ownership, L of leases and loads.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.async_bench import LIMIT_S, PAGES, Bench, MakeBench
from tests.support.cache_fixtures import Call, fake_adapter, wait_until

from pagedlora import (
    AdapterInUseError,
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    InvalidArgumentError,
    LlmRequest,
    PagedLoraError,
    _core,
)

WRONG_TIMES = (-1.0, -1e-9, -math.inf, math.nan)


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
        (lambda _: "no outcomes", InvalidArgumentError),
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
        for wrong in WRONG_TIMES:
            with pytest.raises(InvalidArgumentError, match="give 0 or more seconds"):
                call(wrong)
    calls = [
        Call(call, forever)
        for call in (bench.peft.poll, bench.peft.wait_idle)
        for forever in (math.inf, 1e300)
    ]
    bench.clock.advance(LIMIT_S / 2)
    assert not any(call.has_returned for call in calls)
    bench.source(task).release_reads()
    assert [call.result() for call in calls] == [[], [], True, True]


def test_a_limit_may_be_infinite_but_not_negative(bench: Bench) -> None:
    def make(limit_s: float) -> _core.PeftCacheManager:
        return _core.PeftCacheManager(
            bench.peft.model_config,
            host_cache_bytes=8 * PAGES * 256,
            device_cache_bytes=8 * PAGES * 256,
            page_bytes=256,
            load_timeout_s=limit_s,
            clock=bench.clock,
        )

    for wrong in (*WRONG_TIMES, 0.0):
        with pytest.raises(InvalidArgumentError):
            make(wrong)
    adapter = fake_adapter(bench.peft.model_config)
    adapter.source.hold_reads()
    for forever in (math.inf, 1e300):
        cache = make(forever)
        cache.add_request_peft(1, cache.register_task(adapter.plan))
        assert wait_until(lambda: adapter.source.num_held > 0)
        bench.clock.advance(1e8)  # of more than three years
        assert cache.poll() == []
        assert cache.adapter_state(1) == "loading"
        adapter.source.release_reads()
        assert cache.wait_idle(math.inf)
        assert cache.adapter_state(1) == "ready"
        adapter.source.hold_reads()
