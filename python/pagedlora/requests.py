"""Requests as callers make them, as the engine runs them, and their results."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pagedlora.arguments import MAX_ID, to_integer
from pagedlora.errors import InvalidArgumentError, PagedLoraError
from pagedlora.paths import to_path
from pagedlora.sampling_params import SamplingParams
from pagedlora.shown import shown

FinishReason = Literal["stop", "length", "abort"]


class PeftRequest(Protocol):
    """What a `PeftCacheManager` reads of a request."""

    @property
    def request_id(self) -> int:
        """Unique among live requests."""

    @property
    def lora_task_id(self) -> int | None:
        """The task of its adapter; None for the base model."""

    @property
    def lora_weights(self) -> Any:
        """`AdapterWeights`, or None when the task is registered or cached."""


class AnswerText(Protocol):
    """What the engine uses of an answer's text."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""

    def push(self, token_id: int, *, may_stop: bool = True) -> None:
        """Takes the next token."""


class RequestState(enum.Enum):
    """Where a request is in its life. `TRANSITIONS` has the legal steps."""

    WAITING = "waiting"
    """Nothing is computed of it: it is new, or lost what was computed."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    SUSPENDED = "suspended"
    """What was computed of it is in the host pool."""
    FINISHED = "finished"
    FAILED = "failed"


_ENDS = frozenset({RequestState.FINISHED, RequestState.FAILED})
TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: _ENDS | {RequestState.PREFILLING},
    RequestState.PREFILLING: _ENDS
    | {RequestState.DECODING, RequestState.SUSPENDED, RequestState.WAITING},
    RequestState.DECODING: _ENDS | {RequestState.SUSPENDED, RequestState.WAITING},
    RequestState.SUSPENDED: _ENDS
    | {RequestState.PREFILLING, RequestState.DECODING, RequestState.WAITING},
    RequestState.FINISHED: frozenset(),
    RequestState.FAILED: frozenset(),
}


@dataclass(frozen=True)
class LoRARequest:
    """Names the adapter of a request.

    Attributes:
        lora_name: The adapter's name; it alone decides which adapter answers.
        lora_int_id: Accepted for callers that number their adapters. One number for two names
            or two paths is an error.
        lora_path: Where to register the adapter from if the name is not registered yet.

    Raises:
        InvalidArgumentError: The name is empty, the number is negative or the path is no path.
    """

    lora_name: str
    lora_int_id: int | None = None
    lora_path: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        name: object = self.lora_name
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(
                f"lora_name is {shown(name)}: it must be a string that is not empty"
            )
        if self.lora_int_id is not None:
            number = to_integer(self.lora_int_id, "lora_int_id", 0)
            object.__setattr__(self, "lora_int_id", number)
        if self.lora_path is not None:
            to_path(self.lora_path, "lora_path")


@dataclass(eq=False, slots=True)
class LlmRequest:
    """One generation request as caches, schedulers and the engine see it.

    The adapter caches read only the first three attributes, so they take any object that has
    them. Requests are compared by identity. Not thread-safe.

    Attributes:
        request_id: Unique among live requests.
        lora_task_id: The adapter's task; None for the base model.
        lora_weights: `AdapterWeights` carried by the request, or None if the task has a source
            or is cached.
        priority: Higher runs first where the scheduler has priorities; arrival order has none.
        prompt_token_ids: The prompt, at least one token.
        max_tokens: Most tokens to generate; already cut to what the model's length leaves.
        sampling_params: How tokens are chosen.
        output_token_ids: What was generated so far.
        output_logprobs: For each of them what `SamplingParams.logprobs` asks for, if it asks.
        text: The answer as text while it grows; None where nobody needs it.
        num_computed_tokens: Tokens of prompt and output whose keys and values are stored.
        num_replayed_tokens: Tokens of the output that belong to the context, because their keys and
            values were lost and are computed again with those of the prompt.
        num_restarts: How often its keys and values were lost.
        state: See `RequestState`; changed by `advance_to` only.
        finish_reason: Set when finished.
        error: Set when failed.
        keeps_adapter: Whether it stays with the generation of its adapter that it got, also before
            it starts, and needs it until it is released: set where a scheduler has counted the
            adapter's pages. See `LoraManager.acquire`.

    Raises:
        InvalidArgumentError: An id is no integer from 0 to 2^64 - 1, or `priority` or `max_tokens`
            is none.
    """

    request_id: int
    lora_task_id: int | None = None
    lora_weights: object | None = None
    priority: int = 0
    prompt_token_ids: Sequence[int] = ()
    max_tokens: int = 16
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[dict[int, float]] = field(default_factory=list)
    text: AnswerText | None = None
    num_computed_tokens: int = 0
    num_replayed_tokens: int = 0
    num_restarts: int = 0
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: PagedLoraError | None = None
    keeps_adapter: bool = False

    def __post_init__(self) -> None:
        self.request_id = to_integer(self.request_id, "request_id", 0, MAX_ID)
        if self.lora_task_id is not None:
            self.lora_task_id = to_integer(self.lora_task_id, "lora_task_id", 0, MAX_ID)
        self.priority = to_integer(self.priority, "priority")
        self.max_tokens = to_integer(self.max_tokens, "max_tokens", 0)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_context_tokens(self) -> int:
        """Tokens to compute before the next one can be chosen, or before the first."""
        return len(self.prompt_token_ids) + self.num_replayed_tokens

    @property
    def max_total_tokens(self) -> int:
        """Prompt and the longest possible answer together, in tokens."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def has_started(self) -> bool:
        """Whether anything was ever computed for it."""
        return self.num_computed_tokens > 0 or bool(self.output_token_ids) or self.num_restarts > 0

    @property
    def has_ended(self) -> bool:
        """Whether it finished or failed."""
        return not TRANSITIONS[self.state]

    def context_token_ids(self, begin: int, end: int) -> list[int]:
        """Tokens `begin` to `end`, exclusive, of the context."""
        num_prompt = len(self.prompt_token_ids)
        tokens = list(self.prompt_token_ids[begin:end])
        if end > num_prompt:
            tokens += self.output_token_ids[max(0, begin - num_prompt) : end - num_prompt]
        return tokens

    def restart(self) -> None:
        """Takes into account that keys and values are lost: all so far is context again.

        Raises:
            RuntimeError: Nothing was computed of it; nothing was changed.
        """
        self.advance_to(RequestState.WAITING)
        self.num_computed_tokens = 0
        self.num_replayed_tokens = len(self.output_token_ids)
        self.num_restarts += 1

    def advance_to(self, state: RequestState) -> None:
        """Changes the state.

        Raises:
            RuntimeError: `TRANSITIONS` does not allow it; nothing was changed.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(
                f"request {self.request_id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, or in a stream what is new of it.

    Attributes:
        token_ids: The generated tokens, the one that ended the answer included.
        text: Their text without the token or the string that ended the answer; "" without a
            tokenizer.
        finish_reason: "stop" after an end-of-sequence or stop token or a stop string, "length" at
            `max_tokens` or at the model's full length, "abort" after `LLM.abort`. None: more will
            come.
        logprobs: For each token the log probabilities by token, if `SamplingParams.logprobs` asked.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[dict[int, float]] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The result of one request.

    Attributes:
        request_id: Unique within its `LLM`.
        prompt_token_ids: The prompt as the model saw it.
        outputs: One answer, or none if the request failed.
        error: Why the request failed, or None. Without its traceback, whose frames would keep the
            engine's memory as long as the output.
        finished: Whether nothing more will come.
    """

    request_id: int
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: PagedLoraError | None = None
    finished: bool = True

    def __post_init__(self) -> None:
        error: BaseException | None = self.error
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
