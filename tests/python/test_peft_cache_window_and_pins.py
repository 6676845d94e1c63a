"""What is brought in early and what must stay, through the Python API: window, pins, places.

Names quote the rules of the design: C of one tier, O of ownership, L of leases and loads.
"""

from __future__ import annotations

import pytest
from tests.support.async_bench import PAGES, Bench, MakeBench
from tests.support.cache_fixtures import fake_adapter

from pagedlora import (
    AdapterNotFoundError,
    AdapterTooLargeError,
    InvalidArgumentError,
    LlmRequest,
    LoraCacheFullError,
)


def test_l4_the_window_is_brought_in_nearest_first_and_never_gives_up_a_nearer_one(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=2, device=1)
    a, b, c = tasks = [bench.register() for _ in range(3)]

    def prefetch(*window: int) -> list[bool]:
        bench.peft.prefetch([LlmRequest(50 + task, task) for task in window])
        assert bench.peft.wait_idle()
        return bench.on_host(*tasks)

    assert prefetch(a, b, c) == [True, True, False], "c would take the place of a nearer one"
    assert prefetch(b, a, c) == [True, True, False]
    on_device = bench.peft.is_task_cached_device
    assert [on_device(task) for task in tasks] == [False, True, False], "once it is on the host"
    assert prefetch(c, b) == [False, True, True], "a is not in the window any more"
    assert prefetch(c, a) == [True, False, True], "nor is b"
    assert [on_device(task) for task in tasks] == [False, False, True], "the nearest one"
    assert prefetch() == [True, False, True]
    assert prefetch(12345, b) == [True, True, False], "unknown ones are ignored"


def test_l4_the_window_takes_nothing_from_who_is_started_paused_or_leased(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=2, device=1)
    a, b, c = (bench.register() for _ in range(3))
    started, paused = bench.add_and_load(1, a), bench.add_and_load(2, b)
    bench.ensure(started)
    bench.peft.mark_request_done(paused, pause=True)
    for _ in range(2):
        bench.peft.prefetch([LlmRequest(3, c), LlmRequest(2, b)])
        assert bench.peft.wait_idle()
        assert bench.on_host(a, b, c) == [True, True, False]
        assert bench.peft.is_task_cached_device(a)


def test_o2_a_pin_keeps_the_host_copy(make_bench: MakeBench) -> None:
    bench = make_bench(host=3)
    a, b, c = (bench.register() for _ in range(3))
    bench.peft.pin(a)
    bench.peft.pin(a)
    bench.peft.pin(b)
    with pytest.raises(LoraCacheFullError) as full:
        bench.peft.pin(c)  # it and the largest adapter would not fit beside them
    assert (full.value.tier, full.value.needed_pages, full.value.free_pages) == ("host", 10, 5)
    assert str(full.value) == (
        "the host cache cannot pin the adapter: beside pinned ones there must be room for the "
        "largest known adapter, of 5 pages, but this one has 5, pinned already are 10, and all are "
        "15; unpin another one or raise host_cache_size"
    )
    assert bench.peft.wait_idle()
    bench.peft.unpin(a)
    bench.peft.evict_unowned("host")
    assert bench.on_host(a, b) == [True, True]
    bench.peft.unpin(a)
    bench.peft.evict_unowned("host")
    assert bench.on_host(a, b) == [False, True]
    with pytest.raises(InvalidArgumentError, match="not pinned"):
        bench.peft.unpin(a)


def test_o2_a_pin_does_not_outlive_a_load_that_failed(bench: Bench) -> None:
    task = bench.register()
    bench.source(task).fail_open()
    bench.peft.pin(task)
    assert bench.peft.wait_idle()
    assert isinstance(bench.peft.core.load_error(task), AdapterNotFoundError)
    with pytest.raises(InvalidArgumentError, match="not pinned"):
        bench.peft.unpin(task)
    bench.peft.pin(task)
    assert bench.peft.core.load_error(task) is None, "another one was begun"
    assert bench.peft.wait_idle()
    bench.check_content(task)


def test_o3_an_adapter_that_does_not_fit_beside_the_pins_is_too_large(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=2)
    small = bench.register()
    bench.peft.pin(small)
    weights = fake_adapter(bench.peft.model_config, rank=8)
    with pytest.raises(AdapterTooLargeError) as caught:
        bench.peft.add_request_peft(LlmRequest(1, 7, weights))
    assert (caught.value.tier, caught.value.total_pages) == ("host", PAGES)


def test_o4_who_has_started_takes_the_place_of_the_latest_who_have_not(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(host=4)
    tasks = [bench.register() for _ in range(6)]
    started = bench.add_and_load(0, tasks[0])
    bench.ensure(started).close()
    paused = bench.add_and_load(1, tasks[1])
    bench.peft.mark_request_done(paused, pause=True)
    early, late = bench.add(2, tasks[2]), bench.add_and_load(3, tasks[3])
    with pytest.raises(LoraCacheFullError):
        bench.add(4, tasks[4])
    newcomer = bench.add_and_load(4, tasks[4], started=True)
    assert bench.states(started, paused, early, late) == ["ready", "ready", "ready", "waiting"]
    assert bench.peft.poll() == [], "that is no failure"
    another = bench.add_and_load(5, tasks[5], started=True)
    assert bench.states(early, newcomer, another) == ["waiting", "ready", "ready"]
    with pytest.raises(LoraCacheFullError) as full:
        bench.add(6, tasks[2], started=True)  # now all have started, or are paused
    assert full.value.evictable_pages == 0
    bench.peft.mark_request_done(started)
    bench.add_and_load(3, tasks[3])
