"""One step after the other: schedule, lease the adapters, forward, sample. No files, no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from pagedlora.engine.sampler import TokenChoice, sample_tokens
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.errors import NonFiniteLogitsError, PagedLoraError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import FinishReason, LlmRequest, RequestState
from pagedlora.scheduler.arrival_order import ArrivalOrderScheduler
from pagedlora.scheduler.step import PeftManager, ScheduledStep


class Lease(Protocol):
    """What the engine uses of a `BatchLease`."""

    @property
    def errors(self) -> Mapping[int, PagedLoraError]:
        """Requests whose adapter could not be made resident, and why."""

    def close(self) -> None:
        """Ends the hold on the adapters' pages."""


class LeasingPeftManager(PeftManager, Protocol):
    """What the engine uses of a `PeftCacheManager`."""

    def ensure_batch(
        self, context_requests: Sequence[Any], generation_requests: Sequence[Any], /
    ) -> Any:
        """Makes the adapters of a batch resident and leases them; gives a `Lease`."""


class Runner(Protocol):
    """What the engine uses of a `ModelRunner`."""

    def forward(self, step: StepBatch, lease: Any = None) -> torch.Tensor:
        """Computes a step; gives float32 logits `[num_sampled, vocabulary]`."""


class EngineCore:
    """Runs requests to their end.

    Not thread-safe. After an exception out of `step`, `abort_all` makes it usable again.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: ArrivalOrderScheduler,
        kv_cache_manager: KVCacheManager,
        peft_cache_manager: LeasingPeftManager | None,
        *,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Takes over the parts; it closes none of them.

        Args:
            runner: Computes the steps.
            scheduler: Uses the same two managers.
            kv_cache_manager: Has the block tables of the runner's KV tensors.
            peft_cache_manager: Has the adapters; None if no request has one.
            eos_token_ids: The model's end-of-sequence tokens.
        """
        self._runner = runner
        self._scheduler = scheduler
        self._kv = kv_cache_manager
        self._peft = peft_cache_manager
        self._eos_token_ids = eos_token_ids

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return self._scheduler.has_unfinished

    def add(self, request: LlmRequest) -> None:
        """Takes a new request, whose sampling parameters have a seed.

        Raises:
            CapacityError: It can never run with the configured sizes; it was not taken.
        """
        self._scheduler.add(request)

    def step(self) -> list[LlmRequest]:
        """Computes one step.

        Returns:
            The requests that ended in it, finished or failed; they hold nothing any more.

        Raises:
            Exception: The forward failed, or the adapter cache was misused from outside. All
                live requests still hold what they held: call `abort_all`.
        """
        step = self._scheduler.schedule()
        ended = list(step.failed)
        lease = self._lease(step)
        try:
            if lease is not None:
                ended += self._fail_unleased(step, lease)
            sequences, sampled = self._sequences(step)
            if not sequences:
                return ended
            logits = self._runner.forward(StepBatch(sequences), lease)
        finally:
            if lease is not None:
                lease.close()
        self._scheduler.complete(step)
        return ended + self._sample(logits, sampled)

    def abort_all(self, error: PagedLoraError) -> None:
        """Fails all live requests and takes back everything they held."""
        self._scheduler.abort_all(error)

    def check_invariants(self) -> None:
        """Verifies the bookkeeping of scheduler and KV blocks; raises AssertionError."""
        self._scheduler.check_invariants()

    def _lease(self, step: ScheduledStep) -> Lease | None:
        """Leases the adapters of the step; None if it needs none."""
        context = [chunk.request for chunk in step.context]
        if self._peft is None or all(
            request.lora_task_id is None for request in (*context, *step.generation)
        ):
            return None
        lease: Lease = self._peft.ensure_batch(context, step.generation)
        return lease

    def _fail_unleased(self, step: ScheduledStep, lease: Lease) -> list[LlmRequest]:
        """Fails the requests of the step whose adapter could not be made resident."""
        errors = lease.errors
        if not errors:
            return []
        requests = [*step.generation, *(chunk.request for chunk in step.context)]
        failed = [request for request in requests if request.request_id in errors]
        for request in failed:
            self._scheduler.fail(request, errors[request.request_id])
        return failed

    def _sequences(self, step: ScheduledStep) -> tuple[list[ScheduledSequence], list[LlmRequest]]:
        """The row of the step's live requests, and those that get logits, in the same order."""
        sequences: list[ScheduledSequence] = []
        sampled: list[LlmRequest] = []
        for request in step.generation:
            if request.state is RequestState.DECODING:
                tokens = request.output_token_ids[-1:]
                sequences.append(self._sequence(request, tokens, sample=True))
                sampled.append(request)
        for chunk in step.context:
            request, begin = chunk.request, chunk.request.num_computed_tokens
            if request.state is RequestState.PREFILLING:
                tokens = list(request.prompt_token_ids[begin : begin + chunk.num_tokens])
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

    def _sample(self, logits: torch.Tensor, requests: Sequence[LlmRequest]) -> list[LlmRequest]:
        """Gives each request its next token; returns those that ended with it."""
        choices = [
            TokenChoice(request.sampling_params, len(request.output_token_ids))
            for request in requests
        ]
        ended: list[LlmRequest] = []
        for request, token in zip(requests, sample_tokens(logits, choices), strict=True):
            if token is None:
                self._scheduler.fail(request, _not_finite(request))
                ended.append(request)
                continue
            request.output_token_ids.append(token)
            request.finish_reason = self._finish_reason(request, token)
            if request.finish_reason is not None:
                self._scheduler.finish(request)
                ended.append(request)
        return ended

    def _finish_reason(self, request: LlmRequest, token: int) -> FinishReason | None:
        """Why the request ends after `token`, its newest; None if it goes on."""
        params = request.sampling_params
        if token in params.stop_token_ids:
            return "stop"
        if token in self._eos_token_ids and not params.ignore_eos:
            return "stop"
        return "length" if len(request.output_token_ids) == request.max_tokens else None


def _not_finite(request: LlmRequest) -> NonFiniteLogitsError:
    culprit = "the base model" if request.lora_task_id is None else "the adapter or the base model"
    return NonFiniteLogitsError(
        f"the logits of request {request.request_id} after "
        f"{request.num_computed_tokens} tokens are not finite: weights of {culprit} are NaN or "
        "overflow in this dtype; check them, or use float32"
    )
