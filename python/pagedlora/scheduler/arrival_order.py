"""Continuous batching in arrival order, without eviction of running requests. Internal.

A request enters the running set only if everything it can ever need is there: KV blocks for its
prompt and its longest answer, device pages for its adapter beside those of the other running
requests, and room in the host tier. So nothing has to be taken back from a running request.

| from       | to         | when                                                       |
|------------|------------|------------------------------------------------------------|
| waiting    | prefilling | admitted: blocks allocated, adapter added                  |
| waiting    | failed     | it can never fit, or its adapter cannot be loaded          |
| prefilling | decoding   | the last chunk of its prompt was computed                  |
| prefilling | failed     | its adapter or the forward failed                          |
| decoding   | finished   | stop token, `max_tokens` or the model's full length        |
| decoding   | failed     | its adapter or the forward failed                          |

Admission goes in arrival order. A request whose adapter finds no pages is skipped and later ones
may go, but after `max_skip_passes` passes that admitted others ahead of the oldest waiting
request nobody else is admitted before it. A request that finds no KV blocks stops the pass, so
those that come later cannot take the blocks it waits for.

The scheduler knows requests and managers only by the attributes it uses. Not thread-safe.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from pagedlora.errors import (
    AdapterTooLargeError,
    CapacityError,
    LoraCacheFullError,
    PagedLoraError,
)
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.scheduler.step import PeftManager, PrefillChunk, ScheduledStep

_WINDOW_REQUESTS = 1024
"""Waiting requests looked at in one pass: what a pass costs does not grow with the queue."""


@dataclass(eq=False, slots=True)
class _Entry:
    """What the scheduler keeps about a live request.

    `owns_adapter` is set before the add, so an interrupt between both cannot lose the owner.
    """

    request: LlmRequest
    arrival: int
    pages: int = 0
    pages_known: bool = False
    skipped_passes: int = 0
    owns_adapter: bool = False
    refusal: PagedLoraError | None = None


@dataclass(slots=True)
class _RunningTasks:
    """Device pages of the distinct tasks of running requests."""

    pages: int = 0
    owners: dict[int, int] = field(default_factory=dict)

    def pages_with(self, task_id: int, pages: int) -> int:
        """The sum if the task, of so many pages, had one more owner."""
        return self.pages + (0 if task_id in self.owners else pages)

    def add(self, task_id: int, pages: int) -> None:
        self.pages = self.pages_with(task_id, pages)
        self.owners[task_id] = self.owners.get(task_id, 0) + 1

    def remove(self, task_id: int, pages: int) -> None:
        self.owners[task_id] -= 1
        if self.owners[task_id] == 0:
            del self.owners[task_id]
            self.pages -= pages


class _Verdict(enum.Enum):
    ADMITTED = enum.auto()
    FAILED = enum.auto()
    NO_PAGES = enum.auto()
    NO_BLOCKS = enum.auto()


class ArrivalOrderScheduler:
    """Decides what each step computes; see the module for its rules and states."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        peft_cache_manager: PeftManager | None = None,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        enable_chunked_prefill: bool = True,
        max_skip_passes: int = 8,
    ) -> None:
        """Starts without requests.

        Args:
            kv_cache_manager: Blocks for all requests; used by this scheduler alone.
            peft_cache_manager: Adapter caches; None if no request has an adapter.
            max_batch_size: Requests that run at once, at least 1.
            max_num_tokens: Tokens of a step, at least 1. No more requests than that run at
                once, so every running request advances in every step.
            enable_chunked_prefill: Whether a prompt may be spread over several steps.
            max_skip_passes: Passes that may admit others ahead of the oldest waiting request.
        """
        self._kv = kv_cache_manager
        self._peft = peft_cache_manager
        self._max_running = min(max_batch_size, max_num_tokens)
        self._max_num_tokens = max_num_tokens
        self._chunked = enable_chunked_prefill
        self._max_skip_passes = max_skip_passes
        self._arrivals = 0
        self._live: dict[int, _Entry] = {}
        self._waiting: OrderedDict[int, _Entry] = OrderedDict()
        self._running: dict[int, _Entry] = {}
        self._tasks = _RunningTasks()

    @property
    def num_waiting(self) -> int:
        """Requests that were not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold KV blocks."""
        return len(self._running)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def add(self, request: LlmRequest) -> None:
        """Takes a new request at the end of the queue.

        Raises:
            CapacityError: It can never run with these sizes; it was not taken.
        """
        self._check_can_ever_run(request)
        entry = _Entry(request, self._arrivals)
        self._arrivals += 1
        self._live[request.request_id] = entry
        self._waiting[request.request_id] = entry

    def schedule(self) -> ScheduledStep:
        """Admits what fits and fills the step: generation first, then prompts.

        At least one request is scheduled or failed if any is live.
        """
        failed = self._admit()
        running = sorted(self._running.values(), key=lambda entry: entry.arrival)
        generation = [e.request for e in running if e.request.state is RequestState.DECODING]
        budget = self._max_num_tokens - len(generation)
        context: list[PrefillChunk] = []
        for entry in running:
            request = entry.request
            if request.state is not RequestState.PREFILLING:
                continue
            missing = request.num_prompt_tokens - request.num_computed_tokens
            if budget == 0 or (missing > budget and not self._chunked):
                break
            context.append(PrefillChunk(request, min(missing, budget)))
            budget -= context[-1].num_tokens
        return ScheduledStep(generation, context, failed)

    def complete(self, step: ScheduledStep) -> None:
        """Records that the step's requests that are still live were computed."""
        for request in step.generation:
            if request.request_id in self._running:
                request.num_computed_tokens += 1
        for chunk in step.context:
            request = chunk.request
            if request.request_id not in self._running:
                continue
            request.num_computed_tokens += chunk.num_tokens
            if request.num_computed_tokens == request.num_prompt_tokens:
                request.advance_to(RequestState.DECODING)

    def finish(self, request: LlmRequest) -> None:
        """Ends a decoding request and releases its blocks and its adapter."""
        request.advance_to(RequestState.FINISHED)
        self._release(self._live[request.request_id])

    def fail(self, request: LlmRequest, error: PagedLoraError) -> None:
        """Ends a live request with an error and releases its blocks and its adapter."""
        request.advance_to(RequestState.FAILED)
        request.error = error
        self._release(self._live[request.request_id])

    def abort_all(self, error: PagedLoraError) -> list[LlmRequest]:
        """Ends all live requests, in whatever state an interrupt left them; idempotent.

        Returns:
            The requests that were failed with `error`, in arrival order.
        """
        aborted = list(self._live.values())
        for entry in aborted:
            if entry.owns_adapter and self._peft is not None:
                self._peft.mark_request_done(entry.request)
            if entry.request.state not in (RequestState.FINISHED, RequestState.FAILED):
                entry.request.advance_to(RequestState.FAILED)
                entry.request.error = error
        self._waiting.clear()
        self._running.clear()
        self._tasks = _RunningTasks()
        self._kv.reset()
        self._live.clear()  # last: until then `has_unfinished` says that this must be called again
        return [entry.request for entry in aborted if entry.request.error is error]

    def check_invariants(self) -> None:
        """Verifies the running set against the budgets and the sums kept beside it.

        Raises:
            AssertionError: One of them is off.
        """
        self._kv.check_invariants()
        expected = _RunningTasks()
        for entry in self._running.values():
            if entry.request.lora_task_id is not None:
                expected.add(entry.request.lora_task_id, entry.pages)
        if expected != self._tasks:
            raise AssertionError(f"running tasks {self._tasks} are not {expected}")
        if self._live.keys() != self._waiting.keys() | self._running.keys():
            raise AssertionError("a live request neither waits nor runs")
        if any(entry.owns_adapter for entry in self._waiting.values()):
            raise AssertionError("a waiting request owns its adapter")
        if len(self._running) > self._max_running:
            raise AssertionError(f"{len(self._running)} run of at most {self._max_running}")
        if self._peft is not None and self._tasks.pages > self._peft.max_device_pages:
            raise AssertionError(f"running tasks need {self._tasks.pages} device pages")

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

    def _admit(self) -> list[LlmRequest]:
        """One admission pass; returns the requests that failed in it."""
        failed: list[LlmRequest] = []
        skipped: _Entry | None = None
        overtaken = False
        for entry in list(islice(self._waiting.values(), _WINDOW_REQUESTS)):
            if len(self._running) == self._max_running:
                break
            verdict = self._try_admit(entry)
            if verdict is _Verdict.ADMITTED:
                overtaken = skipped is not None
            elif verdict is _Verdict.FAILED:
                failed.append(entry.request)
            elif verdict is _Verdict.NO_BLOCKS:
                break
            elif skipped is None:
                skipped = entry
                if entry.skipped_passes >= self._max_skip_passes:
                    break
        if skipped is not None and overtaken:
            skipped.skipped_passes += 1
        if not failed and not self._running and self._waiting:
            failed.append(self._fail_stuck())
        return failed

    def _try_admit(self, entry: _Entry) -> _Verdict:
        """Moves one waiting request into the running set, if everything it needs is there."""
        request = entry.request
        if self._kv.blocks_needed(request.max_total_tokens) > self._kv.num_free_blocks:
            return _Verdict.NO_BLOCKS
        if request.lora_task_id is not None and self._peft is not None:
            try:
                if not self._device_pages_fit(entry, self._peft):
                    return _Verdict.NO_PAGES
                self._add_adapter(entry, self._peft)
            except LoraCacheFullError as error:
                entry.refusal = error
                return _Verdict.NO_PAGES
            except PagedLoraError as error:
                self.fail(request, error)
                return _Verdict.FAILED
        self._start(entry)
        return _Verdict.ADMITTED

    def _start(self, entry: _Entry) -> None:
        """Allocates the request's blocks and moves it into the running set."""
        request = entry.request
        if not self._kv.try_allocate(request, request.max_total_tokens):
            raise AssertionError("KV blocks that were free a moment ago are not")
        del self._waiting[request.request_id]
        self._running[request.request_id] = entry
        if request.lora_task_id is not None:
            self._tasks.add(request.lora_task_id, entry.pages)
        request.advance_to(RequestState.PREFILLING)

    def _device_pages_fit(self, entry: _Entry, peft: PeftManager) -> bool:
        """Whether the adapter fits the device tier beside those of the running requests.

        Raises:
            AdapterTooLargeError: It does not even fit alone.
            PagedLoraError: The manager does not know the adapter.
        """
        request, total = entry.request, peft.max_device_pages
        assert request.lora_task_id is not None
        if not entry.pages_known:
            entry.pages = peft.determine_num_pages(request)
            entry.pages_known = True
        if entry.pages > total:
            page_bytes = int(getattr(peft, "page_bytes", 0))
            raise AdapterTooLargeError(
                f"the adapter needs {entry.pages} device pages of {page_bytes} bytes, but there "
                f"are {total}; raise PeftCacheConfig.device_cache_size",
                tier="device",
                needed_pages=entry.pages,
                total_pages=total,
                page_bytes=page_bytes,
            )
        return self._tasks.pages_with(request.lora_task_id, entry.pages) <= total

    def _add_adapter(self, entry: _Entry, peft: PeftManager) -> None:
        """Makes the request an owner of its adapter.

        Raises:
            LoraCacheFullError: The host tier has no room now; nothing was changed.
            PagedLoraError: The adapter can never be used; nothing was changed.
        """
        entry.owns_adapter = True
        try:
            peft.add_request_peft(entry.request, True)
        except PagedLoraError:
            entry.owns_adapter = False
            raise

    def _fail_stuck(self) -> LlmRequest:
        """Fails the oldest waiting request: nothing runs, so waiting cannot help it.

        The host tier is then held by pins or by owners outside this scheduler.
        """
        entry = next(iter(self._waiting.values()))
        error = entry.refusal or CapacityError(
            f"request {entry.request.request_id} finds no KV blocks although nothing runs"
        )
        self.fail(entry.request, error)
        return entry.request

    def _release(self, entry: _Entry) -> None:
        """Forgets a request and gives back what it held."""
        request = entry.request
        self._kv.free_resources(request)
        if entry.owns_adapter and self._peft is not None:
            self._peft.mark_request_done(request)
            entry.owns_adapter = False
        self._waiting.pop(request.request_id, None)
        was_running = self._running.pop(request.request_id, None) is not None
        if was_running and request.lora_task_id is not None:
            self._tasks.remove(request.lora_task_id, entry.pages)
        del self._live[request.request_id]
