"""The step loop with a runner that computes nothing: order of calls, failures, finish reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.recorded_peft import RecordedLease, RecordedPeftManager

from pagedlora.engine.engine_core import EngineCore
from pagedlora.engine.live_requests import LiveRequests
from pagedlora.engine.sampler import uniform
from pagedlora.engine.step import StepBatch
from pagedlora.engine.step_stats import StepStats
from pagedlora.errors import AdapterSourceChangedError, PagedLoraError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.sampling_params import SamplingParams
from pagedlora.scheduler.admission_window import AdmissionWindow
from pagedlora.scheduler.kv_cache_v2 import KVCacheV2Scheduler

VOCABULARY = 50
EOS = 49
GREEDY = SamplingParams(temperature=0)
ENDS = (RequestState.FINISHED, RequestState.FAILED)


class CountingRunner:
    """Answers each token with the next number, after it checked the row.

    Attributes:
        steps: The steps so far.
        before: Called with each step before it is computed.
        stream: On which steps are said to be computed.
    """

    def __init__(self) -> None:
        self.steps: list[StepBatch] = []
        self.before: Callable[[StepBatch], None] = lambda step: None
        self.stream: int | None = None

    def forward(self, step: StepBatch, lease: Any = None) -> torch.Tensor:
        """One row of logits per sampled sequence; the token after its last one is certain."""
        self.before(step)
        self.steps.append(step)
        users = {s.request_id for s in step.sequences if s.uses_adapter}
        if users:
            assert isinstance(lease, RecordedLease)
            assert not lease.closed
            assert users <= set(lease.request_ids)
        logits = torch.zeros(step.num_sampled, VOCABULARY)
        for row, sequence in enumerate(s for s in step.sequences if s.sample):
            assert len(sequence.block_table) * 4 >= sequence.past_tokens + len(sequence.token_ids)
            logits[row, (sequence.token_ids[-1] + 1) % VOCABULARY] = 100.0
        return logits


class Engine:
    """An engine core with its parts."""

    def __init__(
        self,
        *,
        max_num_tokens: int = 16,
        pages: dict[int, int] | None = None,
        front_size: int = 1000,
    ) -> None:
        self.kv = KVCacheManager(64, 4)
        self.peft = RecordedPeftManager(pages or {7: 1, 8: 1, 9: 1}, device_pages=2)
        self.runner = CountingRunner()
        self.scheduler = KVCacheV2Scheduler(
            self.kv, self.peft, max_batch_size=4, max_num_tokens=max_num_tokens
        )
        live = LiveRequests(
            self.kv, self.peft, max_num_tokens=max_num_tokens, enable_chunked_prefill=True
        )
        self.stats = StepStats(self.kv, None)
        self.core = EngineCore(
            self.runner,
            self.scheduler,
            live,
            self.peft,
            AdmissionWindow(self.peft, size=16),
            eos_token_ids=frozenset({EOS}),
            front_size=front_size,
            stats=self.stats,
        )
        self._ids = iter(range(1000))

    def add(
        self,
        prompt: list[int],
        task: int | None = None,
        params: SamplingParams = GREEDY,
        max_tokens: int = 3,
        priority: int = 0,
    ) -> LlmRequest:
        request = LlmRequest(
            next(self._ids),
            lora_task_id=task,
            priority=priority,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling_params=params,
        )
        self.core.add(request)
        return request

    def run(self) -> list[LlmRequest]:
        """Steps to the end; gives the requests in the order in which they ended."""
        ended: list[LlmRequest] = []
        while self.core.has_unfinished:
            ended += [r for r in self.core.step() if r.state in ENDS]
            self.core.check_invariants()
        assert self.kv.num_used_blocks == 0
        assert not self.peft.owners
        assert all(lease.closed for lease in self.peft.leases)
        return ended


def test_a_mixed_batch_with_chunked_prompts_answers_each_request() -> None:
    engine = Engine(max_num_tokens=5)
    requests = [
        engine.add(list(range(n)), task)
        for n, task in [(9, 7), (2, None), (6, 8), (7, 9), (3, 7), (11, None)]
    ]
    engine.run()
    for request in requests:
        last = request.prompt_token_ids[-1]
        assert request.output_token_ids == [last + 1, last + 2, last + 3]
        assert request.finish_reason == "length"
    assert max(step.num_tokens for step in engine.runner.steps) == 5


def test_a_step_looks_at_the_front_of_the_queue_and_at_those_that_have_begun() -> None:
    engine = Engine(front_size=3)
    seen: list[int] = []
    schedule = engine.scheduler.schedule_request

    def count(requests: list[LlmRequest]) -> Any:
        seen.append(sum(not request.has_started for request in requests))
        return schedule(requests)

    engine.scheduler.schedule_request = count  # type: ignore[method-assign,assignment]
    requests = [engine.add([n, n + 1], (7, 8, 9, None)[n % 4]) for n in range(30)]
    ended = engine.core.step()
    late = [engine.add([n, n + 1], priority=n % 2) for n in range(30, 40)]
    ended += engine.run()
    assert max(seen) == 3
    assert [r for r in requests if r in ended] == requests, "none is lost"
    urgent = [r for r in late if r.priority == 1]
    assert ended.index(urgent[-1]) < ended.index(requests[15]), "priority counts behind the front"
    plain = [r for r in ended if r in requests and r.lora_task_id is None]
    assert plain == [r for r in requests if r.lora_task_id is None], "by arrival"


def test_who_gave_way_stays_in_front() -> None:
    """One that computes its context again waits, and is looked at beside the new ones."""
    engine = Engine(front_size=1, max_num_tokens=64)
    first = engine.add(list(range(8)), max_tokens=6)
    engine.core.step()
    engine.kv.free_resources(first)
    first.restart()
    others = [engine.add([n], max_tokens=3) for n in range(4)]
    live = engine.core._live
    assert live.front(1, engine.scheduler.precedence) == [first, others[0]]
    assert live.front(4, engine.scheduler.precedence) == [first, *others]


def test_chunks_cover_the_prompt_once_and_only_the_last_is_sampled() -> None:
    engine = Engine(max_num_tokens=4)
    engine.add(list(range(10)), max_tokens=2)
    engine.run()
    rows = [
        (s.token_ids, s.past_tokens, s.sample)
        for s in (t.sequences[0] for t in engine.runner.steps)
    ]
    assert rows == [
        ([0, 1, 2, 3], 0, False),
        ([4, 5, 6, 7], 4, False),
        ([8, 9], 8, True),
        ([10], 10, True),
    ]


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        (SamplingParams(temperature=0), [48, 49], "stop"),
        (SamplingParams(temperature=0, ignore_eos=True), [48, 49, 0, 1, 2], "length"),
        (SamplingParams(temperature=0, stop_token_ids=[48]), [48], "stop"),
        (SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[0]), [48, 49, 0], "stop"),
    ],
)
def test_what_ends_an_answer(params: SamplingParams, tokens: list[int], reason: str) -> None:
    engine = Engine()
    request = engine.add([47], params=params, max_tokens=5)
    engine.run()
    assert request.output_token_ids == tokens
    assert request.finish_reason == reason


def test_a_stop_token_at_max_tokens_counts_as_stop() -> None:
    engine = Engine()
    request = engine.add([48], max_tokens=1)
    engine.run()
    assert request.finish_reason == "stop"


def test_base_requests_make_no_adapter_call() -> None:
    engine = Engine()
    engine.add([1, 2])
    engine.run()
    assert not engine.peft.calls
    assert not engine.peft.leases


def test_a_request_whose_adapter_is_not_leased_fails_alone() -> None:
    engine = Engine()
    error = AdapterSourceChangedError("changed", path="x")
    engine.peft.ensure_errors[7] = error
    bad, good, base = engine.add([1], 7), engine.add([2], 8), engine.add([3])
    engine.run()
    assert (bad.state, bad.error, bad.output_token_ids) == (RequestState.FAILED, error, [])
    assert good.output_token_ids == [3, 4, 5]
    assert base.output_token_ids == [4, 5, 6]
    assert engine.peft.count("done", bad.request_id) == 1


def test_an_adapter_that_is_lost_in_the_middle_fails_its_request_then() -> None:
    engine = Engine()
    bad = engine.add([1], 7, max_tokens=10)
    engine.core.step()
    engine.peft.ensure_errors[7] = AdapterSourceChangedError("changed", path="x")
    assert engine.core.step() == [bad]
    assert bad.output_token_ids == [2]
    assert not engine.core.has_unfinished
    assert len(engine.runner.steps) == 1


def test_a_refused_adapter_fails_at_admission() -> None:
    engine = Engine(pages={7: 5, 8: 1})
    bad, good = engine.add([1], 7), engine.add([2], 8)
    assert engine.run() == [bad, good]
    assert "5 device pages" in str(bad.error)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)])
def test_logits_that_are_not_finite_fail_their_request_alone(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    bad, good = engine.add([1], 7, params=params), engine.add([2], 8, params=params)
    forward = engine.runner.forward

    def poisoned(step: StepBatch, lease: Any = None) -> torch.Tensor:
        logits = forward(step, lease)
        if step.sequences[0].request_id == bad.request_id:
            logits[0, 3] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "forward", poisoned)
    engine.run()
    assert "not finite" in str(bad.error)
    assert good.output_token_ids == [3, 4, 5]


@pytest.mark.parametrize("exception", [ValueError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("fatal_step", [0, 1, 2])
def test_an_exception_in_the_forward_leaks_nothing(
    exception: BaseException, fatal_step: int
) -> None:
    engine = Engine(max_num_tokens=4)
    requests = [engine.add([1, 2, 3], task) for task in (7, 8, None, 9)]

    def explode(step: StepBatch) -> None:
        if len(engine.runner.steps) == fatal_step:
            raise exception

    engine.runner.before = explode
    with pytest.raises(type(exception)):
        engine.run()
    error = PagedLoraError("interrupted")
    engine.core.abort_all(error)
    engine.core.check_invariants()
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    assert not engine.peft.owners
    assert all(lease.closed for lease in engine.peft.leases)
    assert all(r.state in (RequestState.FAILED, RequestState.FINISHED) for r in requests)
    engine.runner.before = lambda step: None
    again = engine.add([5], 7)
    engine.run()
    assert again.output_token_ids == [6, 7, 8]


@pytest.mark.parametrize(("is_late", "completed"), [(False, 1), (True, 2)])
def test_what_ended_in_a_step_that_raised_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, is_late: bool, completed: int
) -> None:
    engine = Engine()
    aborted, _, last = (engine.add([1], None, max_tokens=n) for n in (3, 1, 3))
    engine.core.abort(aborted.request_id)

    def explode(step: StepBatch) -> None:
        raise ValueError("boom")

    def finish_reason(request: LlmRequest, token: int) -> str | None:
        if request is last:
            raise ValueError("boom")
        return "length"

    with monkeypatch.context() as broken:
        if is_late:
            broken.setattr(engine.core, "_finish_reason", finish_reason)
        else:
            broken.setattr(engine.runner, "before", explode)
        with pytest.raises(ValueError, match="boom"):
            engine.run()
    engine.core.abort_all(PagedLoraError("interrupted"))
    engine.core.abort_all(PagedLoraError("again"))
    engine.add([1], None, max_tokens=1)
    engine.run()
    engine.core.abort_all(PagedLoraError("nothing is live"))
    counts = [
        (step["numCompletedRequests"], step["numFailedRequests"]) for step in engine.stats.take()
    ]
    assert counts == [(completed, 3 - completed), (1, 0)]


@pytest.mark.parametrize("stream", [None, 0, 7])
def test_l2_a_lease_is_closed_on_the_stream_that_computes_the_steps(stream: int | None) -> None:
    engine = Engine()
    engine.runner.stream = stream
    engine.add([1, 2], 7)
    engine.run()
    engine.add([1, 2], 8)

    def explode(step: StepBatch) -> None:
        raise ValueError("boom")

    engine.runner.before = explode
    with pytest.raises(ValueError, match="boom"):
        engine.run()
    engine.core.abort_all(PagedLoraError("interrupted"))
    leases = engine.peft.leases
    assert len(leases) == 4, "also of the step that failed: kernels of it may be running"
    assert all(lease.closed and lease.stream == stream for lease in leases)


def test_the_numbers_of_an_answer_are_those_of_its_seed_and_token_indices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(max_num_tokens=2)
    monkeypatch.setattr(
        engine.runner, "forward", lambda step, lease: torch.zeros(step.num_sampled, VOCABULARY)
    )
    params = SamplingParams(seed=5, ignore_eos=True)
    request = engine.add([1, 2, 3, 4, 5], params=params, max_tokens=6)
    engine.run()
    assert request.output_token_ids == [int(uniform(5, i) * VOCABULARY) for i in range(6)]


def test_sampled_answers_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(step: StepBatch, lease: Any = None) -> torch.Tensor:
        last = torch.tensor([float(s.token_ids[-1]) for s in step.sequences if s.sample])
        return torch.sin(last.unsqueeze(1) * torch.arange(1.0, VOCABULARY + 1.0))

    def answers(seeds: list[int], max_num_tokens: int) -> dict[int, list[int]]:
        engine = Engine(max_num_tokens=max_num_tokens)
        monkeypatch.setattr(engine.runner, "forward", flat)
        params = {s: SamplingParams(seed=s, ignore_eos=True, top_p=0.9) for s in seeds}
        requests = {s: engine.add([1, s % 9], 7 + s % 3, params[s], 12) for s in seeds}
        engine.run()
        return {s: request.output_token_ids for s, request in requests.items()}

    together = answers(list(range(10)), 16)
    assert together == answers(list(range(10))[::-1], 3)
    assert together[4] == answers([4], 1)[4]
    assert len(set(map(tuple, together.values()))) == 10
