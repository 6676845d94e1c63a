"""In which order a pass of `KVCacheV2Scheduler` considers the requests, and what it gains."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.support.recorded_peft import RecordedPeftManager
from tests.support.scheduling import Bench, PeftKind, names_in

from pagedlora import LlmRequest
from pagedlora.scheduler.page_budget import PageBudget
from pagedlora.scheduler.pass_order import pass_order
from pagedlora.scheduler.precedence import Record


def record(
    arrival: int,
    task_id: int | None = None,
    *,
    priority: int = 0,
    begun: bool = False,
    past_bound: bool = False,
) -> Record:
    request = LlmRequest(arrival, task_id, priority=priority, prompt_token_ids=[0])
    made = Record(request, arrival, has_begun=begun)
    if past_bound:
        made.was_skipped(max_skip_passes=1)
    return made


def order_of(records: Sequence[Record], *, device_pages: int = 1) -> list[int]:
    """Arrivals in the order of a pass; every adapter has one page."""
    tasks = {r.request.lora_task_id for r in records if r.request.lora_task_id is not None}
    budget = PageBudget(RecordedPeftManager(dict.fromkeys(tasks, 1), device_pages=device_pages))
    return [r.arrival for r in pass_order(records, lambda each: bool(each.has_begun), budget)]


def test_new_requests_of_one_adapter_come_together_when_pages_are_scarce() -> None:
    records = [record(0, 5), record(1, 6), record(2), record(3, 5), record(4, 7), record(5, 6)]
    assert order_of(records, device_pages=2) == [0, 3, 1, 5, 2, 4]


def test_new_requests_come_by_arrival_while_the_tier_holds_all_adapters() -> None:
    records = [record(0, 5), record(1, 6), record(2), record(3, 5), record(4, 7), record(5, 6)]
    assert order_of(records, device_pages=3) == [0, 1, 2, 3, 4, 5]


def test_those_that_have_begun_come_before_new_ones() -> None:
    records = [record(0, 5), record(1, 6, begun=True), record(2, 5), record(3, 7, begun=True)]
    assert order_of(records) == [1, 3, 0, 2]


def test_s3_priority_and_the_bound_come_first() -> None:
    records = [
        record(0, 5, begun=True),
        record(1, 6),
        record(2, 5, priority=1),
        record(3, 6, priority=1),
        record(4, 5, priority=1),
        record(5, 7, past_bound=True),
        record(6, 5, past_bound=True, begun=True),
    ]
    assert order_of(records) == [5, 6, 2, 4, 3, 0, 1]


def test_s4_the_oldest_new_one_is_the_first_of_its_priority() -> None:
    generator = random.Random(0)
    for _ in range(50):
        records = [
            record(i, generator.choice([5, 6, 7]), begun=generator.random() < 0.3)
            for i in range(12)
        ]
        order = [i for i in order_of(records) if not records[i].has_begun]
        assert order[:1] == [r.arrival for r in records if not r.has_begun][:1]


@pytest.mark.parametrize("device_adapters", [1, 2, 4])
def test_batches_stay_full_with_room_for_few_of_many_adapters(device_adapters: int) -> None:
    """20 requests of 5 adapters in shuffled order, 4 at a time: the steps of a tier for all."""
    steps = {}
    for room in (device_adapters, 5):
        bench = Bench(PeftKind("recorded", device_adapters=room), max_batch_size=4)
        names = [name for name in "ABCDE" for _ in range(4)]
        random.Random(1).shuffle(names)
        for name in names:
            bench.add(name, prompt=2, max_tokens=6)
        steps[room] = 0
        while bench.live:
            assert names_in(bench.step())
            steps[room] += 1
    assert steps[device_adapters] == steps[5] == 5 * 6
