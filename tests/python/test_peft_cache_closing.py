"""Closing a cache whose loads hang, and the GIL, which no call keeps while it waits.

Names quote the rules of the design: C of one tier, O of ownership, L of leases and loads.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.async_bench import Bench, MakeBench
from tests.support.cache_fixtures import Call, wait_until

from pagedlora import InvalidArgumentError, PeftCacheManager


def test_l8_close_gives_up_what_hangs_and_returns(make_bench: MakeBench) -> None:
    bench = make_bench(max_inflight_batches=2)
    peft, task = bench.peft, bench.register_late()
    fine, copied = bench.add_and_load(1, bench.register()), bench.add_and_load(2, bench.register())
    hanging = bench.add(3, task)
    bench.source(task).wait_for_reads(1)
    lease = bench.ensure(fine)
    bench.device.hold_copies()
    peft.prefetch([copied])
    batch, waiting = Call(bench.ensure, hanging), Call(peft.poll, 1e6)
    assert wait_until(lambda: peft.stats.device.misses == 2)
    for _ in range(2):
        Call(peft.close).result()
    waiting.result()
    with pytest.raises(InvalidArgumentError, match="closed"):
        batch.result()
    assert not lease.is_open
    assert bench.states(fine, hanging) == ["ready", "failed"]
    assert isinstance(peft.adapter_error(hanging), InvalidArgumentError)
    for call in (
        bench.register,
        lambda: bench.add(4, task),
        lambda: bench.ensure(fine),
        lambda: peft.prefetch([fine]),
        lambda: peft.pin(task),
    ):
        with pytest.raises(InvalidArgumentError, match="closed"):
            call()
    peft.mark_request_done(fine)
    assert peft.poll() == []


SETUP = """
import threading, time
from pagedlora import _core

config = _core.LoraModelConfig([_core.LoraModule("m", 8, 8)], _core.Dtype.float32, 4)
source = _core.FakeSource(bytes(256))
row = _core.PlannedRow(0, 4, 1.0, 0, _core.Dtype.float32, 128, _core.Dtype.float32)
device = _core.FakeDevice()
manager = _core.PeftCacheManager(
    config, host_cache_bytes=8192, device_cache_bytes=8192, page_bytes=1024, device=device
)
tasks = [manager.register_task(_core.AdapterPlan(config, [row], source)) for _ in range(3)]
"""


def run_script(script: str) -> list[str]:
    """Lines that it prints; fails if it hangs."""
    command = [sys.executable, "-c", SETUP + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_l8_the_gil_is_released_while_calls_wait() -> None:
    """In another process: a call that kept it would never come to its end."""
    lines = run_script("""
calls = [lambda: manager.ensure_batch([0]), lambda: manager.wait_idle(50), lambda: manager.poll(50)]
for number, (task, call) in enumerate(zip(tasks, calls)):
    source.hold_reads()
    manager.add_request_peft(number, task)
    thread = threading.Thread(target=call)
    thread.start()
    source.wait_for_reads(number + 1)
    for _ in range(20):  # goes on while the other thread waits
        time.sleep(0.001)
    print(thread.is_alive())
    source.release_reads()
    thread.join()
    print(manager.adapter_state(number))
""")
    assert lines == ["True", "ready"] * 3


def test_l8_giving_up_a_load_wakes_who_waits_for_it() -> None:
    """By the system's clock: who waits by a manual one looks at it again and again."""
    lines = run_script("""
calls = [lambda: manager.ensure_batch([0]), lambda: manager.wait_idle(50), lambda: manager.poll(50)]
source.hold_reads()
for number, call in enumerate(calls):
    manager.add_request_peft(0, tasks[0])
    thread = threading.Thread(target=call)
    thread.start()
    source.wait_for_reads(number + 1)
    time.sleep(0.02)
    manager.mark_request_done(0)
    manager.evict_unowned("host")
    thread.join(20)
    print(thread.is_alive())
""")
    assert lines == ["False"] * 3


def test_l8_dropping_a_manager_whose_loads_hang_does_not_hang_the_interpreter() -> None:
    lines = run_script("""
manager.add_request_peft(0, tasks[0])
manager.wait_idle(50)
device.hold_copies()
manager.prefetch([tasks[0]])
source.hold_reads()
manager.add_request_peft(1, tasks[1])
source.wait_for_reads(2)
del manager
print("dropped")
""")
    assert lines == ["dropped"]


def test_a_cache_takes_a_device_and_a_clock_and_no_other_names(bench: Bench) -> None:
    request = bench.add_and_load(1, bench.register())
    bench.ensure(request)
    assert bench.device.num_copies == 1
    with pytest.raises(InvalidArgumentError, match="use 'cpu'"):
        PeftCacheManager(bench.peft.model_config, device="gpu")
