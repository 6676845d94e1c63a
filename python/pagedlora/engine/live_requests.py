"""The requests that an engine has taken and not ended, and what they hold.

| from                            | to                   | when                                  |
|---------------------------------|----------------------|---------------------------------------|
| waiting                         | prefilling           | a piece of its context is computed    |
| prefilling                      | decoding             | all of its context was computed       |
| prefilling, decoding            | suspended            | it gave way, keys and values are kept |
| suspended                       | prefilling, decoding | it came back where it was             |
| prefilling, decoding, suspended | waiting              | it gave way, keys and values are lost |
| any of these                    | finished             | a stop, a length, or aborted          |
| any of these                    | failed               | its adapter, logits or forward failed |

Whoever ends gives back its KV blocks and its adapter, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import Any, Protocol

from pagedlora.engine.waiting_queue import WaitingQueue
from pagedlora.errors import CapacityError, PagedLoraError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import FinishReason, LlmRequest, RequestState


class OwnerManager(Protocol):
    """What is used of a `PeftCacheManager`."""

    def mark_request_done(self, request: Any, pause: bool = False, /) -> None:
        """Ends the request's ownership."""


class LiveRequests:
    """Live requests in arrival order. Not thread-safe."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        peft_cache_manager: OwnerManager | None,
        *,
        max_num_tokens: int,
        enable_chunked_prefill: bool,
    ) -> None:
        """Starts without requests.

        Args:
            kv_cache_manager: Has their blocks.
            peft_cache_manager: Has their adapters; None if no request has one.
            max_num_tokens: Tokens of a step.
            enable_chunked_prefill: Whether a prompt may be longer than that.
        """
        self._kv = kv_cache_manager
        self._peft = peft_cache_manager
        self._max_num_tokens = max_num_tokens
        self._chunked = enable_chunked_prefill
        self._by_id: dict[int, LlmRequest] = {}
        self._arrivals: dict[int, int] = {}  # numbers in the order of arrival, by request id
        self._num_arrivals = 0
        # Each request is in one of these two. Those that begin change over in `front`.
        self._begun: dict[int, LlmRequest] = {}
        self._waiting = WaitingQueue()
        self._new_in_front: list[LlmRequest] = []  # what `front` took from the queue
        self._ended: list[LlmRequest] = []  # since `forget_ended`

    @property
    def kv(self) -> KVCacheManager:
        """Their blocks."""
        return self._kv

    def __len__(self) -> int:
        """How many are live."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[LlmRequest]:
        """In arrival order; requests may end meanwhile."""
        return iter(list(self._by_id.values()))

    def get(self, request_id: int) -> LlmRequest | None:
        """A live request, or None."""
        return self._by_id.get(request_id)

    def front(
        self, size: int, precedence: Callable[[LlmRequest], tuple[bool, int, int]]
    ) -> list[LlmRequest]:
        """Those that have begun, and `size` others: what a step needs to look at.

        Only who was in front can have begun since, and only who was in front can have come to go
        before others (by having been skipped too often), so nobody behind it is looked at.

        Args:
            size: How many new ones at most.
            precedence: Smaller goes first. By arrival within a priority, as long as a request was
                never in front.

        Returns:
            In arrival order.
        """
        seen: dict[int, LlmRequest] = {}
        for request in self._new_in_front:
            if self._by_id.get(request.request_id) is not request:
                continue  # it has ended
            if request.state is RequestState.WAITING and not request.has_started:
                seen[request.request_id] = request
            else:
                self._waiting.remove(request)
                self._begun[request.request_id] = request
        if len(self._waiting) > size:
            seen.update((r.request_id, r) for r in self._waiting.first(size))
            new = nsmallest(size, sorted(seen.values(), key=self._arrival), key=precedence)
        else:
            new = list(self._waiting)
        self._new_in_front = new
        return sorted([*self._begun.values(), *new], key=self._arrival)

    def add(self, request: LlmRequest) -> None:
        """Takes a new request at the end of the queue.

        Raises:
            CapacityError: It can never run with these sizes; it was not taken.
        """
        self._check_can_ever_run(request)
        self._by_id[request.request_id] = request
        self._arrivals[request.request_id] = self._num_arrivals
        self._num_arrivals += 1
        self._waiting.append(request)

    def _arrival(self, request: LlmRequest) -> int:
        return self._arrivals[request.request_id]

    def finish(self, request: LlmRequest, reason: FinishReason) -> None:
        """Ends a live request with what it has."""
        request.advance_to(RequestState.FINISHED)
        request.finish_reason = reason
        self._release(request)

    def fail(self, request: LlmRequest, error: PagedLoraError) -> None:
        """Ends a live request with an error."""
        request.advance_to(RequestState.FAILED)
        request.error = error
        self._release(request)

    def forget_ended(self) -> None:
        """Who ended until now has been told of: `abort_all` gives only those that end later."""
        self._ended.clear()

    def abort_all(self, error: PagedLoraError) -> list[LlmRequest]:
        """Fails all, in whatever state an interrupt left them; idempotent.

        Returns:
            Those, and those that had ended since `forget_ended`, each once.
        """
        ended = [*self._ended, *self]
        for request in self:
            if self._peft is not None and request.lora_task_id is not None:
                self._peft.mark_request_done(request)
            if request.state not in (RequestState.FINISHED, RequestState.FAILED):
                request.advance_to(RequestState.FAILED)
                request.error = error
        self._kv.reset()
        self._begun.clear()
        self._waiting.clear()
        self._arrivals.clear()
        self._by_id.clear()  # last: until then there is something left to be aborted
        self._ended.clear()
        return ended

    def _release(self, request: LlmRequest) -> None:
        self._kv.free_resources(request)
        if self._peft is not None and request.lora_task_id is not None:
            self._peft.mark_request_done(request)
        del self._by_id[request.request_id], self._arrivals[request.request_id]
        self._waiting.remove(request)
        self._begun.pop(request.request_id, None)
        self._ended.append(request)

    def _check_can_ever_run(self, request: LlmRequest) -> None:
        """Raises CapacityError if no state of the caches lets the request run."""
        prompt, answer = request.num_prompt_tokens, request.max_tokens
        needed = self._kv.blocks_needed(request.max_total_tokens)
        if needed > self._kv.num_blocks:
            room = self._kv.num_blocks * self._kv.block_size
            raise CapacityError(
                f"request {request.request_id} has {prompt} prompt tokens and max_tokens "
                f"{answer}: {prompt + answer} tokens need {needed} KV blocks of "
                f"{self._kv.block_size} tokens, but there are {self._kv.num_blocks} ({room} "
                "tokens); lower max_tokens or raise KvCacheConfig.num_blocks or .size"
            )
        if prompt > self._max_num_tokens and not self._chunked:
            raise CapacityError(
                f"request {request.request_id} has {prompt} prompt tokens, but a step holds "
                f"max_num_tokens {self._max_num_tokens} and enable_chunked_prefill is off; "
                "switch it on or raise SchedulerConfig.max_num_tokens"
            )
