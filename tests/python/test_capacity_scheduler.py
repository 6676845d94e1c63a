"""The rules of the whole-request scheduler, each by itself."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.whole_request_engine import (
    POLICIES,
    CountedPages,
    Engine,
    Request,
    ids,
    scheduled,
    started,
)

from pagedlora import (
    AdapterTooLargeError,
    CapacityError,
    CapacityScheduler,
    InvalidArgumentError,
    KVCacheManager,
    LlmRequest,
    PeftTaskNotCachedError,
)
from pagedlora.requests import RequestState

every_policy = pytest.mark.parametrize("policy", POLICIES)


# --- scenarios: 21 blocks of 10 tokens, 4 requests at most, prompts of 10, answers of 50 tokens


def run_three(policy: str, pages_per_task: int) -> Engine:
    engine = Engine(
        policy,
        {1: pages_per_task, 2: pages_per_task},
        device_pages=30,
        blocks=21,
        block_size=10,
        max_num_requests=4,
    )
    engine.active = [Request(i, task, 10, 50) for i, task in enumerate((1, 2, 1))]
    engine.run()
    assert not engine.pauses
    assert not engine.errors
    return engine


@every_policy
def test_two_adapters_that_fit_together_run_together(policy: str) -> None:
    engine = run_three(policy, 15)
    assert len(engine.steps) == 50
    assert [engine.steps_of(i) for i in range(3)] == [(0, 50)] * 3


@every_policy
def test_s2_two_adapters_that_do_not_fit_together_take_two_rounds_not_three(policy: str) -> None:
    engine = run_three(policy, 20)
    assert len(engine.steps) == 100
    assert [engine.steps_of(i) for i in range(3)] == [(0, 50), (50, 100), (0, 50)]


@every_policy
def test_an_adapter_counts_once_however_many_share_it(policy: str) -> None:
    engine = Engine(policy, {7: 10}, device_pages=10, host_pages=10)
    assert scheduled(engine, *(Request(i, 7) for i in range(3))) == [0, 1, 2]


@every_policy
def test_device_pages_bound_the_batch(policy: str) -> None:
    engine = Engine(policy, {1: 10, 2: 10}, device_pages=15)
    assert scheduled(engine, Request(0, 1), Request(1, 2)) == [0]


@every_policy
def test_an_exact_fit_fits(policy: str) -> None:
    engine = Engine(policy, {1: 10, 2: 5}, device_pages=15, host_pages=15)
    assert scheduled(engine, Request(0, 1), Request(1, 2)) == [0, 1]


@every_policy
def test_budgets_are_new_in_each_pass(policy: str) -> None:
    engine = Engine(policy, {1: 10}, device_pages=10)
    for _ in range(3):
        assert scheduled(engine, Request(0, 1)) == [0]


@every_policy
def test_requests_without_an_adapter_need_no_pages(policy: str) -> None:
    engine = Engine(policy, device_pages=0, host_pages=0)
    assert scheduled(engine, Request(0), Request(1)) == [0, 1]
    assert engine.peft.asked == []


# --- S1, and what a pass costs


@every_policy
def test_s1_without_a_peft_manager_no_adapter_is_looked_at(policy: str) -> None:
    class Plain:
        state, num_prompt_tokens, max_tokens = "waiting", 4, 4

        def __init__(self, request_id: int) -> None:
            self.request_id = request_id

        @property
        def lora_task_id(self) -> int:
            raise AssertionError("looked at the adapter")

    scheduler = CapacityScheduler(policy, 4, KVCacheManager(8, 4))  # type: ignore[arg-type]
    assert ids(scheduler.schedule_request([Plain(0), Plain(1)]).scheduled) == [0, 1]


@every_policy
def test_pages_are_asked_once_per_task_and_pass(policy: str) -> None:
    engine = Engine(policy, {7: 1, 8: 1}, max_num_requests=9)
    requests = [Request(i, 7 + i % 2) for i in range(6)]
    requests += [started(engine, Request(6, 7)), Request(7, 8, state="generation_to_complete")]
    engine.peft.leased = {7, 8}
    scheduled(engine, *requests)
    assert sorted(engine.peft.asked) == [7, 8]
    engine.peft.asked.clear()
    scheduled(engine, requests[6], inflight=(6,))
    assert sorted(engine.peft.asked) == [7, 8]


@every_policy
def test_a_pass_changes_neither_requests_nor_managers(policy: str) -> None:
    engine = Engine(policy, {7: 1}, blocks=3)
    requests = [Request(0, 7), started(engine, Request(1, 7), 12)]
    before = [vars(request).copy() for request in requests]
    engine.scheduler.schedule_request(requests)
    assert [vars(request) for request in requests] == before
    assert engine.kv.num_used_blocks == 3


# --- S2: pages


@every_policy
def test_s2_a_page_misfit_stops_nobody(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2, 3: 1}, device_pages=3)
    requests = [Request(0, 1), Request(1, 2), Request(2), Request(3, 3), Request(4, 1)]
    assert scheduled(engine, *requests) == [0, 2, 3, 4]


def test_s2_nobody_is_paused_for_pages() -> None:
    engine = Engine("max_utilization", {1: 2, 2: 2, 3: 2}, device_pages=3)
    requests = [Request(0, 1), started(engine, Request(1, 2)), started(engine, Request(2, 3))]
    decision = engine.scheduler.schedule_request(requests)
    assert (ids(decision.scheduled), decision.paused) == ([0], [])


def test_s2_nobody_is_paused_for_a_request_that_finds_no_pages_either() -> None:
    engine = Engine("max_utilization", {1: 2, 2: 2}, device_pages=3, blocks=3)
    requests = [started(engine, Request(0, 1), 3), Request(1, 2)]
    requests.append(started(engine, Request(2), 7))
    decision = engine.scheduler.schedule_request(requests)
    assert (ids(decision.scheduled), decision.paused) == ([0, 2], [])


@every_policy
def test_host_pages_bound_those_that_start(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2, 3: 1}, host_pages=3)
    assert scheduled(engine, Request(0, 1), Request(1, 2), Request(2, 3)) == [0, 2]


def test_paused_requests_keep_their_host_pages_and_resume_into_them() -> None:
    engine = Engine("max_utilization", {1: 2, 2: 2}, host_pages=3)
    paused = Request(0, 1, state="paused", output_token_ids=[0])
    assert scheduled(engine, Request(1, 2), paused) == [0]


@every_policy
def test_completing_requests_keep_their_pages_and_blocks(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2}, device_pages=3, blocks=3)
    completing = started(engine, Request(0, 1), 8)
    completing.state = "generation_to_complete"
    assert scheduled(engine, completing, Request(1, 2)) == []
    assert scheduled(engine, completing, Request(2, 1, prompt=1, max_tokens=1)) == [2]
    if policy != "max_requests":
        decision = engine.scheduler.schedule_request([Request(3), completing])
        assert decision.paused == []
        assert (decision.scheduled == []) == (policy != "max_utilization")


@every_policy
def test_completing_requests_keep_their_host_pages(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2}, host_pages=3)
    completing = Request(0, 1, state="GENERATION_TO_COMPLETE")
    assert scheduled(engine, completing, Request(1, 2)) == []


@every_policy
def test_completing_requests_take_no_place_in_the_batch(policy: str) -> None:
    engine = Engine(policy, max_num_requests=1)
    completing = Request(0, state="generation_to_complete")
    assert scheduled(engine, completing, Request(1)) == [1]


@every_policy
def test_leased_adapters_outside_the_batch_count(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2, 9: 2}, device_pages=4)
    engine.peft.leased = {9}
    assert scheduled(engine, Request(0, 1), Request(1, 2)) == [0]
    assert scheduled(engine, Request(0, 9), Request(1, 1), Request(2, 2)) == [0, 1]


def test_a_lease_closed_meanwhile_counts_nothing() -> None:
    engine = Engine("guaranteed_no_evict", {1: 2}, device_pages=2)
    engine.peft.leased = {404}
    assert scheduled(engine, Request(0, 1)) == [0]


@every_policy
def test_requests_in_flight_are_left_alone_and_keep_what_they_hold(policy: str) -> None:
    engine = Engine(policy, {1: 2, 2: 2}, device_pages=3, blocks=4, max_num_requests=2)
    running = started(engine, Request(0, 1), 8)
    others = [Request(1, 2), Request(2, prompt=1, max_tokens=1), Request(3, prompt=1, max_tokens=1)]
    decision = engine.scheduler.schedule_request([running, *others], {0})
    assert ids(decision.scheduled) == ([] if policy == "static_batch" else [2])
    decision = engine.scheduler.schedule_request([Request(1, prompt=12), running], {0})
    assert decision.paused == []


def test_the_first_that_waits_for_pages_is_overtaken_in_a_bounded_number_of_passes() -> None:
    for policy in ("max_requests", "guaranteed_no_evict"):
        engine = Engine(policy, {1: 4, 2: 1}, device_pages=4, max_skip_passes=3)
        engine.active = [Request(0, 2, max_tokens=6), Request(1, 1)]
        overtaking = []
        for request_id in range(2, 60):
            engine.step()
            if 1 in engine.steps[-1]:
                break
            new = engine.active[-1].request_id
            overtaking.append(new > 1 and new in engine.steps[-1])
            engine.active.append(Request(request_id, 2, max_tokens=3))
        assert 1 in engine.steps[-1], "the large adapter starved"
        assert sum(overtaking) == 3
        engine.run()


def test_the_first_that_waits_for_host_pages_is_not_starved_by_later_ones() -> None:
    engine = Engine("max_utilization", {1: 4, 2: 1}, host_pages=4, max_skip_passes=3)
    engine.active = [started(engine, Request(0, 2)), Request(1, 1)]
    for request_id in range(2, 60):
        engine.active.append(Request(request_id, 2, max_tokens=3))
        engine.active.append(Request(100 + request_id, max_tokens=3))
        engine.step()
        assert 100 + request_id in engine.steps[-1] or len(engine.steps[-1]) == 8
        if 1 in engine.steps[-1]:
            return
    raise AssertionError("the large adapter starved")


# --- errors of one request


@every_policy
def test_an_error_of_one_request_stays_with_it(policy: str) -> None:
    engine = Engine(policy, {1: 1})
    carries_weights, lacks_them = Request(0, 1), Request(1, 1)
    error = RuntimeError("broken")
    engine.peft.errors = {1: error}
    requests = [Request(2, 404), lacks_them, carries_weights, Request(3)]
    decision = engine.scheduler.schedule_request(requests)
    assert ids(decision.scheduled) == [0, 3]
    assert decision.errors[1] is error
    assert isinstance(decision.errors[2], PeftTaskNotCachedError)
    assert len(decision.errors) == 2


@every_policy
@pytest.mark.parametrize("tier", ["device", "host"])
def test_an_adapter_larger_than_a_tier_is_an_error_with_both_numbers(
    policy: str, tier: str
) -> None:
    engine = Engine(policy, {1: 5, 2: 1}, **{f"{tier}_pages": 4})  # type: ignore[arg-type]
    decision = engine.scheduler.schedule_request([Request(0, 1), Request(1, 2)])
    assert ids(decision.scheduled) == [1]
    error = decision.errors[0]
    assert isinstance(error, AdapterTooLargeError)
    assert (error.tier, error.needed_pages, error.total_pages) == (tier, 5, 4)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_request_that_can_never_have_its_blocks_is_an_error_and_stops_nobody(policy: str) -> None:
    engine = Engine(policy, blocks=2)
    decision = engine.scheduler.schedule_request([Request(0, prompt=6, max_tokens=3), Request(1)])
    assert ids(decision.scheduled) == [1]
    assert isinstance(decision.errors[0], CapacityError)
    assert "need 3 KV blocks" in str(decision.errors[0])


# --- what is read of requests and managers


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_requests_of_this_package_are_understood(policy: str) -> None:
    kv = KVCacheManager(4, 4)
    scheduler = CapacityScheduler(policy, 4, kv)  # type: ignore[arg-type]
    running = LlmRequest(0, prompt_token_ids=[1] * 4, max_tokens=4, output_token_ids=[1])
    running.state, running.num_computed_tokens = RequestState.DECODING, 4
    assert kv.try_allocate(running, 4)
    failed = LlmRequest(1, prompt_token_ids=[1], max_tokens=1, state=RequestState.FAILED)
    waiting = LlmRequest(2, prompt_token_ids=[1] * 4, max_tokens=4)
    wanted = [0] if policy == "static_batch" else [0, 2]
    assert ids(scheduler.schedule_request([running, failed, waiting]).scheduled) == wanted


def test_a_manager_without_host_tier_and_leases_will_do() -> None:
    class DeviceOnly:
        max_device_pages = 1

        def determine_num_pages(self, request: Request) -> int:
            return 1

    scheduler = CapacityScheduler("max_requests", 4, None, DeviceOnly())
    assert ids(scheduler.schedule_request([Request(0, 1), Request(1, 2)]).scheduled) == [0]


def test_an_unknown_state_is_refused_by_name() -> None:
    scheduler = CapacityScheduler("max_requests", 1, None, CountedPages({}, device_pages=1))
    with pytest.raises(InvalidArgumentError, match=r"'asleep'.*waiting"):
        scheduler.schedule_request([Request(0, state="asleep")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fifo", 1, None), "'fifo'.*max_requests, guaranteed_no_evict"),
        (("max_requests", 0, None), "max_num_requests is 0"),
        (("static_batch", 1, None), "static_batch needs a kv_cache_manager"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        CapacityScheduler(*arguments)
