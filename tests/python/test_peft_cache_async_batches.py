"""Batches of the cache with workers, through its Python API: what they wait for, and leases.

Names quote the rules of the design: C of one tier, O of ownership, L of leases and loads.
"""

from __future__ import annotations

import pytest
from tests.support.async_bench import LIMIT_S, Bench, MakeBench
from tests.support.cache_fixtures import Call, wait_until

from pagedlora import AdapterLoadTimeout, InvalidArgumentError, LeaseClosedError, LlmRequest


@pytest.mark.parametrize("one_pass", [False, True])
def test_o5_ensure_batch_waits_for_the_loads_of_its_tasks(
    make_bench: MakeBench, one_pass: bool
) -> None:
    bench = make_bench(one_pass=one_pass)
    task, other = bench.register_late(), bench.register_late()
    request = bench.add(1, task)
    bench.add(2, other)
    call = Call(bench.ensure, request)
    assert wait_until(lambda: bench.peft.stats.device.misses == 1)
    assert not call.has_returned
    bench.source(task).release_reads()
    lease = call.result()
    assert list(lease) == [1]
    assert bench.device.num_copies == int(not one_pass)
    bench.check_content(task, "device")
    bench.check_content(task, "host")
    assert bench.states(LlmRequest(2, other)) == ["loading"], "of no other task"


def test_l1_a_batch_gives_up_what_takes_too_long_and_leases_the_others(bench: Bench) -> None:
    task, late = bench.register(), bench.register_late()
    fine, request = bench.add_and_load(1, task), bench.add(2, late)
    bench.source(late).wait_for_reads(1)
    call = Call(bench.ensure, fine, request)
    assert wait_until(lambda: bench.peft.is_task_cached_device(task))
    bench.clock.advance(LIMIT_S)
    lease = call.result()
    assert list(lease) == [1]
    assert isinstance(lease.errors[2], AdapterLoadTimeout)
    assert lease.errors[2].limit_seconds == LIMIT_S
    assert bench.states(fine, request) == ["ready", "failed"]


def test_l1_a_copy_that_fails_is_an_error_of_its_requests(bench: Bench) -> None:
    request = bench.add_and_load(1, bench.register())
    bench.device.fail_copy_after(0)
    lease = bench.ensure(request)
    assert type(lease.errors[1]) is RuntimeError, "what the device threw"
    assert bench.states(request) == ["ready"], "its host copy is there"
    assert list(bench.ensure(request)) == [1]


def test_l2_as_many_leases_are_open_together_as_were_asked_for(make_bench: MakeBench) -> None:
    bench = make_bench(max_inflight_batches=2)
    tasks = [bench.register() for _ in range(3)]
    requests = [bench.add_and_load(number, task) for number, task in enumerate(tasks)]
    first, second = bench.ensure(requests[0]), bench.ensure(requests[0], requests[1])
    assert bench.peft.open_lease_tasks() == {tasks[0], tasks[1]}
    with pytest.raises(InvalidArgumentError, match="max_inflight_batches is 2"):
        bench.ensure(requests[2])
    assert first.is_open
    assert second.is_open
    assert not bench.peft.is_task_cached_device(tasks[2])
    second.close()
    assert bench.peft.open_lease_tasks() == {tasks[0]}
    third = bench.ensure(requests[2])
    assert bench.peft.open_lease_tasks() == {tasks[0], tasks[2]}
    del first
    third.close()
    assert bench.peft.open_lease_tasks() == set(), "a lease that nobody has is closed"


def test_l2_with_one_in_flight_the_next_batch_closes_the_lease(bench: Bench) -> None:
    requests = [bench.add_and_load(number, bench.register()) for number in range(2)]
    first = bench.ensure(requests[0])
    second = bench.ensure(requests[1])
    assert second.is_open
    assert bench.peft.open_lease_tasks() == {requests[1].lora_task_id}
    with pytest.raises(LeaseClosedError):
        _ = first[0]
