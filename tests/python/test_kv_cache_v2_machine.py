"""Random walks of an engine over the real caches, with loads that are late or fail.

Keys and values are the tokens themselves, so an answer tells which blocks and which adapter every
step read. After each step the managers are sound, owners and blocks are what the requests' states
say, and something was computed if anything could be.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.support.cache_fixtures import Call, FakeAdapter, fake_adapter, look_at_loads, wait_until
from tests.support.engine_bench import BLOCK_SIZE, EngineBench, answer
from tests.support.scheduling import spied_cache

from pagedlora import (
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterTooLargeError,
    CapacityError,
    LlmRequest,
    LoraCacheFullError,
)
from pagedlora._core import BatchLease, FakeDevice, ManualClock
from pagedlora.requests import RequestState
from pagedlora.scheduler.step import SchedulerOutput

HOST_PAGES, DEVICE_PAGES = 36, 24
RANKS = (4, 9, 2, 9, 4, 12)
TOO_LARGE = len(RANKS)  # fits the host tier but not the device tier
TOO_LARGE_RANK = 22
LIMIT_S = 8.0
MAX_LIVE = 9
OUTSIDER = 10**7

RUNS = (RequestState.PREFILLING, RequestState.DECODING)
LOAD_ERRORS = (AdapterNotFoundError, AdapterReadError, AdapterLoadTimeout)

adapters = st.sampled_from((None, None, *range(len(RANKS)), *range(len(RANKS)), TOO_LARGE))
picks = st.integers(0, 20)


class EngineMachine(RuleBasedStateMachine):
    """An engine, and what its requests must get."""

    @initialize(
        policy=st.sampled_from(("max_utilization",) * 2 + ("guaranteed_no_evict",)),
        num_blocks=st.integers(4, 9),
        host_blocks=st.sampled_from((0, 3, 9)),
        tokens=st.sampled_from((1, 2, 5, 20)),
        places=st.sampled_from((1, 3, 8)),
        chunked=st.booleans(),
        max_skip_passes=st.integers(1, 3),
        window_size=st.sampled_from((2, 16)),
        one_pass=st.booleans(),
    )
    def start(self, *, tokens: int, places: int, one_pass: bool, **options: Any) -> None:
        self.clock = ManualClock()
        self.peft = spied_cache(
            DEVICE_PAGES,
            HOST_PAGES,
            device=FakeDevice(is_host_memory=one_pass),
            clock=self.clock,
            options={
                "load_timeout_s": LIMIT_S,
                "num_put_workers": 10,
                "max_inflight_batches": 3,
            },
        )
        self.fakes: list[FakeAdapter] = []
        self.tasks: list[int] = []
        for seed, rank in enumerate((*RANKS, TOO_LARGE_RANK)):
            self.fakes.append(fake_adapter(self.peft.model_config, rank, seed))
            self.tasks.append(self.peft.core.register_task(self.fakes[-1].plan))
        self.held: set[int] = set()  # adapters whose source hangs
        self.spoilt: set[int] = set()  # adapters that may fail
        self.engine = EngineBench(
            self.peft, max_num_tokens=tokens, max_batch_size=places, **options
        )
        self.keeps_blocks = options["policy"] == "guaranteed_no_evict"
        self.limits = (tokens, places)
        self.engine.runner.before = self.check_batch
        self.requests: list[LlmRequest] = []
        self.aborted: set[int] = set()
        self.begun: set[int] = set()  # requests of which something was computed
        self.leases: dict[int, tuple[LlmRequest, BatchLease]] = {}

    # ---- what happens to it ----------------------------------------------------------------------

    @rule(
        adapter=adapters,
        prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 8),
        priority=st.sampled_from((0, 0, 0, 1, 2)),
    )
    def arrive(self, adapter: int | None, prompt: int, max_tokens: int, priority: int) -> None:
        if len(self.engine.live) >= MAX_LIVE:
            return
        task = None if adapter is None else self.tasks[adapter]
        try:
            request = self.engine.add(task, prompt=prompt, max_tokens=max_tokens, priority=priority)
        except CapacityError:
            event("can never run")
            assert prompt + max_tokens > self.engine.kv.num_blocks * BLOCK_SIZE or (
                prompt > self.limits[0]
            )
            return
        self.requests.append(request)

    @rule(passes=st.integers(1, 4))
    def steps(self, passes: int) -> None:
        for _ in range(passes):
            self.step()

    @precondition(lambda self: len(self.engine.live))
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        live = list(self.engine.live)
        request = live[pick % len(live)]
        self.aborted.add(request.request_id)
        self.engine.core.abort(request.request_id)

    @rule(
        adapter=st.integers(0, len(RANKS) - 1),
        how=st.sampled_from(("late", "late", "open", "read")),
    )
    def spoil_a_load(self, adapter: int, how: str) -> None:
        source = self.fakes[adapter].source
        if how == "late":
            self.held.add(adapter)
            source.hold_reads()
            return
        self.spoilt.add(adapter)
        if how == "open":
            source.fail_open()
        else:
            source.fail_read_after(0)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def release_a_load(self, pick: int) -> None:
        self.release(sorted(self.held)[pick % len(self.held)])

    def release(self, adapter: int) -> None:
        self.held.discard(adapter)
        self.fakes[adapter].source.release_reads()

    @precondition(lambda self: self.held)
    @rule()
    def let_time_pass(self) -> None:
        self.settle()
        self.spoilt |= self.held
        self.clock.advance(LIMIT_S)
        self.step(settle=False)
        for adapter in sorted(self.held):
            self.release(adapter)  # a reader that was given up would end at any time

    @precondition(lambda self: len(self.leases) < 2)
    @rule(adapter=st.integers(0, len(RANKS) - 1))
    def somebody_else_leases(self, adapter: int) -> None:
        """An adapter that is resident on the host already, or can be."""
        task = self.tasks[adapter]
        if not self.peft.is_task_cached(task):
            return
        outsider = LlmRequest(OUTSIDER + len(self.peft.calls), lora_task_id=task)
        try:
            self.peft.add_request_peft(outsider)
            lease = self.peft.ensure_batch([outsider], [])
        except LoraCacheFullError:
            self.peft.mark_request_done(outsider)
            return
        assert not lease.errors
        event("somebody else leases")
        self.leases[outsider.request_id] = (outsider, lease)

    @precondition(lambda self: self.leases)
    @rule()
    def a_lease_ends(self) -> None:
        outsider, lease = self.leases.pop(min(self.leases))
        lease.close()
        self.peft.mark_request_done(outsider)

    # ---- one step --------------------------------------------------------------------------------

    def step(self, *, settle: bool = True) -> None:
        if settle:
            self.settle()
        engine = self.engine
        num_steps, num_outputs = len(engine.runner.steps), len(engine.outputs)
        engine.core._is_idle = False  # or it would wait a little for a load
        changed = Call(engine.core.step).result()
        assert len({id(request) for request in changed}) == len(changed)
        self.note(changed)
        if len(engine.runner.steps) == num_steps and len(engine.outputs) > num_outputs:
            self.check_that_nothing_could_run(engine.outputs[-1])
        self.check_requests()
        self.peft.check_invariants()
        engine.core.check_invariants()

    def settle(self) -> None:
        """Loads come as far as they can before the next step, so that the walk can be repeated."""

        def is_settled() -> bool:
            ended = {task for (task, _, _) in look_at_loads(self.peft)[0]}
            for request in self.engine.live:
                task = request.lora_task_id
                if task is None or self.peft.adapter_state(request) != "loading":
                    continue
                adapter = self.tasks.index(task)
                if task not in ended and not self.fakes[adapter].source.num_held:
                    return False
            return True

        assert wait_until(is_settled, patience_s=15)

    def note(self, changed: list[LlmRequest]) -> None:
        for request in changed:
            if request.state is RequestState.FAILED:
                self.check_failure(request)

    def check_failure(self, request: LlmRequest) -> None:
        """Nobody fails for another's sake."""
        event(f"failed: {type(request.error).__name__}")
        assert request.lora_task_id is not None, request.error
        adapter = self.tasks.index(request.lora_task_id)
        if adapter == TOO_LARGE:
            assert isinstance(request.error, AdapterTooLargeError)
        else:
            assert isinstance(request.error, LOAD_ERRORS), request.error
            assert adapter in self.spoilt

    def check_that_nothing_could_run(self, output: SchedulerOutput) -> None:
        assert not output.suspended, "somebody gave way in vain"
        assert not output.recompute_paused, "somebody gave way in vain"
        if self.leases:
            return
        for request in self.engine.live:
            assert self.peft.adapter_state(request) != "ready", f"{request} could run"

    def check_batch(self, step: Any, lease: Any) -> None:
        tokens, places = self.limits
        assert step.num_tokens <= tokens
        assert len(step.sequences) <= places
        self.begun.update(sequence.request_id for sequence in step.sequences)
        tasks = self.peft.open_lease_tasks()
        requests = [self.engine.live.get(s.request_id) for s in step.sequences]
        assert {r.lora_task_id for r in requests if r and r.lora_task_id is not None} <= tasks
        pages = sum(self.peft.core.num_pages_of_task(task) for task in tasks)
        assert pages <= DEVICE_PAGES

    def check_requests(self) -> None:
        kv, live = self.engine.kv, {r.request_id for r in self.engine.live}
        active = {r for owners in self.peft.active_tasks.values() for r in owners}
        paused = {r for owners in self.peft.paused_tasks.values() for r in owners}
        assert active | paused <= live | set(self.leases)
        assert set(kv._held) <= live
        for request in self.engine.live:
            number, state = request.request_id, request.state
            on_device, on_host = len(kv.block_table(request)), len(kv.host_block_table(request))
            held = kv.blocks_needed(request.num_computed_tokens)
            if state in RUNS and self.keeps_blocks:
                held = kv.blocks_needed(request.max_total_tokens)
            assert (on_device, on_host) == {
                RequestState.WAITING: (0, 0),
                RequestState.SUSPENDED: (0, held),
            }.get(state, (held, 0))
            if request.lora_task_id is None:
                assert number not in active | paused
            elif state in RUNS:
                assert number in active
            elif number in self.begun:
                assert number in paused
            else:
                assert number not in paused

    # ---- the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "leases"):
            return
        while self.leases:
            self.a_lease_ends()
        for adapter in sorted(self.held):
            self.release(adapter)
        for _ in range(400):
            if not self.engine.core.has_unfinished:
                break
            self.step()
        assert not self.engine.core.has_unfinished, list(self.engine.live)
        for request in self.requests:
            self.check_answer(request)
        assert not self.peft.active_tasks
        assert not self.peft.paused_tasks
        kv = self.engine.kv
        assert kv.num_used_blocks == kv.num_suspended_blocks == 0
        assert Call(self.peft.wait_idle).result()
        self.peft.evict_unowned("host")
        self.peft.evict_unowned("device")
        assert self.peft.free_pages("host") == HOST_PAGES
        assert self.peft.free_pages("device") == DEVICE_PAGES
        Call(self.peft.close).result()
        self.peft.check_invariants()

    def check_answer(self, request: LlmRequest) -> None:
        expected = answer(request.prompt_token_ids, request.lora_task_id, request.max_tokens)
        given = request.output_token_ids
        assert given == expected[: len(given)]
        if request.state is RequestState.FAILED:
            return
        assert request.state is RequestState.FINISHED
        if request.finish_reason == "abort":
            assert request.request_id in self.aborted
        else:
            assert len(given) == request.max_tokens


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngineMachine.pytestmark = [pytest.mark.slow]
