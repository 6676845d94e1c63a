"""The step loop: loads, admission, scheduling, forward, sampling.

One step, in this order:

1. Loads that ended take effect; requests whose adapter failed to load fail.
2. Aborted requests end.
3. Waiting requests become owners of their adapters, and what they will need is loaded ahead.
4. The scheduler decides; who gave way is suspended, or computes its context again.
5. The adapters of the batch are made resident and leased; without its adapter a request fails.
6. The forward.
7. The lease ends, tokens are chosen, requests that are complete end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from pagedlora.engine.live_requests import LiveRequests
from pagedlora.engine.sampler import TokenChoice, sample_tokens, top_logprobs
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.engine.step_stats import StepStats
from pagedlora.errors import CapacityError, NonFiniteLogitsError, PagedLoraError
from pagedlora.requests import FinishReason, LlmRequest, RequestState
from pagedlora.sampling_params import SamplingParams
from pagedlora.scheduler.admission_window import AdmissionWindow, PeftQueueManager
from pagedlora.scheduler.kv_cache_v2 import KVCacheV2Scheduler
from pagedlora.scheduler.step import PeftManager, SchedulerOutput

_IDLE_POLL_S = 0.05
"""How long a step waits for a load when nothing else can be done."""
_LEASE_POLL_S = 0.001
"""The same for somebody else's lease."""


class Lease(Protocol):
    """What the engine uses of a `BatchLease`."""

    @property
    def errors(self) -> Mapping[int, PagedLoraError]:
        """Requests whose adapter could not be made resident, and why."""

    def close(self, stream: int | None, /) -> None:
        """Ends the hold on the adapters' pages once what is launched on the stream is done."""


class EnginePeftManager(PeftManager, PeftQueueManager, Protocol):
    """What the engine uses of a `PeftCacheManager`."""

    def poll(self, timeout_s: float = 0.0, /) -> list[int]:
        """Lets ended loads take effect; gives the ids of requests that failed by it."""

    def adapter_error(self, request: Any, /) -> Exception | None:
        """Why a request's adapter failed to load."""

    def ensure_batch(
        self, context_requests: Iterable[Any], generation_requests: Iterable[Any], /
    ) -> Any:
        """Makes the adapters of a batch resident and leases them; gives a `Lease`."""


class Runner(Protocol):
    """What the engine uses of a `ModelRunner`."""

    @property
    def stream(self) -> int | None:
        """On which steps are computed; None on the CPU."""

    def forward(self, step: StepBatch, lease: Any = None) -> torch.Tensor:
        """Computes a step; gives float32 logits `[num_sampled, vocabulary]`."""


class EngineCore:
    """Runs requests to their end.

    Not thread-safe, but for `abort`. After an exception out of `step`, `abort_all` makes it usable
    again.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: KVCacheV2Scheduler,
        live: LiveRequests,
        peft_cache_manager: EnginePeftManager | None,
        window: AdmissionWindow | None,
        *,
        eos_token_ids: frozenset[int],
        front_size: int = 1024,
        stats: StepStats | None = None,
    ) -> None:
        """Takes over the parts; it closes none of them.

        Args:
            runner: Computes the steps.
            scheduler: Uses the same two managers.
            live: Uses the same two managers; their blocks are those of the runner's KV tensors.
            peft_cache_manager: Has the adapters; None if no request has one.
            window: Over the same adapters; None without them.
            eos_token_ids: The model's end-of-sequence tokens.
            front_size: New requests that a step looks at, at least 1: what a step costs does not
                grow with the queue behind them.
            stats: Told what each step did.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._live = live
        self._kv = live.kv
        self._peft = peft_cache_manager
        self._window = window
        self._eos_token_ids = eos_token_ids
        self._front_size = front_size
        self._stats = stats
        self._aborted: set[int] = set()
        self._abort_lock = threading.Lock()
        self._is_idle = False

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return len(self._live) != 0

    def add(self, request: LlmRequest) -> None:
        """Takes a new request, whose sampling parameters have a seed.

        Raises:
            CapacityError: It can never run with the configured sizes; it was not taken.
        """
        self._live.add(request)
        self._is_idle = False

    def abort(self, request_id: int) -> None:
        """Ends a request in the next step, with what it has; unknown ones are ignored.

        From any thread.
        """
        with self._abort_lock:
            if self._live.get(request_id) is not None:
                self._aborted.add(request_id)

    def step(self) -> list[LlmRequest]:
        """Computes one step.

        Returns:
            The requests that got a token or ended in it, each once; those that ended hold nothing
            any more.

        Raises:
            Exception: The forward failed, or the adapter cache was misused from outside. All
                live requests still hold what they held: call `abort_all`.
        """
        changed = self._take_loads() + self._end_aborted()
        front = self._live.front(self._front_size, self._scheduler.precedence)
        changed += self._admit(front)
        output = self._scheduler.schedule_request([r for r in front if not r.has_ended])
        self._make_way(output)
        changed += self._fail_all(output.failed)
        changed += self._compute(output)
        if not changed:
            changed = self._fail_stuck()
        if self._stats is not None:
            self._stats.record(output, self._live, changed)
        self._live.forget_ended()
        return changed

    def _compute(self, output: SchedulerOutput) -> list[LlmRequest]:
        """Steps 5 to 7."""
        ended: list[LlmRequest] = []
        lease = self._lease(output)
        try:
            if lease is not None:
                ended = self._fail_unleased(output, lease)
            sequences, sampled = self._sequences(output)
            self._is_idle = not (sequences or output.suspended or output.recompute_paused)
            if not sequences:
                return ended
            logits = self._runner.forward(StepBatch(sequences), lease)
        finally:
            if lease is not None:
                lease.close(self._runner.stream)
        self._note_computed(output)
        return ended + self._sample(logits, sampled)

    def abort_all(self, error: PagedLoraError) -> None:
        """Fails all live requests and takes back everything they held."""
        ended = self._live.abort_all(error)
        self._aborted.clear()
        self._is_idle = False
        if self._stats is not None and ended:
            self._stats.record(SchedulerOutput(), (), ended)

    def check_invariants(self) -> None:
        """Verifies the bookkeeping of the KV blocks; raises AssertionError."""
        self._kv.check_invariants()

    def _take_loads(self) -> list[LlmRequest]:
        """Step 1; waits a little if there was nothing to compute."""
        if self._peft is None:
            return []
        failed: list[LlmRequest] = []
        for request_id in self._peft.poll(_IDLE_POLL_S if self._is_idle else 0.0):
            request = self._live.get(request_id)
            if request is not None:
                error = self._peft.adapter_error(request)
                if not isinstance(error, PagedLoraError):
                    error = PagedLoraError(f"the adapter could not be loaded: {error!r}")
                self._live.fail(request, error)
                failed.append(request)
        return failed

    def _end_aborted(self) -> list[LlmRequest]:
        """Step 2."""
        if not self._aborted:
            return []
        with self._abort_lock:
            aborted, self._aborted = self._aborted, set()
        found = [self._live.get(request_id) for request_id in sorted(aborted)]
        ended = [request for request in found if request is not None]
        for request in ended:
            self._live.finish(request, "abort")
        return ended

    def _admit(self, front: Sequence[LlmRequest]) -> list[LlmRequest]:
        """Step 3."""
        if self._window is None:
            return []
        waiting = [
            request
            for request in front
            if request.state in (RequestState.WAITING, RequestState.SUSPENDED)
        ]
        waiting.sort(key=self._scheduler.precedence)
        return self._fail_all(self._window.update(waiting))

    def _fail_all(self, failed: Sequence[tuple[LlmRequest, PagedLoraError]]) -> list[LlmRequest]:
        for request, error in failed:
            self._live.fail(request, error)
        return [request for request, _ in failed]

    def _make_way(self, output: SchedulerOutput) -> None:
        """Step 4: what the decision means for the requests' states."""
        for request in output.suspended:
            request.advance_to(RequestState.SUSPENDED)
        for request in output.recompute_paused:
            request.restart()
        for chunk in output.context:
            if chunk.request.state is not RequestState.PREFILLING:
                chunk.request.advance_to(RequestState.PREFILLING)
        for request in output.generation:
            if request.state is not RequestState.DECODING:
                request.advance_to(RequestState.DECODING)

    def _fail_stuck(self) -> list[LlmRequest]:
        """If nothing was computed and nothing will change that, the head of the queue fails."""
        if not self._is_idle or not len(self._live):
            return []
        if self._waits_for_adapters():
            return []
        first = min(self._live, key=self._scheduler.precedence)
        error: PagedLoraError = CapacityError(
            f"request {first.request_id} cannot run, and nothing else does that it could wait for"
        )
        head = None if self._window is None else self._window.head
        if head is not None and self._live.get(head[0].request_id) is head[0]:
            first, error = head
        self._live.fail(first, error)
        return [first]

    def _waits_for_adapters(self) -> bool:
        """Whether a load, or somebody else's lease, is yet to end."""
        if self._peft is None:
            return False
        if any(
            request.lora_task_id is not None and self._peft.adapter_state(request) == "loading"
            for request in self._live
        ):
            return True
        if self._peft.open_lease_tasks():
            time.sleep(_LEASE_POLL_S)  # nobody tells when a lease ends
            return True
        return False

    def _lease(self, output: SchedulerOutput) -> Lease | None:
        """Leases the adapters of the step; None if it needs none."""
        context = [chunk.request for chunk in output.context]
        if self._peft is None or all(
            request.lora_task_id is None for request in (*context, *output.generation)
        ):
            return None
        lease: Lease = self._peft.ensure_batch(context, output.generation)
        return lease

    def _fail_unleased(self, output: SchedulerOutput, lease: Lease) -> list[LlmRequest]:
        """Fails the requests of the step whose adapter could not be made resident."""
        errors = lease.errors
        if not errors:
            return []
        requests = [*output.generation, *(chunk.request for chunk in output.context)]
        return self._fail_all(
            [
                (request, errors[request.request_id])
                for request in requests
                if request.request_id in errors
            ]
        )

    def _sequences(
        self, output: SchedulerOutput
    ) -> tuple[list[ScheduledSequence], list[LlmRequest]]:
        """The row of the step's live requests, and those that get logits, in the same order."""
        sequences: list[ScheduledSequence] = []
        sampled: list[LlmRequest] = []
        for request in output.generation:
            if request.state is RequestState.DECODING:
                tokens = request.output_token_ids[-1:]
                sequences.append(self._sequence(request, tokens, sample=True))
                sampled.append(request)
        for chunk in output.context:
            request, begin = chunk.request, chunk.request.num_computed_tokens
            if request.state is RequestState.PREFILLING:
                tokens = request.context_token_ids(begin, begin + chunk.num_tokens)
                sequences.append(self._sequence(request, tokens, sample=chunk.is_last))
                if chunk.is_last:
                    sampled.append(request)
        return sequences, sampled

    def _sequence(
        self, request: LlmRequest, token_ids: list[int], *, sample: bool
    ) -> ScheduledSequence:
        return ScheduledSequence(
            request_id=request.request_id,
            token_ids=token_ids,
            past_tokens=request.num_computed_tokens,
            block_table=list(self._kv.block_table(request)),
            uses_adapter=request.lora_task_id is not None,
            sample=sample,
        )

    def _note_computed(self, output: SchedulerOutput) -> None:
        """The step's requests that are still live were computed."""
        for request in output.generation:
            if request.state is RequestState.DECODING:
                request.num_computed_tokens += 1
        for chunk in output.context:
            request = chunk.request
            if request.state is RequestState.PREFILLING:
                request.num_computed_tokens += chunk.num_tokens
                if request.num_computed_tokens == request.num_context_tokens:
                    request.advance_to(RequestState.DECODING)

    def _sample(self, logits: torch.Tensor, requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        """Gives each request its next token, and ends those that are complete with it."""
        tokens = sample_tokens(logits, [self._choice(request) for request in requests])
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            if token is None:
                self._live.fail(request, _not_finite(request))
                continue
            request.output_token_ids.append(token)
            num_logprobs = request.sampling_params.logprobs
            if num_logprobs is not None:
                request.output_logprobs.append(top_logprobs(logits[row], token, num_logprobs))
            reason = self._finish_reason(request, token)
            if reason is not None:
                self._live.finish(request, reason)
        return list(requests)

    def _choice(self, request: LlmRequest) -> TokenChoice:
        params, index = request.sampling_params, len(request.output_token_ids)
        banned: frozenset[int] = frozenset()
        if index < params.min_tokens:
            banned = self._stop_token_ids(params)
        return TokenChoice(params, index, banned)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        model_eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        return model_eos.union(params.stop_token_ids)

    def _finish_reason(self, request: LlmRequest, token: int) -> FinishReason | None:
        """Why the request ends after `token`, its newest; None if it goes on."""
        params, num_tokens = request.sampling_params, len(request.output_token_ids)
        if token in self._stop_token_ids(params):
            return "stop"
        if request.text is not None:
            request.text.push(token, may_stop=num_tokens >= params.min_tokens)
            if request.text.is_stopped:
                return "stop"
        return "length" if num_tokens == request.max_tokens else None


def _not_finite(request: LlmRequest) -> NonFiniteLogitsError:
    culprit = "the base model" if request.lora_task_id is None else "the adapter or the base model"
    return NonFiniteLogitsError(
        f"the logits of request {request.request_id} after "
        f"{request.num_computed_tokens} tokens are not finite: weights of {culprit} are NaN or "
        "overflow in this dtype; check them, or use float32"
    )
