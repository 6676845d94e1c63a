"""What each step computes: tokens, places, chunks, device pages, and in which order.

Names quote the rules of the design (S).
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.cache_fixtures import fake_adapter
from tests.support.engine_bench import EngineBench, assert_undisturbed
from tests.support.recorded_peft import RecordedPeftManager
from tests.support.scheduling import Bench, PeftKind, names_in, pages_of, spied_cache

from pagedlora import AdapterTooLargeError, LlmRequest, PeftTaskNotCachedError
from pagedlora.requests import RequestState
from pagedlora.scheduler.step import SchedulerOutput


def recorded(device_adapters: int = 2) -> PeftKind:
    return PeftKind("recorded", device_adapters=device_adapters)


def with_pages(device_pages: int, **pages: int) -> PeftKind:
    """Adapters of given sizes, the others of one page."""
    peft = recorded()
    sizes = {peft.task(name): pages.get(name, 1) for name in "ABCDE"}
    peft.manager = RecordedPeftManager(
        {task: size for task, size in sizes.items() if task is not None}, device_pages=device_pages
    )
    return peft


def chunks(output: SchedulerOutput) -> list[tuple[int, int]]:
    return [(chunk.request.request_id, chunk.num_tokens) for chunk in output.context]


# ---- tokens and places ---------------------------------------------------------------------------


def test_those_that_generate_get_their_tokens_before_prompts() -> None:
    bench = Bench(None, max_num_tokens=6)
    early = bench.add(prompt=2)
    bench.step()
    bench.add(prompt=20, priority=1)
    late = bench.add(prompt=3, priority=0)
    output = bench.step()
    assert output.generation == [early]
    assert chunks(output) == [(1, 5)]
    assert late.num_computed_tokens == 0


def test_prompts_are_cut_into_chunks_that_fill_the_step() -> None:
    bench = Bench(None, max_num_tokens=8)
    bench.add(prompt=11)
    bench.add(prompt=7)
    assert chunks(bench.step()) == [(0, 8)]
    output = bench.schedule()
    assert chunks(output) == [(0, 3), (1, 5)]
    assert [chunk.is_last for chunk in output.context] == [True, False]
    bench.compute(output)
    output = bench.step()
    assert (names_in(output), chunks(output)) == ([0, 1], [(1, 2)])


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    bench = Bench(None, max_num_tokens=8, enable_chunked_prefill=False)
    bench.add(prompt=5, max_tokens=2)
    bench.add(prompt=8, max_tokens=1)
    bench.add(prompt=1, max_tokens=1)
    assert chunks(bench.step()) == [(0, 5)], "the last one must not overtake"
    assert names_in(bench.step()) == [0]
    assert chunks(bench.step()) == [(1, 8)]
    assert chunks(bench.step()) == [(2, 1)]


def test_what_is_computed_again_is_cut_even_without_chunked_prefill() -> None:
    bench = Bench(None, host_blocks=0, max_num_tokens=7, enable_chunked_prefill=False)
    bench.add(prompt=1)
    again = bench.add(prompt=4, max_tokens=4)
    bench.step()
    bench.add(prompt=1)
    bench.step()
    bench.kv.free_resources(again)
    again.restart()
    record = bench.scheduler._records.get(again)
    assert record is not None
    record.lost_kv = True
    assert again.num_context_tokens == 6
    output = bench.step()
    assert (again.request_id, 5) in chunks(output), "two of seven tokens are kept for others"
    bench.step()
    bench.step()
    assert again.state is RequestState.FINISHED


def test_a_full_batch_leaves_the_others_what_they_have() -> None:
    bench = Bench(None, max_batch_size=2)
    low = bench.add(prompt=4)
    bench.step()
    for _ in range(2):
        bench.add(prompt=4, priority=1)
    for _ in range(3):
        assert names_in(bench.step()) == [1, 2]
    assert low.state is RequestState.DECODING
    assert len(bench.kv.block_table(low)) == 1


def test_tokens_kept_for_who_cannot_run_do_not_stop_everything() -> None:
    bench = Bench(None, num_blocks=4, max_num_tokens=2, max_batch_size=2)
    for passes, prompt, max_tokens, priority in (
        (3, 6, 8, 0), (1, 3, 8, 2), (0, 1, 4, 0), (1, 4, 5, 0), (0, 2, 2, 1), (19, 11, 2, 2),
        (1, 8, 3, 0), (0, 5, 4, 0),
    ):  # fmt: skip
        bench.add(prompt=prompt, max_tokens=max_tokens, priority=priority)
        for _ in range(passes):
            assert names_in(bench.step())
    while bench.live:
        assert names_in(bench.step()), "nobody runs, and nothing will change that"


def test_a_prompt_goes_on_though_all_tokens_are_kept_for_one_that_waits_for_its_blocks() -> None:
    bench = Bench(None, num_blocks=3, max_num_tokens=1)
    older = bench.add(prompt=8, max_tokens=1)
    for _ in range(5):
        bench.step()
    younger = bench.add(prompt=4, max_tokens=5)
    for _ in range(4):
        bench.step(inflight=[older])
    assert younger.state is RequestState.DECODING
    assert bench.kv.num_free_blocks == 0
    for _ in range(3):
        assert names_in(bench.step()) == [older.request_id]


# ---- device pages --------------------------------------------------------------------------------


def test_s2_what_does_not_fit_is_skipped_and_the_next_one_goes() -> None:
    bench = Bench(with_pages(4, A=3, B=2))
    for name in ("A", "B", "C", None):
        bench.add(name)
    assert names_in(bench.step()) == [0, 2, 3]
    assert names_in(bench.step()) == [0, 2, 3]


def test_s2_also_among_those_that_generate() -> None:
    peft = with_pages(4, A=3, B=2)
    bench = Bench(peft)
    low = [bench.add(name) for name in ("B", "C")]
    bench.step()
    urgent = bench.add("A", priority=1)
    output = bench.step()
    assert output.generation == [low[1]]
    assert chunks(output) == [(urgent.request_id, 4)]
    assert peft.counts(low[0]) == (1, 0, 0), "it keeps its blocks, so it is not paused"
    assert bench.kv.block_table(low[0])


def test_an_adapter_counts_once() -> None:
    bench = Bench(recorded(1))
    for name in ("A", "B", "A", None, "A"):
        bench.add(name)
    assert names_in(bench.step()) == [0, 2, 4, 3]


def test_tasks_of_open_leases_count() -> None:
    peft = recorded(2)
    bench = Bench(peft)
    bench.add("B")
    bench.step()
    bench.add("C")
    peft.manager.leased_elsewhere = {peft.task("A")}
    assert names_in(bench.schedule()) == [0]
    peft.manager.leased_elsewhere = {peft.task("B")}
    assert names_in(bench.schedule()) == [0, 1]


class Ending(LlmRequest):
    """One that computed its last token in a step that still runs."""

    is_to_complete = True


def test_a_request_to_complete_counts_its_adapter() -> None:
    peft = recorded(2)
    bench = Bench(peft)
    ending = Ending(900, lora_task_id=peft.task("A"), prompt_token_ids=[1], max_tokens=2)
    peft.manager.add_request_peft(ending)
    bench.live.append(ending)
    for name in "BCA":
        bench.add(name)
    assert names_in(bench.schedule()) == [0, 2]


def test_a_request_in_flight_counts_its_adapter_and_never_gives_way() -> None:
    peft = recorded(2)
    bench = Bench(peft, num_blocks=2)
    flying = bench.add("A", prompt=8)
    bench.step()
    bench.add("B", prompt=4, priority=1)
    bench.add("C", prompt=4, priority=1)
    output = bench.schedule(inflight=[flying])
    assert names_in(output) == []
    assert output.suspended == output.recompute_paused == []
    bench.kv.free_resources(flying)
    assert names_in(bench.schedule(inflight=[flying])) == [1]


class SmallPages:
    """A real cache with room for two adapters on the device, and their tasks."""

    def __init__(self, **options: Any) -> None:
        self.peft = spied_cache(2 * pages_of(4), 100 * pages_of(4), options=options)
        plans = [fake_adapter(self.peft.model_config, 4, seed).plan for seed in range(3)]
        self.tasks = [self.peft.core.register_task(plan) for plan in plans]

    def lease(self, *tasks: int) -> tuple[list[LlmRequest], Any]:
        """Somebody else's batch."""
        others = [LlmRequest(10**6 + task, lora_task_id=task) for task in tasks]
        for other in others:
            self.peft.add_request_peft(other)
        return others, self.peft.ensure_batch(others, [])

    def end(self, others: list[LlmRequest]) -> None:
        for other in others:
            self.peft.mark_request_done(other)


def test_a_lease_of_an_adapter_that_no_request_here_uses_counts() -> None:
    small = SmallPages(max_inflight_batches=2)
    others, lease = small.lease(small.tasks[0])
    engine = EngineBench(small.peft)
    requests = [engine.add(task) for task in small.tasks[1:]]
    assert small.peft.wait_idle()
    while not requests[0].has_ended:
        engine.core.step()
        assert small.peft.open_lease_tasks() == {small.tasks[0]}
    lease.close()
    small.end(others)
    engine.run()
    for request in requests:
        assert_undisturbed(request)


def test_a_request_waits_for_somebody_elses_lease_instead_of_failing() -> None:
    small = SmallPages(max_inflight_batches=2)
    others, lease = small.lease(*small.tasks[:2])
    engine = EngineBench(small.peft)
    request = engine.add(small.tasks[2])
    engine.core.step()
    assert small.peft.wait_idle()
    for _ in range(3):
        assert engine.core.step() == []
    lease.close()
    small.end(others)
    engine.run()
    assert_undisturbed(request)


def test_the_only_lease_in_flight_counts_nothing_for_the_next_batch_ends_it() -> None:
    small = SmallPages(max_inflight_batches=1)
    others, lease = small.lease(*small.tasks[:2])
    small.end(others)
    engine = EngineBench(small.peft)
    request = engine.add(small.tasks[2])
    engine.core.step()
    assert small.peft.wait_idle()
    engine.run()
    assert_undisturbed(request)
    assert not small.peft.open_lease_tasks()
    lease.close()


def test_an_adapter_that_no_device_tier_of_this_size_holds_fails_alone() -> None:
    bench = Bench(with_pages(4, A=5))
    too_large, good = bench.add("A"), bench.add("B")
    output = bench.step()
    assert [request for request, _ in output.failed] == [too_large]
    assert isinstance(output.failed[0][1], AdapterTooLargeError)
    assert names_in(output) == [good.request_id]


def test_a_task_that_nobody_knows_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = recorded()
    bench = Bench(peft)
    lost, good = bench.add("A"), bench.add("B")
    count = peft.manager.determine_num_pages

    def determine_num_pages(request: Any) -> int:
        if request is lost:
            raise PeftTaskNotCachedError("gone", task_id=request.lora_task_id)
        return int(count(request))

    monkeypatch.setattr(peft.manager, "determine_num_pages", determine_num_pages)
    output = bench.step()
    assert [request for request, _ in output.failed] == [lost]
    assert names_in(output) == [good.request_id]


def test_only_requests_whose_adapter_is_ready_begin() -> None:
    peft = recorded()
    bench = Bench(peft)
    bench.add("A")
    bench.add("B", is_owner=False)
    bench.add("C")
    peft.manager.loading = {peft.task("A")}
    assert names_in(bench.step()) == [2]
    peft.manager.loading.clear()
    assert names_in(bench.step()) == [2, 0]


def test_requests_of_one_adapter_stand_together() -> None:
    bench = Bench(recorded(3), max_num_tokens=30)
    for name in ("A", "B", "A", None, "B", "C", "A"):
        bench.add(name, prompt=4)
    assert [r for r, _ in chunks(bench.step())] == [0, 2, 6, 1, 4, 3, 5]
    output = bench.step()
    assert [r.request_id for r in output.generation] == [0, 2, 6, 1, 4, 3, 5]
