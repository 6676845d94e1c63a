"""What a step looks at: all that have begun and the front of the queue, at a cost of its own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedlora.engine.live_requests import LiveRequests
from pagedlora.engine.waiting_queue import WaitingQueue
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.scheduler.kv_cache_v2 import KVCacheV2Scheduler

SIZE = 3


class Queue:
    """Live requests whose precedence is set by the test; a few ids that are used again."""

    def __init__(self) -> None:
        self.live = LiveRequests(
            KVCacheManager(8, 4), None, max_num_tokens=8, enable_chunked_prefill=True
        )
        self.requests: list[LlmRequest] = []  # in arrival order
        self.front: list[LlmRequest] = []
        self._skipped: set[LlmRequest] = set()
        self._seen: dict[LlmRequest, int] = {}

    def precedence(self, request: LlmRequest) -> tuple[bool, int, int]:
        """As the scheduler's: one that it never saw is the last of its priority."""
        return (
            request not in self._skipped,
            -request.priority,
            self._seen.get(request, 1 << 62),
        )

    def add(self, request_id: int, priority: int) -> None:
        if self.live.get(request_id) is None:
            request = LlmRequest(request_id, prompt_token_ids=[1], priority=priority)
            self.live.add(request)
            self.requests.append(request)

    def begin(self, index: int) -> None:
        request = self._in_front(index)
        if request is not None and request.state is RequestState.WAITING:
            request.advance_to(RequestState.PREFILLING)
            request.num_computed_tokens = 1

    def give_way(self, index: int) -> None:
        request = self._in_front(index)
        if request is not None and request.state is RequestState.PREFILLING:
            request.restart()

    def skip(self, index: int) -> None:
        """Too often: the request is past the bound from now on."""
        request = self._in_front(index)
        if request is not None:
            self._skipped.add(request)

    def end(self, index: int) -> None:
        if self.requests:
            request = self.requests.pop(index % len(self.requests))
            self.live.finish(request, "abort")

    def look(self, size: int) -> None:
        begun = [r for r in self.requests if not self._is_new(r)]
        new = [r for r in self.requests if self._is_new(r)]
        first = set(sorted(new, key=self.precedence)[:size])
        self.front = self.live.front(size, self.precedence)
        assert self.front == [r for r in self.requests if r in first or r in begun]
        self._seen = {r: self._seen.get(r, len(self._seen) + n) for n, r in enumerate(self.front)}

    def _in_front(self, index: int) -> LlmRequest | None:
        live = [r for r in self.front if self.live.get(r.request_id) is r]
        return live[index % len(live)] if live else None

    @staticmethod
    def _is_new(request: LlmRequest) -> bool:
        return request.state is RequestState.WAITING and not request.has_started


NUMBERS = st.integers(0, 5)
ADDS = st.tuples(st.just("add"), st.integers(0, 20), st.integers(-1, 1))
STEPS = st.tuples(st.sampled_from(["begin", "give_way", "skip", "end"]), NUMBERS)


@given(st.lists(st.tuples(st.one_of(ADDS, STEPS), st.booleans()), min_size=10, max_size=60))
def test_the_front_is_what_sorting_all_would_give(
    calls: list[tuple[tuple[Any, ...], bool]],
) -> None:
    queue = Queue()
    for (name, *arguments), looks in calls:
        getattr(queue, name)(*arguments)
        if looks:
            queue.look(SIZE)
    queue.look(SIZE)


def test_who_is_past_the_bound_stays_in_front_of_those_of_higher_priority() -> None:
    queue = Queue()
    queue.add(0, -1)
    queue.look(SIZE)
    queue.skip(0)
    for number in range(1, 6):
        queue.add(number, 1)
    queue.look(SIZE)
    assert [request.request_id for request in queue.front] == [0, 1, 2]


def calls_of_a_front(num_waiting: int) -> int:
    """Python and C functions that run while the next front is found and scheduled."""
    kv = KVCacheManager(64, 4)
    live = LiveRequests(kv, None, max_num_tokens=64, enable_chunked_prefill=True)
    scheduler = KVCacheV2Scheduler(kv, None, max_batch_size=4, max_num_tokens=64)
    for number in range(num_waiting):
        live.add(LlmRequest(number, prompt_token_ids=[1, 2], priority=number % 3, max_tokens=4))
    scheduler.schedule_request(live.front(SIZE, scheduler.precedence))
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        scheduler.schedule_request(live.front(SIZE, scheduler.precedence))
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_calls_nothing_per_waiting_request() -> None:
    """Counted, not timed; comprehensions over requests call their properties."""
    few, many = calls_of_a_front(50), calls_of_a_front(5000)
    assert few > 50
    assert many == few


def test_a_queue_keeps_no_priority_that_nobody_has() -> None:
    queue = WaitingQueue()
    requests = [LlmRequest(n, prompt_token_ids=[1], priority=n) for n in range(3)]
    for request in requests:
        queue.append(request)
    assert queue.first(2) == [requests[2], requests[1]]
    queue.remove(requests[1])
    queue.remove(requests[1])
    assert list(queue) == [requests[2], requests[0]]
    assert len(queue) == 2


@pytest.mark.parametrize("priority", [0, 7])
def test_an_id_that_is_used_again_is_a_new_request(priority: int) -> None:
    """The first of that name was in front, and ended before the next step."""
    queue = Queue()
    queue.add(1, 0)
    queue.look(SIZE)
    queue.begin(0)
    queue.end(0)
    queue.add(1, priority)
    for number in range(2, 9):
        queue.add(number, 7)
    queue.look(SIZE)
