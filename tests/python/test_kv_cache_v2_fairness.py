"""Nobody starves, and nobody takes turns in displacing each other.

S3: precedence never falls. S4: how often others go ahead. S5: the head of the queue for host space.
Adapters are counted pages, and their loads take any number of passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.engine_bench import EngineBench, assert_undisturbed
from tests.support.recorded_peft import RecordedPeftManager

from pagedlora import LlmRequest, LoraCacheFullError
from pagedlora.requests import RequestState
from pagedlora.scheduler.admission_window import AdmissionWindow
from pagedlora.scheduler.step import SchedulerOutput

pytestmark = pytest.mark.slow

PAGES = {1: 1, 2: 1, 3: 2, 4: 3, 5: 4}
DEVICE_PAGES = 4


@dataclass(frozen=True)
class Arrival:
    """A request to come.

    Attributes:
        delay: Passes after the one before.
        task: Its adapter.
        load: Passes that the load of the adapter takes, if it is not loaded.
        prompt: Tokens.
        max_tokens: Tokens.
        priority: Higher first.
    """

    delay: int
    task: int | None
    load: int
    prompt: int
    max_tokens: int
    priority: int


arrivals = st.lists(
    st.builds(
        Arrival,
        delay=st.integers(0, 3),
        task=st.sampled_from((None, *PAGES)),
        load=st.integers(0, 6),
        prompt=st.integers(1, 9),
        max_tokens=st.integers(1, 7),
        priority=st.sampled_from((0, 0, 0, 1)),
    ),
    min_size=1,
    max_size=14,
)


@dataclass
class Watch:
    """Looks at every pass of an engine.

    Attributes:
        engine: Under test.
        max_skips: The bound.
        ranks: What each live request's precedence was in the last pass.
        displaced: (who gave way, for whom) with whether the first had come past the bound.
        overtaken: Passes that admitted others ahead, by request.
    """

    engine: EngineBench
    max_skips: int
    ranks: dict[int, tuple[bool, int, int]] = field(default_factory=dict)
    displaced: dict[tuple[int, int], bool] = field(default_factory=dict)
    overtaken: dict[int, int] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)

    def look(self, before: dict[int, str], output: SchedulerOutput) -> None:
        """After each pass; `before` has the adapters' states before it."""
        scheduler = self.engine.scheduler
        now = {r.request_id: scheduler.precedence(r) for r in self.engine.live}
        for request_id, rank in now.items():
            assert rank <= self.ranks.get(request_id, rank), "S3: precedence fell"
        self.ranks.update(now)
        scheduled = [*output.generation, *(chunk.request for chunk in output.context)]
        admitted = [r for r in scheduled if r.request_id not in self.computed]
        self._note_displacements(output, scheduled)
        first: dict[int | None, LlmRequest] = {}
        for request in sorted(scheduled, key=scheduler.precedence):
            first.setdefault(request.lora_task_id, request)
        taking = [r for r in admitted if first[r.lora_task_id] is r and r.lora_task_id is not None]
        self._count_overtaking(before, admitted, taking)
        self.computed.update(r.request_id for r in scheduled)

    def _note_displacements(self, output: SchedulerOutput, scheduled: list[LlmRequest]) -> None:
        """Whoever runs in a pass in which another gives way stands before it: no cycle is left."""
        for loser in (*output.suspended, *output.recompute_paused):
            mine = self.ranks.get(loser.request_id)
            for winner in scheduled:
                theirs = self.ranks.get(winner.request_id)
                if mine is None or theirs is None or theirs > mine:
                    continue
                is_past = not theirs[0]
                assert (winner.request_id, loser.request_id) not in self.displaced or is_past
                self.displaced[loser.request_id, winner.request_id] = is_past

    def _count_overtaking(
        self, before: dict[int, str], admitted: list[LlmRequest], taking: list[LlmRequest]
    ) -> None:
        """S4, for the oldest waiting of its priority that was ready.

        Only those count that take device pages: who finds its adapter in the batch already, or has
        none, is never held back.
        """
        seen: set[int] = set()
        for request in self.engine.live:
            number = request.request_id
            if number in self.computed or request in admitted or request.priority in seen:
                continue
            seen.add(request.priority)
            if before.get(number) != "ready":
                continue
            ahead = [
                other
                for other in taking
                if other.priority <= request.priority and other.request_id > number
            ]
            self.overtaken[number] = self.overtaken.get(number, 0) + bool(ahead)
            assert self.overtaken[number] <= self.max_skips, "S4"


def play(queue: list[Arrival], *, max_skips: int, **options: Any) -> tuple[EngineBench, Watch]:
    """Runs all to their end."""
    peft = RecordedPeftManager(PAGES, device_pages=DEVICE_PAGES, host_pages=options.pop("host"))
    engine = EngineBench(peft, max_skip_passes=max_skips, **options)
    engine.use_tasks_of_requests()
    watch, loads, waiting = Watch(engine, max_skips), dict[int, int](), list(queue)
    requests: list[LlmRequest] = []
    delay = waiting[0].delay
    for _ in range(600):
        while waiting and delay == 0:
            arrival = waiting.pop(0)
            delay = waiting[0].delay if waiting else 0
            requests.append(
                engine.add(
                    arrival.task,
                    prompt=arrival.prompt,
                    max_tokens=arrival.max_tokens,
                    priority=arrival.priority,
                )
            )
            if arrival.task is not None and arrival.task not in peft.owners:
                loads[arrival.task] = arrival.load
        delay = max(0, delay - 1)
        peft.loading = {task for task, passes in loads.items() if passes > 0}
        for task in peft.owners:
            loads[task] = loads.get(task, 0) - 1
        before = {r.request_id: peft.adapter_state(r) for r in engine.live}
        num_outputs = len(engine.outputs)
        if engine.core.has_unfinished:
            engine.core.step()
        if len(engine.outputs) > num_outputs:
            watch.look(before, engine.outputs[-1])
        if not waiting and not engine.core.has_unfinished:
            break
    assert not engine.core.has_unfinished, "not every request ends"
    for request in requests:
        assert_undisturbed(request)
    return engine, watch


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    queue=arrivals,
    max_skips=st.integers(1, 4),
    host=st.sampled_from((4, 6, 20)),
    policy=st.sampled_from(("max_utilization", "guaranteed_no_evict")),
    num_blocks=st.sampled_from((4, 7, 30)),
    host_blocks=st.sampled_from((0, 3, 30)),
    max_num_tokens=st.sampled_from((2, 6, 40)),
    max_batch_size=st.sampled_from((1, 3, 8)),
)
def test_s3_s4_every_request_ends_and_none_waits_too_long(
    queue: list[Arrival], max_skips: int, **options: Any
) -> None:
    play(queue, max_skips=max_skips, **options)


def test_s4_a_younger_one_that_came_past_the_bound_meanwhile_counts_too() -> None:
    def arrival(task: int | None, load: int, max_tokens: int = 1, priority: int = 0) -> Arrival:
        return Arrival(0, task, load, 1, max_tokens, priority)

    queue = [arrival(None, 0) for _ in range(5)]
    queue += [arrival(5, 0), arrival(2, 4), arrival(3, 0, 3, 1), arrival(3, 1)]
    queue += [arrival(4, 1), arrival(1, 2), arrival(5, 3)]
    play(
        queue,
        max_skips=1,
        host=20,
        num_blocks=7,
        host_blocks=0,
        max_num_tokens=6,
        max_batch_size=3,
    )


# ---- S4 ------------------------------------------------------------------------------------------


def make_engine(**options: Any) -> tuple[EngineBench, RecordedPeftManager]:
    peft = RecordedPeftManager(
        PAGES, device_pages=DEVICE_PAGES, host_pages=options.pop("host", 100)
    )
    engine = EngineBench(peft, **({"num_blocks": 60} | options))
    engine.use_tasks_of_requests()
    return engine, peft


@pytest.mark.parametrize("max_skips", [1, 3])
@pytest.mark.parametrize("stream", [[1], [1, 2], [3]])
def test_s4_a_stream_for_resident_adapters_does_not_starve_a_cold_large_one(
    stream: list[int], max_skips: int
) -> None:
    engine, _ = make_engine(max_skip_passes=max_skips, max_batch_size=8)
    engine.add(stream[0], max_tokens=4)
    engine.core.step()
    large = engine.add(5, max_tokens=2)
    passes = 0
    while not large.output_token_ids:
        engine.add(stream[passes % len(stream)], max_tokens=4)
        engine.core.step()
        passes += 1
        assert passes <= max_skips + 2
    engine.run()


def test_s4_started_requests_are_not_held_back_by_a_reservation() -> None:
    engine, peft = make_engine(max_skip_passes=1)
    started = engine.add(4, max_tokens=20)
    engine.core.step()
    peft.leased_elsewhere = {1, 2}
    engine.core.step()
    num_tokens = len(started.output_token_ids)
    peft.leased_elsewhere = set()
    large = engine.add(5, max_tokens=2)
    younger = engine.add(1, max_tokens=6)
    for _ in range(4):
        engine.core.step()
    assert len(started.output_token_ids) >= num_tokens + 1
    engine.run()
    for request in (started, large, younger):
        assert_undisturbed(request)


def test_s4_an_older_large_one_holds_back_new_ones_only() -> None:
    """Somebody's lease keeps the large one out for long; those that started go on."""
    engine, peft = make_engine(max_skip_passes=2)
    started = engine.add(2, max_tokens=30)
    peft.owners.setdefault(1, set()).add(999)
    engine.add(1, max_tokens=1)
    engine.core.step()
    peft.leased_elsewhere = {1}
    large = engine.add(5, max_tokens=1)
    late: list[LlmRequest] = []
    for _ in range(5):
        late.append(engine.add(3, max_tokens=1))
        before = len(started.output_token_ids)
        engine.core.step()
        assert len(started.output_token_ids) == before + 1
    assert [request.has_started for request in late] == [True, True, False, False, False]
    base = engine.add(None, max_tokens=1)
    engine.core.step()
    assert base.has_ended, "who needs no pages is not held back"
    assert not large.has_started
    peft.leased_elsewhere = set()
    engine.core.step()
    assert large.has_ended
    peft.owners[1].discard(999)
    engine.run()


# ---- S5 ------------------------------------------------------------------------------------------


def window_of(host_pages: int, **options: int) -> tuple[AdmissionWindow, RecordedPeftManager]:
    peft = RecordedPeftManager(PAGES, device_pages=DEVICE_PAGES, host_pages=host_pages)
    return AdmissionWindow(peft, **({"size": 8} | options)), peft


def waiting(*tasks: int | None) -> list[LlmRequest]:
    return [LlmRequest(number, lora_task_id=task) for number, task in enumerate(tasks)]


def test_s5_the_first_one_refused_is_the_head_and_nothing_is_loaded_ahead_behind_it() -> None:
    window, peft = window_of(4)
    queue = waiting(4, 3, 5, 1, None)  # three, two, four pages, and one
    assert window.update(queue) == []
    assert window.head is not None
    assert window.head[0] is queue[1]
    assert isinstance(window.head[1], LoraCacheFullError)
    assert peft.prefetched == [0, 1, 3]
    assert peft.calls == [("add", number) for number in range(4)]


def test_s5_a_pass_that_adds_nobody_ahead_of_the_head_does_not_count() -> None:
    window, peft = window_of(4, max_skip_passes=1)
    queue = waiting(5, 5, 3)
    for _ in range(5):
        window.update(queue)
    peft.calls.clear()
    more = [*queue, LlmRequest(9, lora_task_id=5)]
    window.update(more)
    assert ("add", 9) in peft.calls


@pytest.mark.parametrize("bound", [1, 3])
def test_s5_past_the_bound_nobody_behind_the_head_is_let_in_until_it_is(bound: int) -> None:
    window, peft = window_of(4, max_skip_passes=bound)
    running, head = waiting(3, 5)
    window.update([running, head])
    ahead = 0
    live = [running]
    for number in range(10, 20):
        request = LlmRequest(number, lora_task_id=1)
        window.update([head, request])
        if peft.adapter_state(request) == "waiting":
            break
        ahead += 1
        live.append(request)
    assert ahead == bound
    assert peft.count("add", 10 + bound) == 0
    for request in live:
        peft.mark_request_done(request)
    assert window.update([head]) == []
    assert window.head is None
    assert peft.adapter_state(head) == "ready"


def test_s5_a_new_head_starts_to_count_anew() -> None:
    window, peft = window_of(4, max_skip_passes=1)
    running, first, second = waiting(3, 5, 4)
    window.update([running, first, LlmRequest(10, lora_task_id=1)])
    window.update([first, LlmRequest(11, lora_task_id=1)])
    assert peft.count("add", 11) == 0
    window.update([second, LlmRequest(12, lora_task_id=1)])
    assert peft.count("add", 12) == 1


def test_only_the_front_of_the_queue_is_looked_at() -> None:
    window, peft = window_of(100, size=3)
    window.update(waiting(None, 1, 2, 3, 4))
    assert peft.calls == [("add", 1), ("add", 2)]
    assert peft.prefetched == [1, 2]


def test_a_suspended_owner_is_not_added_by_the_window() -> None:
    window, peft = window_of(100)
    (request,) = waiting(1)
    window.update([request])
    peft.mark_request_done(request, True)
    request.state = RequestState.SUSPENDED
    window.update([request])
    assert peft.calls == [("add", 0), ("pause", 0)]
    assert peft.prefetched == [0]
