"""Who gets KV blocks, who gives way for them, and in which order they come back.

Names quote the rules of the design (S). The last part has the scenarios of the system that this one
follows; where that one stops at what does not fit, ours goes on.
"""

from __future__ import annotations

import pytest
from tests.support.scheduling import Bench, PeftKind, names_in

from pagedlora.requests import LlmRequest, RequestState


def ids(*requests: LlmRequest) -> list[int]:
    return [request.request_id for request in requests]


# ---- guaranteed_no_evict -------------------------------------------------------------------------


def test_no_evict_takes_the_blocks_of_the_longest_answer_at_the_start() -> None:
    bench = Bench(None, num_blocks=8, policy="guaranteed_no_evict", max_num_tokens=4)
    request = bench.add(prompt=6, max_tokens=11)
    bench.step()
    assert len(bench.kv.block_table(request)) == 5
    while bench.live:
        assert len(bench.kv.block_table(request)) == 5
        bench.step()


def test_no_evict_makes_nobody_give_way() -> None:
    bench = Bench(None, num_blocks=6, policy="guaranteed_no_evict")
    low = bench.add(prompt=4, max_tokens=8)
    bench.step()
    bench.add(prompt=12, max_tokens=4, priority=5)
    later = bench.add(prompt=1, max_tokens=1)
    while low in bench.live:
        output = bench.step()
        assert names_in(output) == [low.request_id]
        assert not output.suspended
        assert not output.recompute_paused
    assert later.num_computed_tokens == 0, "it would take what the first one waits for"
    bench.run()


# ---- victims -------------------------------------------------------------------------------------


@pytest.fixture
def three() -> tuple[Bench, list[LlmRequest]]:
    """Three that hold two blocks each, of six; the first has the lowest priority."""
    bench = Bench(None, num_blocks=8)
    requests = [bench.add(prompt=7, priority=priority) for priority in (0, 2, 1)]
    bench.step()
    bench.kv._device.take(bench.kv.num_free_blocks)  # lost to this test
    assert all(len(bench.kv.block_table(request)) == 2 for request in requests)
    return bench, requests


def test_s3_the_lowest_precedence_gives_way_first(
    three: tuple[Bench, list[LlmRequest]],
) -> None:
    bench, (low, high, middle) = three
    urgent = bench.add(prompt=7, priority=3)
    output = bench.schedule()
    assert output.suspended == [low]
    assert names_in(output) == ids(high, middle, urgent)


def test_no_more_give_way_than_is_needed(three: tuple[Bench, list[LlmRequest]]) -> None:
    bench, (low, high, middle) = three
    urgent = bench.add(prompt=16, priority=3)
    output = bench.schedule()
    assert output.suspended == [low, middle]
    assert names_in(output) == ids(high, urgent)


def test_nobody_gives_way_in_vain(three: tuple[Bench, list[LlmRequest]]) -> None:
    bench, requests = three
    bench.add(prompt=16, priority=2)  # two of three may be displaced: four blocks, and one to spare
    output = bench.schedule()
    assert sorted(names_in(output)) == ids(*requests)
    assert not output.suspended


def test_s3_a_new_one_takes_nothing_from_its_equals(
    three: tuple[Bench, list[LlmRequest]],
) -> None:
    bench, requests = three
    bench.add(prompt=4, priority=0)
    output = bench.schedule()
    assert sorted(names_in(output)) == ids(*requests)


@pytest.mark.parametrize("is_past_bound", [False, True])
def test_s3_an_older_new_one_displaces_a_running_equal_only_past_the_bound(
    *, is_past_bound: bool
) -> None:
    peft = PeftKind("recorded")
    bench = Bench(peft, num_blocks=3)
    older = bench.add("A", prompt=8, is_owner=False)
    younger = bench.add("B", prompt=7)
    bench.step()
    peft.manager.add_request_peft(older)
    record = bench.scheduler._records.get(older)
    assert record is not None
    if is_past_bound:
        record.was_skipped(max_skip_passes=1)
    output = bench.step()
    assert names_in(output) == ids(older if is_past_bound else younger)
    assert output.suspended == ([younger] if is_past_bound else [])


def test_s3_past_the_bound_a_younger_new_one_takes_nothing_from_an_older_one_that_runs() -> None:
    peft = PeftKind("recorded")
    bench = Bench(peft, num_blocks=3)
    older = bench.add("A", prompt=7)
    bench.step()
    younger = bench.add("B", prompt=8)
    bench.schedule()
    record = bench.scheduler._records.get(younger)
    assert record is not None
    record.was_skipped(max_skip_passes=1)
    output = bench.step()
    assert names_in(output) == ids(older)
    assert not output.suspended


def test_the_older_one_that_runs_takes_the_blocks_of_the_younger() -> None:
    bench = Bench(None, num_blocks=5)
    older, younger = (bench.add(prompt=prompt, max_tokens=13) for prompt in (5, 7))
    for _ in range(4):
        bench.step()
    output = bench.step()
    assert (output.generation, output.suspended) == ([older], [younger])
    while older in bench.live:
        output = bench.step()
        assert not output.suspended, "it comes back only when it can stay"
    assert bench.step().generation == [younger]


def test_who_comes_leaves_a_block_to_each_that_runs() -> None:
    bench = Bench(None, num_blocks=4)
    running = bench.add(prompt=7)
    bench.step()
    bench.add(prompt=8)
    assert names_in(bench.step()) == [running.request_id]
    assert bench.kv.num_free_blocks == 2


# ---- the host pool -------------------------------------------------------------------------------


def suspended_low(host_blocks: int) -> tuple[Bench, LlmRequest, LlmRequest]:
    """A low one that is suspended with two blocks, and a middle one that runs with two."""
    bench = Bench(None, num_blocks=4, host_blocks=host_blocks)
    low = bench.add(prompt=7)
    bench.step()
    middle = bench.add(prompt=7, priority=1)
    bench.step()
    bench.add(prompt=7, priority=2, max_tokens=4)
    assert bench.step().suspended == [low]
    return bench, low, middle


def test_in_a_full_host_pool_lower_precedence_loses_its_blocks() -> None:
    bench, low, middle = suspended_low(host_blocks=2)
    bench.add(prompt=7, priority=3, max_tokens=4)
    output = bench.step()
    assert output.suspended == [middle]
    assert output.recompute_paused == [low]
    assert bench.kv.is_suspended(middle)
    assert (low.state, low.num_computed_tokens) == (RequestState.WAITING, 0)
    bench.run()


def test_a_host_pool_with_room_makes_nobody_lose_anything() -> None:
    bench, low, middle = suspended_low(host_blocks=4)
    bench.add(prompt=7, priority=3, max_tokens=4)
    output = bench.step()
    assert output.suspended == [middle]
    assert not output.recompute_paused
    assert bench.kv.is_suspended(low)


def test_who_is_of_lower_precedence_than_the_suspended_is_computed_again_itself() -> None:
    bench = Bench(None, num_blocks=6, host_blocks=2)
    middle = bench.add(prompt=7, priority=1)
    bench.step()
    large = bench.add(prompt=18, priority=2, max_tokens=3)
    assert bench.step().suspended == [middle]
    low = bench.add(prompt=3)
    bench.step()
    assert low.num_computed_tokens == 0, "it must leave a block to the one that runs"
    bench.end(large)
    bench.step()
    assert {middle.state, low.state} == {RequestState.DECODING}


def test_a_request_larger_than_the_host_pool_is_computed_again_and_takes_nobody_with_it() -> None:
    bench = Bench(None, num_blocks=6, host_blocks=2)
    low = bench.add(prompt=7)
    bench.step()
    middle = bench.add(prompt=12, priority=1)
    bench.step()
    bench.add(prompt=5, priority=2, max_tokens=2)
    assert bench.step().suspended == [low]
    bench.add(prompt=9, priority=3, max_tokens=2)
    output = bench.step()
    assert output.recompute_paused == [middle]
    assert bench.kv.is_suspended(low)
    bench.run()


def test_what_is_dropped_in_the_pass_of_its_suspension_is_told_once() -> None:
    bench = Bench(None, num_blocks=4, host_blocks=2)
    low = bench.add(prompt=7)
    bench.step()
    middle = bench.add(prompt=7, priority=1)
    bench.step()
    bench.add(prompt=16, priority=2, max_tokens=1)
    output = bench.step()
    assert output.suspended == [middle]
    assert output.recompute_paused == [low]
    bench.run()


# ---- the scenarios of the system that this one follows -------------------------------------------


def recorded(pages: int) -> PeftKind:
    """One page per task."""
    return PeftKind("recorded", device_adapters=pages)


def test_a_task_without_a_manager_is_scheduled() -> None:
    bench = Bench(None)
    request = bench.add()
    request.lora_task_id = 1
    assert names_in(bench.step()) == [0]
    assert names_in(bench.step()) == [0]


@pytest.mark.parametrize(("pages", "expected"), [(10, [0, 1]), (1, [0])])
def test_two_contexts_with_a_task_each(pages: int, expected: list[int]) -> None:
    bench = Bench(recorded(pages))
    bench.add("A")
    bench.add("B")
    assert names_in(bench.step()) == expected


def test_no_pages_at_all_fail_who_has_an_adapter_and_take_no_blocks() -> None:
    bench = Bench(recorded(0))
    bench.add("A")
    bench.add(None)
    output = bench.step()
    assert [request.request_id for request, _ in output.failed] == [0]
    assert names_in(output) == [1]
    assert bench.kv.num_used_blocks == 1


def test_the_budget_is_new_in_each_pass() -> None:
    bench = Bench(recorded(1))
    first = bench.add("A", max_tokens=2)
    bench.add("B", max_tokens=2)
    assert names_in(bench.step()) == [0]
    assert names_in(bench.step()) == [0]
    assert first not in bench.live
    assert names_in(bench.step()) == [1]


def test_adapters_of_two_thirds_of_the_tier_run_in_turn_and_equals_together() -> None:
    peft = PeftKind("recorded", device_adapters=1)
    bench = Bench(peft, num_blocks=21, policy="guaranteed_no_evict", max_batch_size=4)
    for name in "ABA":
        bench.add(name, prompt=4, max_tokens=20)
    ran: list[list[int]] = []
    while bench.live:
        now = sorted(names_in(bench.step()))
        if not ran or ran[-1] != now:
            ran.append(now)
    assert ran == [[0, 2], [1]]
