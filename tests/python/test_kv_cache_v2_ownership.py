"""Who owns an adapter while requests are suspended, resumed, computed again and ended.

Names quote the rules: S1 is one call per transition; O1 that owners stay as they were when a call
fails. Each test runs on counted pages and on the real cache.
"""

from __future__ import annotations

import pytest
from tests.support.scheduling import Bench, MakePeft, PeftKind, names_in

from pagedlora import AdapterReadError, LoraCacheFullError
from pagedlora.requests import LlmRequest, RequestState


def full_error() -> LoraCacheFullError:
    return LoraCacheFullError("full", tier="host", needed_pages=1, free_pages=0, evictable_pages=0)


def two_running(peft: PeftKind, **options: int) -> tuple[Bench, LlmRequest, LlmRequest]:
    """Two that generate; the next step takes the three blocks of the younger for the older."""
    bench = Bench(peft, num_blocks=5, **options)
    older, younger = bench.add("A", prompt=5), bench.add("B", prompt=7)
    steady(bench, 4)
    assert (older.num_computed_tokens, younger.num_computed_tokens) == (8, 10)
    assert bench.kv.num_free_blocks == 0
    peft.iteration_stats()
    return bench, older, younger


def steady(bench: Bench, passes: int = 3) -> None:
    for _ in range(passes):
        bench.step()


# ---- suspension ----------------------------------------------------------------------------------


def test_s1_suspending_a_victim_pauses_it_once(make_peft: MakePeft) -> None:
    peft = make_peft()
    bench, older, younger = two_running(peft)
    output = bench.step()
    assert output.suspended == [younger]
    assert peft.counts(younger) == (1, 1, 0)
    assert peft.counts(older) == (1, 0, 0)
    assert (peft.owner_state(older), peft.owner_state(younger)) == ("active", "paused")
    stats = peft.iteration_stats()
    if stats is not None:
        assert (stats["requestsPaused"], stats["requestsResumed"]) == (1, 0)
    steady(bench)
    assert peft.counts(younger) == (1, 1, 0)


def test_s1_suspending_oneself_pauses_once(make_peft: MakePeft) -> None:
    peft = make_peft()
    bench = Bench(peft, num_blocks=5)
    older, younger = bench.add("A", prompt=7), bench.add("B", prompt=7)
    steady(bench, 2)
    output = bench.step()  # both need a block, and there is one
    assert output.generation == [older]
    assert output.suspended == [younger]
    assert peft.counts(younger) == (1, 1, 0)
    assert peft.counts(older) == (1, 0, 0)
    assert peft.owner_state(younger) == "paused"
    assert bench.kv.is_suspended(younger)


def test_s1_a_request_suspended_before_it_started_makes_no_call(make_peft: MakePeft) -> None:
    peft = make_peft()
    bench = Bench(peft, num_blocks=2)
    fresh = bench.add("A", prompt=8)
    bench.schedule()  # it has blocks, and nothing is computed
    urgent = bench.add("B", prompt=4, priority=1)
    output = bench.schedule()
    assert output.suspended == [fresh]
    assert names_in(output) == [urgent.request_id]
    assert peft.counts(fresh) == (1, 0, 0)
    assert peft.owner_state(fresh) == "active"
    bench.compute(output)
    bench.end(urgent)
    output = bench.step()
    assert names_in(output) == [fresh.request_id]
    assert peft.counts(fresh) == (1, 0, 0)


def test_s1_a_request_suspended_after_its_first_chunk_is_paused(make_peft: MakePeft) -> None:
    peft = make_peft()
    bench = Bench(peft, num_blocks=2, max_num_tokens=4)
    begun = bench.add("A", prompt=8, max_tokens=1)
    bench.step()
    bench.add("B", prompt=8, max_tokens=1, priority=1)
    bench.step()
    assert bench.step().suspended == [begun]
    assert peft.counts(begun) == (1, 1, 0)
    assert peft.owner_state(begun) == "paused"
    bench.run()
    assert peft.counts(begun)[2] == 1


# ---- resumption ----------------------------------------------------------------------------------


class AddWatch:
    """Looks at the KV blocks when an adapter is added."""

    def __init__(self, bench: Bench) -> None:
        self.blocks: list[int] = []
        peft = bench.peft
        assert peft is not None
        real_add = peft.manager.add_request_peft

        def add(request: LlmRequest, try_gpu_cache: object = None) -> None:
            assert try_gpu_cache is True
            self.blocks.append(len(bench.kv.block_table(request)))
            real_add(request, True)

        peft.manager.add_request_peft = add


def test_s1_a_resume_adds_once_after_its_blocks_were_had(make_peft: MakePeft) -> None:
    peft = make_peft()
    bench, older, younger = two_running(peft)
    bench.step()
    watch = AddWatch(bench)
    bench.end(older)
    peft.iteration_stats()
    output = bench.step()
    assert output.generation == [younger]
    assert watch.blocks == [3]
    assert peft.owner_state(younger) == "active"
    assert bench.kv.num_suspended_blocks == 0
    stats = peft.iteration_stats()
    if stats is not None:
        assert (stats["requestsPaused"], stats["requestsResumed"]) == (0, 1)
    steady(bench)
    assert watch.blocks == [3]
    assert peft.counts(younger) == (2, 1, 0)


def test_s1_calls_and_transitions_stay_one_to_one(make_peft: MakePeft) -> None:
    peft = make_peft()
    bench = Bench(peft, num_blocks=4)
    often = bench.add("A", prompt=7)
    bench.step()
    for turn in range(1, 4):
        urgent = bench.add("B", prompt=12, priority=1)
        output = bench.step()
        assert output.suspended == [often]
        assert peft.counts(often) == (turn, turn, 0)
        steady(bench, 2)
        bench.end(urgent)
        assert bench.step().generation == [often]
        assert peft.counts(often) == (turn + 1, turn, 0)


def test_o1_a_resume_without_blocks_leaves_it_paused_and_a_later_one_adds_once(
    make_peft: MakePeft,
) -> None:
    peft = make_peft()
    bench, older, younger = two_running(peft)
    steady(bench, 3)
    assert younger.state is RequestState.SUSPENDED
    assert peft.counts(younger) == (1, 1, 0)
    assert peft.owner_state(younger) == "paused"
    bench.end(older)
    assert bench.step().generation == [younger]
    assert peft.counts(younger) == (2, 1, 0)


class CountingCopier:
    """Counts copies of blocks in each direction."""

    def __init__(self) -> None:
        self.to_host = self.from_host = 0

    def copy_to_host(self, device_blocks: object, host_blocks: object) -> None:
        self.to_host += 1

    def copy_from_host(self, host_blocks: object, device_blocks: object) -> None:
        self.from_host += 1


def test_a_resume_whose_adapter_finds_no_room_is_suspended_again_with_its_blocks(
    make_peft: MakePeft,
) -> None:
    peft = make_peft()
    bench, older, younger = two_running(peft)
    copier = CountingCopier()
    bench.kv._copier = copier
    bench.step()
    bench.end(older)
    assert younger.lora_task_id is not None
    peft.manager.add_errors[younger.lora_task_id] = full_error()
    for tries in (1, 2):
        output = bench.step()
        assert not output.generation
        assert not output.suspended
        assert not output.recompute_paused
        assert not output.failed
        assert bench.kv.is_suspended(younger)
        assert (bench.kv.num_suspended_blocks, bench.kv.num_used_blocks) == (3, 0)
        assert peft.counts(younger) == (1 + tries, 1, 0)
        assert peft.owner_state(younger) == "paused"
    assert copier.to_host == 1
    peft.manager.add_errors.clear()
    assert bench.step().generation == [younger]
    assert peft.counts(younger) == (4, 1, 0)
    assert copier.to_host == 1


def test_a_resume_whose_adapter_is_lost_fails_alone(make_peft: MakePeft) -> None:
    peft = make_peft()
    bench, older, younger = two_running(peft)
    bench.step()
    bench.end(older)
    other = bench.add("C", prompt=2)
    error = AdapterReadError("gone", path="x")
    assert younger.lora_task_id is not None
    peft.manager.add_errors[younger.lora_task_id] = error
    output = bench.step()
    assert output.failed == [(younger, error)]
    assert names_in(output) == [other.request_id]
    assert younger.error is error
    assert peft.owner_state(younger) == "none"
    assert bench.kv.num_suspended_blocks == 0
    assert bench.kv.num_used_blocks == len(bench.kv.block_table(other))


# ---- recomputation -------------------------------------------------------------------------------


def test_s1_losing_keys_and_values_pauses_once_and_coming_back_adds_again(
    make_peft: MakePeft,
) -> None:
    peft = make_peft()
    bench, older, younger = two_running(peft, host_blocks=0)
    output = bench.step()
    assert output.recompute_paused == [younger]
    assert not output.suspended
    assert peft.counts(younger) == (1, 1, 0)
    assert peft.owner_state(younger) == "paused"
    assert (younger.state, younger.num_context_tokens) == (RequestState.WAITING, 11)
    steady(bench, 2)
    assert peft.counts(younger) == (1, 1, 0)
    bench.end(older)
    output = bench.step()
    assert [(c.request, c.num_tokens) for c in output.context] == [(younger, 11)]
    assert peft.counts(younger) == (2, 1, 0)
    assert peft.owner_state(younger) == "active"
    steady(bench, 2)
    assert peft.counts(younger) == (2, 1, 0)


def test_s1_a_suspended_one_that_must_leave_the_host_is_not_paused_again(
    make_peft: MakePeft,
) -> None:
    peft = make_peft(device_adapters=3)
    bench = Bench(peft, num_blocks=4, host_blocks=2)
    low = bench.add("A", prompt=7, priority=0)
    bench.step()
    middle = bench.add("B", prompt=7, priority=1)
    bench.step()
    high = bench.add("C", prompt=7, priority=2)
    assert bench.step().suspended == [low]
    top = bench.add("A", prompt=7, priority=3)
    output = bench.step()
    assert output.suspended == [middle]
    assert output.recompute_paused == [low]
    assert peft.counts(low) == (1, 1, 0)
    assert peft.owner_state(low) == "paused"
    assert peft.counts(middle) == (1, 1, 0)
    for request in (top, high, middle):
        bench.end(request)
    output = bench.step()
    assert [chunk.request for chunk in output.context] == [low]
    assert peft.counts(low) == (2, 1, 0)


# ---- without adapters ----------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_s1_requests_without_an_adapter_make_no_call(make_peft: MakePeft, host_blocks: int) -> None:
    peft = make_peft()
    bench = Bench(peft, num_blocks=5, host_blocks=host_blocks)
    requests = [bench.add(None, prompt=7, max_tokens=9) for _ in range(3)]
    gave_way = 0
    while bench.live:
        output = bench.step()
        gave_way += len(output.suspended) + len(output.recompute_paused)
    assert gave_way > 0
    assert not peft.manager.calls
    assert all(len(request.output_token_ids) == 9 for request in requests)


@pytest.mark.parametrize("host_blocks", [0, 2, 64])
@pytest.mark.parametrize("task", [None, 7])
def test_s1_without_a_manager_every_path_works(host_blocks: int, task: int | None) -> None:
    bench = Bench(None, num_blocks=5, host_blocks=host_blocks)
    requests = [bench.add(prompt=7, max_tokens=9, priority=p) for p in (0, 0, 1)]
    for request in requests:
        request.lora_task_id = task
    gave_way = 0
    while bench.live:
        output = bench.step()
        gave_way += len(output.suspended) + len(output.recompute_paused)
    assert gave_way > 0
    assert all(len(request.output_token_ids) == 9 for request in requests)
