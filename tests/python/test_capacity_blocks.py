"""KV blocks, order and precedence in the whole-request scheduler. Blocks hold 4 tokens here."""

from __future__ import annotations

import pytest
from tests.support.whole_request_engine import Engine, Request, ids, scheduled, started

from pagedlora import CapacityScheduler, KVCacheManager

NO_EVICT = ("guaranteed_no_evict", "static_batch")


# --- without eviction


@pytest.mark.parametrize("policy", NO_EVICT)
def test_a_request_starts_only_if_it_can_run_to_its_end(policy: str) -> None:
    engine = Engine(policy, blocks=4)
    first, second, third = (Request(i, max_tokens=4) for i in range(3))
    assert scheduled(engine, first, second, third) == [0, 1]
    assert engine.scheduler.tokens_to_allocate(first) == 8


def test_blocks_that_a_started_request_still_needs_are_not_given_away() -> None:
    engine = Engine("guaranteed_no_evict", blocks=4)
    running = started(engine, Request(0, max_tokens=8), 4)
    assert scheduled(engine, running, Request(1)) == [0]
    assert scheduled(engine, running, Request(1, prompt=2, max_tokens=2)) == [0, 1]
    assert scheduled(engine, running, Request(1), inflight=(0,)) == []
    assert scheduled(engine, running, Request(1, prompt=2, max_tokens=2), inflight=(0,)) == [1]


@pytest.mark.parametrize("policy", NO_EVICT)
def test_a_block_misfit_ends_the_pass(policy: str) -> None:
    engine = Engine(policy, {7: 1}, blocks=4)
    requests = [Request(0), Request(1, max_tokens=8), Request(2, 7, prompt=1, max_tokens=1)]
    assert scheduled(engine, *requests) == [0]
    assert engine.peft.asked == []


@pytest.mark.parametrize("policy", ["max_requests", "guaranteed_no_evict"])
def test_requests_in_progress_go_first_whatever_their_place(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2}, device_pages=3, blocks=4, max_num_requests=2)
    running = started(engine, Request(2, 2))
    requests = [Request(0, 1), Request(1, max_tokens=4), running]
    assert scheduled(engine, *requests) == [1, 2]


@pytest.mark.parametrize("policy", ["max_requests", *NO_EVICT])
def test_requests_in_progress_are_taken_whatever_the_pages(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2}, device_pages=3)
    running = [started(engine, Request(0, 1)), started(engine, Request(1, 2))]
    assert scheduled(engine, *running) == [0, 1]


@pytest.mark.parametrize("policy", ["max_requests", *NO_EVICT, "max_utilization"])
def test_no_more_requests_run_than_allowed_even_of_those_in_progress(policy: str) -> None:
    engine = Engine(policy, max_num_requests=2)
    running = [started(engine, Request(i)) for i in range(3)]
    assert scheduled(engine, Request(9, prompt=1), *running) in ([0, 1], [9, 0])
    assert scheduled(engine, *running) == [0, 1]


def test_a_request_that_owns_blocks_is_not_stopped_by_one_that_waits_for_them() -> None:
    engine = Engine("guaranteed_no_evict", blocks=3)
    owner = Request(1)
    assert engine.kv.try_allocate(owner, 8)
    assert scheduled(engine, Request(0), owner) == [1]


def test_a_static_batch_lets_nobody_in_until_it_is_over() -> None:
    engine = Engine("static_batch", max_num_requests=2)
    engine.active = [Request(i, max_tokens=tokens) for i, tokens in enumerate((2, 5, 3))]
    engine.run()
    assert [engine.steps_of(i) for i in range(3)] == [(0, 2), (0, 5), (5, 8)]


def test_a_static_batch_waits_for_requests_in_flight() -> None:
    engine = Engine("static_batch")
    running = started(engine, Request(0))
    assert scheduled(engine, running, Request(1), inflight=(0,)) == []


def test_a_static_batch_follows_one_that_completes() -> None:
    engine = Engine("static_batch")
    completing = started(engine, Request(0))
    completing.state = "generation_to_complete"
    assert scheduled(engine, completing, Request(1)) == [1]


def test_max_requests_needs_no_kv_manager() -> None:
    requests = [Request(i) for i in range(5)]
    for kv in (None, KVCacheManager(1, 1)):
        scheduler = CapacityScheduler("max_requests", 3, kv)
        assert ids(scheduler.schedule_request(requests).scheduled) == [0, 1, 2]
        assert ids(scheduler.schedule_request(requests[1:], {1, 2}).scheduled) == [3]


# --- maximal utilisation


def test_a_step_takes_the_blocks_of_the_step_only() -> None:
    engine = Engine("max_utilization", blocks=3)
    assert scheduled(engine, *(Request(i, max_tokens=8) for i in range(4))) == [0, 1, 2]


def test_the_blocks_of_a_step_hold_what_was_dropped() -> None:
    engine = Engine("max_utilization", blocks=3)
    paused = Request(0, prompt=4, max_tokens=8, output_token_ids=[0] * 5, state="paused")
    assert engine.scheduler.tokens_to_allocate(paused) == 9
    assert scheduled(engine, paused, Request(1, prompt=1)) == [0]


def test_s3_the_last_started_request_gives_its_blocks() -> None:
    engine = Engine("max_utilization", blocks=3)
    running = [started(engine, Request(i)) for i in range(3)]
    decision = engine.scheduler.schedule_request(running)
    assert (ids(decision.scheduled), ids(decision.paused)) == ([0], [2])
    # 1 finds no block: those of 2 went to 0. It keeps its own, and goes on when there are more.


def test_no_more_are_paused_than_needed() -> None:
    engine = Engine("max_utilization", blocks=5)
    running = [started(engine, Request(0)), started(engine, Request(1), 7)]
    running.append(started(engine, Request(2), 6))
    decision = engine.scheduler.schedule_request(running)
    assert (ids(decision.scheduled), ids(decision.paused)) == ([0, 1], [2])


def test_s3_requests_that_wait_give_nothing() -> None:
    engine = Engine("max_utilization", blocks=2)
    requests = [started(engine, Request(0), 7), Request(1), Request(2)]
    decision = engine.scheduler.schedule_request(requests)
    assert (ids(decision.scheduled), decision.paused) == ([0], [])


def test_s3_a_request_never_yields_to_lower_priority() -> None:
    engine = Engine("max_utilization", blocks=2)
    low = started(engine, Request(0, priority=0))
    high = started(engine, Request(1, priority=1), 3)
    decision = engine.scheduler.schedule_request([low, high])
    assert (ids(decision.scheduled), decision.paused) == ([1], [])


def test_s3_lower_priority_yields_even_ahead_in_the_list() -> None:
    engine = Engine("max_utilization", blocks=2)
    low = started(engine, Request(0, priority=0))
    high = started(engine, Request(1, priority=1))
    decision = engine.scheduler.schedule_request([low, high])
    assert (ids(decision.scheduled), ids(decision.paused)) == ([1], [0])


def test_nobody_is_paused_if_it_would_not_help() -> None:
    engine = Engine("max_utilization", blocks=4)
    first = started(engine, Request(0), 7)
    large = Request(1, prompt=12)
    last = started(engine, Request(2), 4)
    decision = engine.scheduler.schedule_request([first, large, last])
    assert (ids(decision.scheduled), decision.paused) == ([0, 2], [])


def test_newcomers_do_not_take_the_blocks_that_one_ahead_waits_for() -> None:
    engine = Engine("max_utilization", blocks=4)
    first = started(engine, Request(0), 7)
    assert scheduled(engine, first, Request(1, prompt=12), Request(2, prompt=1)) == [0]


def test_requests_in_flight_or_completing_do_not_yield() -> None:
    engine = Engine("max_utilization", blocks=3)
    running = [started(engine, Request(i)) for i in range(3)]
    running[1].state = "generation_to_complete"
    decision = engine.scheduler.schedule_request(running, {2})
    assert (decision.scheduled, decision.paused) == ([], [])


def test_paused_requests_come_back_and_finish() -> None:
    engine = Engine("max_utilization", {7: 1, 8: 1}, device_pages=1, blocks=4)
    engine.active = [Request(i, 7 + i % 2, max_tokens=10) for i in range(4)]
    engine.run()
    assert set(engine.pauses)
    assert {i for step in engine.steps for i in step} == {0, 1, 2, 3}
