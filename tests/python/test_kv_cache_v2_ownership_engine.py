"""Who owns an adapter in a running engine: when requests give way, come back, finish, abort, fail.

S1 is one call per transition. Each test runs on counted pages and on the real cache.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.engine_bench import EngineBench, assert_undisturbed
from tests.support.scheduling import MakePeft, PeftKind

from pagedlora import AdapterReadError, LoraCacheFullError
from pagedlora.requests import LlmRequest, RequestState


def full_error() -> LoraCacheFullError:
    return LoraCacheFullError("full", tier="host", needed_pages=1, free_pages=0, evictable_pages=0)


def make_engine(peft: PeftKind, **options: Any) -> EngineBench:
    engine = EngineBench(peft.manager, **options)
    if not peft.is_real:
        engine.use_tasks_of_requests()
    return engine


def suspended_request(peft: PeftKind, **options: Any) -> tuple[EngineBench, LlmRequest, LlmRequest]:
    """An engine, an urgent request that runs, and one that gave way to it."""
    engine = make_engine(peft, num_blocks=4, **options)
    peft.warm("A")
    peft.warm("B")
    gave_way = engine.add(peft.task("A"), prompt=5, max_tokens=6)
    while not gave_way.output_token_ids:
        engine.core.step()
    urgent = engine.add(peft.task("B"), prompt=12, max_tokens=4, priority=1)
    while not urgent.output_token_ids:
        engine.core.step()
    assert peft.owner_state(gave_way) == "paused"
    return engine, urgent, gave_way


@pytest.mark.parametrize("host_blocks", [0, 16])
@pytest.mark.parametrize("how", ["finish", "abort", "load fails", "abort all"])
def test_s1_whoever_ends_is_released_once(make_peft: MakePeft, how: str, host_blocks: int) -> None:
    peft = make_peft()
    engine, urgent, gave_way = suspended_request(peft, host_blocks=host_blocks)
    if how == "abort":
        engine.core.abort(gave_way.request_id)
        engine.core.abort(urgent.request_id)
    elif how == "load fails":
        for request in (urgent, gave_way):
            engine.live.fail(request, AdapterReadError("gone", path="x"))
    elif how == "abort all":
        engine.core.abort_all(full_error())
    engine.run()
    adds = 2 if how == "finish" else 1
    assert peft.counts(gave_way) == (adds, 1, 1)
    assert peft.counts(urgent) == (1, 0, 1)
    for request in (urgent, gave_way):
        assert peft.owner_state(request) == "none"
    if how == "finish":
        assert_undisturbed(gave_way)
        assert_undisturbed(urgent)
    stats = peft.iteration_stats()
    if stats is not None:
        assert stats["requestsTerminated"] == 2
        assert (stats["activeTasks"], stats["pausedTasks"]) == (0, 0)


@pytest.mark.parametrize("how", ["finish", "abort", "abort all"])
def test_s1_without_an_adapter_no_end_makes_a_call(make_peft: MakePeft, how: str) -> None:
    peft = make_peft()
    engine = make_engine(peft, num_blocks=5)
    requests = [engine.add(None, prompt=7, max_tokens=9) for _ in range(2)]
    for _ in range(4):
        engine.core.step()
    assert any(request.state is RequestState.SUSPENDED for request in requests)
    if how == "abort":
        for request in requests:
            engine.core.abort(request.request_id)
    elif how == "abort all":
        engine.core.abort_all(full_error())
    engine.run()
    assert not peft.manager.calls
    if how == "finish":
        for request in requests:
            assert_undisturbed(request)


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_an_adapter_of_a_suspended_request_makes_room_on_the_device(
    make_peft: MakePeft, host_blocks: int
) -> None:
    peft = make_peft(device_adapters=1)
    engine, urgent, gave_way = suspended_request(peft, host_blocks=host_blocks)
    stats = peft.iteration_stats()
    if stats is not None:
        assert stats["tasksEvictedDevice"] == 1
        assert not peft.manager.is_task_cached_device(gave_way.lora_task_id)
    ended = engine.run()
    assert ended == [urgent, gave_way]
    assert_undisturbed(urgent)
    assert_undisturbed(gave_way)
    directions = [direction for direction, _ in engine.runner.blocks.copies]
    assert directions == (["to host", "from host"] if host_blocks else [])


@pytest.mark.parametrize("host_blocks", [0, 3, 16])
def test_many_in_a_small_space_get_the_answers_they_get_alone(
    make_peft: MakePeft, host_blocks: int
) -> None:
    peft = make_peft(device_adapters=2)
    engine = make_engine(peft, num_blocks=6, host_blocks=host_blocks, max_num_tokens=5)
    names = ["A", "B", None, "C", "A", "D", None, "E"]
    requests = [
        engine.add(peft.task(name), prompt=3 + i, max_tokens=12 - i, priority=i % 3)
        for i, name in enumerate(names)
    ]
    engine.run()
    for request in requests:
        assert_undisturbed(request)
        if request.lora_task_id is None:
            assert peft.counts(request) == (0, 0, 0)
        else:
            adds, pauses, releases = peft.counts(request)
            assert (adds, releases) == (1 + pauses, 1)
    assert any(output.suspended or output.recompute_paused for output in engine.outputs)
