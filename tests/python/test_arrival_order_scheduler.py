"""Admission in arrival order: budgets hold, ownership is 1:1, nobody starves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded_peft import RecordedPeftManager

from pagedlora.errors import (
    AdapterFormatError,
    AdapterTooLargeError,
    CapacityError,
    LoraCacheFullError,
    PagedLoraError,
    PeftTaskNotCachedError,
)
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.scheduler.arrival_order import ArrivalOrderScheduler
from pagedlora.scheduler.step import ScheduledStep


def make_request(
    request_id: int, task: int | None = None, *, prompt: int = 4, max_tokens: int = 4
) -> LlmRequest:
    return LlmRequest(
        request_id,
        lora_task_id=task,
        prompt_token_ids=[1] * prompt,
        max_tokens=max_tokens,
    )


class Bench:
    """A scheduler with its managers, and an engine that computes nothing."""

    def __init__(
        self,
        pages: dict[int, int] | None = None,
        *,
        device_pages: int = 100,
        host_pages: int = 10**9,
        blocks: int = 1000,
        **options: Any,
    ) -> None:
        limits = {"max_batch_size": 8, "max_num_tokens": 64, **options}
        self.kv = KVCacheManager(blocks, 4)
        self.peft = RecordedPeftManager(
            pages or {}, device_pages=device_pages, host_pages=host_pages
        )
        self.scheduler = ArrivalOrderScheduler(self.kv, self.peft, **limits)
        self.requests: dict[int, LlmRequest] = {}

    def add(self, *requests: LlmRequest) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.request_id] = request

    def step(self) -> ScheduledStep:
        """Schedules, computes, and ends the requests that have all their tokens."""
        step = self.scheduler.schedule()
        self.scheduler.check_invariants()
        self.scheduler.complete(step)
        for request in [*step.generation, *(chunk.request for chunk in step.context)]:
            if request.state is RequestState.DECODING:
                request.output_token_ids.append(0)
                if len(request.output_token_ids) == request.max_tokens:
                    self.scheduler.finish(request)
        self.scheduler.check_invariants()
        return step

    def run(self, max_steps: int = 10_000) -> int:
        """Runs to the end; returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_unfinished:
                assert self.kv.num_used_blocks == 0
                assert not self.peft.owners
                return count
            self.step()
        raise AssertionError("it does not end")

    def running(self) -> list[int]:
        """Ids of admitted live requests."""
        live = (RequestState.PREFILLING, RequestState.DECODING)
        return [r.request_id for r in self.requests.values() if r.state in live]


def test_a_request_goes_through_its_states() -> None:
    bench = Bench(max_num_tokens=3)
    request = make_request(1, prompt=5, max_tokens=2)
    bench.add(request)
    assert request.state is RequestState.WAITING
    bench.step()
    assert (request.state, request.num_computed_tokens) == (RequestState.PREFILLING, 3)
    step = bench.step()
    assert step.context[0].num_tokens == 2
    assert (request.state, request.num_computed_tokens) == (RequestState.DECODING, 5)
    step = bench.step()
    assert step.generation == [request]
    assert request.state is RequestState.FINISHED
    assert not bench.scheduler.has_unfinished


def test_generation_comes_first_and_prompts_share_the_rest_in_arrival_order() -> None:
    bench = Bench(max_num_tokens=8)
    bench.add(make_request(1, prompt=2))
    bench.step()
    bench.add(make_request(2, prompt=5), make_request(3, prompt=5))
    step = bench.scheduler.schedule()
    assert [r.request_id for r in step.generation] == [1]
    assert [(c.request.request_id, c.num_tokens, c.is_last) for c in step.context] == [
        (2, 5, True),
        (3, 2, False),
    ]


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it() -> None:
    bench = Bench(max_num_tokens=8, enable_chunked_prefill=False)
    bench.add(*(make_request(i, prompt=5) for i in (1, 2)), make_request(3, prompt=1))
    step = bench.step()
    assert [(c.request.request_id, c.num_tokens) for c in step.context] == [(1, 5)]
    step = bench.step()
    assert [(c.request.request_id, c.num_tokens) for c in step.context] == [(2, 5), (3, 1)]


def test_no_more_requests_run_than_a_step_has_tokens() -> None:
    bench = Bench(max_num_tokens=3, max_batch_size=8)
    bench.add(*(make_request(i, prompt=1) for i in range(5)))
    bench.step()
    assert bench.running() == [0, 1, 2]
    bench.run()


def test_max_batch_size_holds() -> None:
    bench = Bench(max_batch_size=2)
    bench.add(*(make_request(i) for i in range(3)))
    bench.step()
    assert bench.running() == [0, 1]
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 1)


def test_all_blocks_that_a_request_can_need_are_reserved_at_admission() -> None:
    bench = Bench(blocks=5)
    request = make_request(1, prompt=5, max_tokens=7)
    bench.add(request)
    bench.step()
    assert len(bench.kv.block_table(request)) == 3
    bench.run()


def test_a_request_without_blocks_stops_the_pass() -> None:
    bench = Bench(blocks=4)
    bench.add(
        make_request(1, prompt=4, max_tokens=4),
        make_request(2, prompt=8, max_tokens=4),
        make_request(3, prompt=1, max_tokens=3),
    )
    bench.step()
    assert bench.running() == [1]
    bench.run()


def test_a_request_without_pages_is_skipped_and_later_ones_go() -> None:
    bench = Bench({7: 3, 8: 2, 9: 1}, device_pages=4)
    bench.add(make_request(1, 7), make_request(2, 8), make_request(3, 9), make_request(4))
    bench.step()
    assert bench.running() == [1, 3, 4]
    assert bench.peft.count("add", 2) == 0
    bench.run()


def test_an_adapter_counts_once_however_many_requests_share_it() -> None:
    bench = Bench({7: 3}, device_pages=4)
    bench.add(*(make_request(i, 7) for i in range(5)))
    bench.step()
    assert bench.running() == [0, 1, 2, 3, 4]


def test_a_full_host_tier_lets_the_request_wait() -> None:
    bench = Bench({7: 3, 8: 3, 9: 1}, host_pages=4)
    bench.add(make_request(1, 7), make_request(2, 8), make_request(3, 9))
    bench.step()
    assert bench.running() == [1, 3]
    bench.run()
    assert bench.requests[2].state is RequestState.FINISHED


def test_ownership_is_added_once_and_ended_once() -> None:
    bench = Bench({7: 1}, max_num_tokens=2)
    bench.add(make_request(1, 7, prompt=7), make_request(2))
    bench.run()
    assert bench.peft.calls == [("add", 1), ("done", 1)]


def test_requests_of_the_base_model_run_without_a_manager() -> None:
    scheduler = ArrivalOrderScheduler(KVCacheManager(9, 4), max_batch_size=2, max_num_tokens=9)
    scheduler.add(make_request(1))
    assert [chunk.request.request_id for chunk in scheduler.schedule().context] == [1]


@pytest.mark.parametrize(
    "error",
    [
        AdapterFormatError("broken", path="x", tensor=""),
        AdapterTooLargeError(
            "too large", tier="host", needed_pages=9, total_pages=4, page_bytes=64
        ),
    ],
)
def test_an_adapter_that_can_never_be_used_fails_its_request_alone(error: PagedLoraError) -> None:
    bench = Bench({7: 1, 8: 1})
    bench.peft.add_errors[7] = error
    bench.add(make_request(1, 7), make_request(2, 8))
    step = bench.step()
    assert step.failed == [bench.requests[1]]
    assert bench.requests[1].error is error
    bench.run()
    assert bench.requests[2].state is RequestState.FINISHED
    assert bench.peft.count("done", 1) == 0


def test_an_unknown_task_fails_its_request() -> None:
    bench = Bench()
    bench.add(make_request(1, 404))
    assert bench.step().failed == [bench.requests[1]]
    assert isinstance(bench.requests[1].error, PeftTaskNotCachedError)


def test_an_adapter_over_the_whole_device_tier_fails_with_both_numbers() -> None:
    bench = Bench({7: 5}, device_pages=4)
    bench.add(make_request(1, 7))
    bench.step()
    error = bench.requests[1].error
    assert isinstance(error, AdapterTooLargeError)
    assert (error.needed_pages, error.total_pages) == (5, 4)
    assert not bench.peft.calls


def test_a_request_that_can_never_fit_the_blocks_is_refused_with_the_numbers() -> None:
    bench = Bench(blocks=2)
    with pytest.raises(CapacityError, match=r"6 prompt tokens and max_tokens 3.*3 KV blocks.* 2 "):
        bench.add(make_request(1, prompt=6, max_tokens=3))
    assert not bench.scheduler.has_unfinished


def test_a_prompt_over_the_step_is_refused_without_chunks() -> None:
    bench = Bench(max_num_tokens=5, enable_chunked_prefill=False)
    with pytest.raises(CapacityError, match=r"6 prompt tokens.*max_num_tokens 5"):
        bench.add(make_request(1, prompt=6))


def test_when_nothing_runs_a_full_host_tier_is_an_error_not_a_hang() -> None:
    bench = Bench({7: 3, 8: 3}, host_pages=4)
    bench.peft.owners[8] = {99}
    bench.add(make_request(1, 7), make_request(2))
    bench.step()
    assert bench.running() == [2]
    while bench.requests[2].state is not RequestState.FINISHED:
        bench.step()
    assert bench.requests[1].state is RequestState.WAITING
    assert bench.step().failed == [bench.requests[1]]
    assert isinstance(bench.requests[1].error, LoraCacheFullError)


def test_failing_a_running_request_frees_what_it_held() -> None:
    bench = Bench({7: 1})
    bench.add(make_request(1, 7))
    bench.step()
    bench.scheduler.fail(bench.requests[1], CapacityError("gone"))
    assert bench.kv.num_used_blocks == 0
    assert bench.peft.calls == [("add", 1), ("done", 1)]


def test_abort_all_leaves_nothing() -> None:
    bench = Bench({7: 1, 8: 1}, max_batch_size=2)
    bench.add(make_request(1, 7), make_request(2), make_request(3, 8))
    bench.step()
    error = PagedLoraError("stop")
    assert bench.scheduler.abort_all(error) == [bench.requests[i] for i in (1, 2, 3)]
    bench.scheduler.check_invariants()
    assert {r.error for r in bench.requests.values()} == {error}
    assert bench.peft.calls == [("add", 1), ("done", 1)]
    assert bench.kv.num_free_blocks == bench.kv.num_blocks


def test_an_interrupted_add_loses_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench({7: 1})
    add = bench.peft.add_request_peft

    def interrupted(request: Any, try_gpu_cache: bool = True) -> None:
        add(request, try_gpu_cache)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.peft, "add_request_peft", interrupted)
    bench.add(make_request(1, 7))
    with pytest.raises(KeyboardInterrupt):
        bench.scheduler.schedule()
    bench.scheduler.abort_all(PagedLoraError("stop"))
    assert not bench.peft.owners
    bench.scheduler.check_invariants()


def test_a_stream_of_small_adapters_does_not_starve_a_large_one() -> None:
    bench = Bench({1: 4, 2: 1}, device_pages=4, max_batch_size=4)
    bench.add(make_request(0, 2, max_tokens=6))
    bench.step()
    bench.add(make_request(1, 1))
    passes_ahead = 0
    for request_id in range(2, 100):
        bench.add(make_request(request_id, 2, max_tokens=3))
        before = set(bench.running())
        bench.step()
        if bench.requests[1].state is not RequestState.WAITING:
            break
        passes_ahead += bool(set(bench.running()) - before)
    else:
        raise AssertionError("the large adapter starved")
    assert passes_ahead == 8
    bench.run()


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_every_request_ends_and_none_is_passed_over_too_often(data: st.DataObject) -> None:
    pages = {task: data.draw(st.integers(1, 6)) for task in range(5)}
    bench = Bench(
        pages,
        device_pages=6,
        host_pages=data.draw(st.integers(6, 14)),
        blocks=data.draw(st.integers(6, 30)),
        max_batch_size=data.draw(st.integers(1, 5)),
        max_num_tokens=data.draw(st.integers(1, 12)),
        max_skip_passes=3,
    )
    oldest_passed: dict[int, int] = {}
    arrivals = data.draw(
        st.lists(
            st.tuples(
                st.one_of(st.none(), st.integers(0, 4)),
                st.integers(1, 10),
                st.integers(1, 6),
                st.integers(0, 3),
            ),
            min_size=1,
            max_size=25,
        )
    )
    for request_id, (task, prompt, max_tokens, steps) in enumerate(arrivals):
        bench.add(make_request(request_id, task, prompt=prompt, max_tokens=max_tokens))
        for _ in range(steps):
            _step_and_count(bench, oldest_passed)
    while bench.scheduler.has_unfinished:
        _step_and_count(bench, oldest_passed)
    assert {r.state for r in bench.requests.values()} == {RequestState.FINISHED}
    assert max(oldest_passed.values(), default=0) <= 3
    assert bench.kv.num_used_blocks == 0
    assert not bench.peft.owners
    for request in bench.requests.values():
        done = 0 if request.lora_task_id is None else 1
        assert bench.peft.count("done", request.request_id) == done


def _step_and_count(bench: Bench, oldest_passed: dict[int, int]) -> None:
    """One step, which must compute something; counts passes that overtook the oldest waiting."""
    waiting = [r for r in bench.requests.values() if r.state is RequestState.WAITING]
    live = bench.scheduler.has_unfinished
    step = bench.step()
    assert bool(step.context or step.generation) == live
    still = [r for r in waiting if r.state is RequestState.WAITING]
    if still and any(r.request_id > still[0].request_id for r in waiting if r not in still):
        oldest = still[0].request_id
        oldest_passed[oldest] = oldest_passed.get(oldest, 0) + 1


def test_what_a_pass_looks_at_does_not_grow_with_the_queue() -> None:
    bench = Bench({7: 4, 8: 4}, device_pages=4, max_batch_size=4)
    bench.add(make_request(0, 7, max_tokens=50))
    bench.step()
    bench.add(*(make_request(i, 8) for i in range(1, 3000)))
    looked_at = 0
    determine = bench.peft.determine_num_pages

    def counting(request: Any) -> int:
        nonlocal looked_at
        looked_at += 1
        return determine(request)

    bench.peft.determine_num_pages = counting  # type: ignore[method-assign]
    bench.step()
    assert looked_at <= 1024
    first = looked_at
    bench.step()
    assert looked_at == first
