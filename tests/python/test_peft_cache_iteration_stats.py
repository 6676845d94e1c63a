"""The counters of an iteration, through the Python API."""

from __future__ import annotations

from tests.support.async_bench import PAGES, MakeBench

COUNTERS = (
    *("requestsPaused", "requestsResumed", "requestsTerminated"),
    *("tasksReleasedDevice", "tasksReleasedHost"),
    *("tasksEvictedDevice", "pagesEvictedDevice", "tasksEvictedHost", "pagesEvictedHost"),
)
GAUGES = (
    *("devicePagesTotal", "devicePagesAvailable", "hostPagesTotal", "hostPagesAvailable"),
    *("deviceTasksInProgress", "deviceTasksDone", "activeTasks", "pausedTasks"),
)


def test_iteration_stats_count_each_transition_once(make_bench: MakeBench) -> None:
    bench = make_bench(host=2, device=1)
    stats, done = bench.peft.get_and_reset_iteration_stats, bench.peft.mark_request_done
    a, b, c = (bench.register() for _ in range(3))
    first, second, third = bench.add(1, a), bench.add(2, a), bench.add_and_load(3, b)

    def expect(**expected: int) -> None:
        found = stats()
        assert set(found) == {*COUNTERS, *GAUGES}
        assert len(found) == 17
        assert {name: found[name] for name in COUNTERS} == {
            name: expected.pop(name, 0) for name in COUNTERS
        }
        totals = {"devicePagesTotal": PAGES, "hostPagesTotal": 2 * PAGES, "hostPagesAvailable": 0}
        assert {name: found[name] for name in GAUGES} == {
            **dict.fromkeys(GAUGES, 0),
            **totals,
            **expected,
        }

    expect(devicePagesAvailable=PAGES, activeTasks=2)
    bench.ensure(first).close()
    for _ in range(2):
        bench.peft.mark_request_done(first, pause=True)
    expect(requestsPaused=1, deviceTasksInProgress=1, activeTasks=2, pausedTasks=1)
    done(second, pause=True)
    expect(requestsPaused=1, tasksReleasedDevice=1, deviceTasksDone=1, activeTasks=1, pausedTasks=1)
    for _ in range(2):
        bench.add(1, a)
    expect(requestsResumed=1, deviceTasksInProgress=1, activeTasks=2, pausedTasks=1)
    for _ in range(2):
        done(second)
        done(first)
    expect(
        requestsTerminated=2,
        tasksReleasedDevice=1,
        tasksReleasedHost=1,
        deviceTasksDone=1,
        activeTasks=1,
    )
    bench.ensure(third).close()
    expect(tasksEvictedDevice=1, pagesEvictedDevice=PAGES, deviceTasksInProgress=1, activeTasks=1)
    bench.add_and_load(4, c)
    expect(tasksEvictedHost=1, pagesEvictedHost=PAGES, deviceTasksInProgress=1, activeTasks=2)
    expect(deviceTasksInProgress=1, activeTasks=2)
