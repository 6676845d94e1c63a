"""What each step of an engine did, by the names that TensorRT-LLM's statistics have."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Protocol

from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.scheduler.step import SchedulerOutput

_MAX_STEPS = 1000


class CountingPeftManager(Protocol):
    """What is used of a `PeftCacheManager`."""

    def get_and_reset_iteration_stats(self) -> dict[str, int]:
        """What happened since the last call."""


class StepStats:
    """The last steps, until somebody takes them. `take` is for any thread."""

    def __init__(
        self, kv_cache_manager: KVCacheManager, peft_cache_manager: CountingPeftManager | None
    ) -> None:
        """Starts with nothing.

        Args:
            kv_cache_manager: Its blocks are counted.
            peft_cache_manager: Its statistics are taken; None: they are left out.
        """
        self._kv = kv_cache_manager
        self._peft = peft_cache_manager
        self._steps: deque[dict[str, Any]] = deque(maxlen=_MAX_STEPS)
        self._lock = threading.Lock()
        self._num_steps = 0

    def record(
        self, output: SchedulerOutput, live: Iterable[LlmRequest], changed: Iterable[LlmRequest]
    ) -> None:
        """Adds a step.

        Args:
            output: What was scheduled.
            live: Requests that have not ended.
            changed: Requests that got a token or ended.
        """
        states = Counter(request.state for request in live)
        ended = Counter(request.state for request in changed)
        step: dict[str, Any] = {
            "iter": self._num_steps,
            "numActiveRequests": states.total(),
            "numQueuedRequests": states[RequestState.WAITING],
            "numSuspendedRequests": states[RequestState.SUSPENDED],
            "numCompletedRequests": ended[RequestState.FINISHED],
            "numFailedRequests": ended[RequestState.FAILED],
            "numContextRequests": len(output.context),
            "numGenRequests": len(output.generation),
            "numContextTokens": sum(chunk.num_tokens for chunk in output.context),
            "numNewlySuspendedRequests": len(output.suspended),
            "numRecomputePausedRequests": len(output.recompute_paused),
            "kvCacheStats": {
                "maxNumBlocks": self._kv.num_blocks,
                "freeNumBlocks": self._kv.num_free_blocks,
                "usedNumBlocks": self._kv.num_used_blocks,
                "tokensPerBlock": self._kv.block_size,
                "maxNumHostBlocks": self._kv.num_host_blocks,
                "freeNumHostBlocks": self._kv.num_free_host_blocks,
            },
        }
        if self._peft is not None:
            step["peftCacheIterationStats"] = self._peft.get_and_reset_iteration_stats()
        with self._lock:
            self._steps.append(step)
        self._num_steps += 1

    def take(self) -> list[dict[str, Any]]:
        """The steps since the last call, oldest first; at most the last 1,000."""
        with self._lock:
            steps = list(self._steps)
            self._steps.clear()
        return steps
