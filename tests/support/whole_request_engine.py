"""An engine around `CapacityScheduler` that computes nothing and checks every pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedlora import CapacityDecision, CapacityScheduler, KVCacheManager, PeftTaskNotCachedError

POLICIES = ("max_requests", "guaranteed_no_evict", "max_utilization", "static_batch")


@dataclass(eq=False)
class Request:
    """A request with the attributes that the scheduler reads, of no kind of this package."""

    request_id: int
    lora_task_id: int | None = None
    prompt: int = 4
    max_tokens: int = 4
    priority: int = 0
    state: str = "waiting"
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt

    @property
    def has_started(self) -> bool:
        return self.num_computed_tokens > 0 or bool(self.output_token_ids)


class CountedPages:
    """Says how many pages tasks have, and which are leased, and counts the questions.

    Attributes:
        asked: Tasks in the order in which their pages were asked for.
        leased: Tasks of open leases.
        errors: Request id to what asking for its pages raises.
    """

    def __init__(
        self, pages: Mapping[int, int], *, device_pages: int, host_pages: int = 10**9
    ) -> None:
        self.pages = dict(pages)
        self.max_device_pages = device_pages
        self.max_host_pages = host_pages
        self.asked: list[int] = []
        self.leased: set[int] = set()
        self.errors: dict[int, Exception] = {}

    def determine_num_pages(self, request: Any) -> int:
        self.asked.append(request.lora_task_id)
        if request.request_id in self.errors:
            raise self.errors[request.request_id]
        if request.lora_task_id not in self.pages:
            raise PeftTaskNotCachedError("unknown task", task_id=request.lora_task_id)
        return self.pages[request.lora_task_id]

    def open_lease_tasks(self) -> set[int]:
        return set(self.leased)

    def sum_of(self, requests: Iterable[Any], extra: Collection[int] = ()) -> int:
        """Pages of the distinct tasks of these requests, and of further tasks."""
        tasks = {r.lora_task_id for r in requests} | set(extra)
        return sum(self.pages[task] for task in tasks - {None})


class Engine:
    """Acts on decisions as `CapacityDecision` says.

    Attributes:
        active: Requests in the order in which they are to be served.
        steps: Ids of the scheduled requests of each step.
        pauses: Ids of paused requests, in order.
        errors: Ids of refused requests with their errors.
        overlaps: Whether a finished request stays active, and its adapter leased, for one step.
        before_acting: Called with each decision while everything is as the scheduler saw it.
    """

    def __init__(
        self,
        policy: Any,
        pages: Mapping[int, int] | None = None,
        *,
        device_pages: int = 100,
        host_pages: int = 10**9,
        blocks: int = 1000,
        block_size: int = 4,
        max_num_requests: int = 8,
        max_skip_passes: int = 8,
        overlaps: bool = False,
    ) -> None:
        self.policy = policy
        self.kv = KVCacheManager(blocks, block_size)
        self.peft = CountedPages(pages or {}, device_pages=device_pages, host_pages=host_pages)
        self.max_num_requests = max_num_requests
        self.scheduler = CapacityScheduler(
            policy, max_num_requests, self.kv, self.peft, max_skip_passes=max_skip_passes
        )
        self.active: list[Request] = []
        self.steps: list[list[int]] = []
        self.pauses: list[int] = []
        self.errors: dict[int, Exception] = {}
        self.overlaps = overlaps
        self.before_acting: Callable[[CapacityDecision[Request]], None] = lambda _: None

    def step(self) -> CapacityDecision[Request]:
        """One pass and its consequences."""
        decision = self.scheduler.schedule_request(self.active)
        self._check_budgets(decision)
        self.before_acting(decision)
        self._end(r for r in self.active if r.state == "generation_to_complete")
        self.errors |= decision.errors
        self._end(r for r in self.active if r.request_id in decision.errors)
        for request in decision.paused:
            self.kv.free_resources(request)
            request.num_computed_tokens = 0
            request.state = "paused"
            self.pauses.append(request.request_id)
        if self.policy != "max_requests":
            for request in decision.scheduled:
                tokens = self.scheduler.tokens_to_allocate(request)
                assert self.kv.try_allocate(request, tokens), "the scheduler overspent KV blocks"
        for request in decision.scheduled:
            self._compute(request)
        self.peft.leased = {r.lora_task_id for r in decision.scheduled if self.overlaps} - {None}
        self.steps.append([r.request_id for r in decision.scheduled])
        return decision

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until no request is left."""
        while self.active:
            assert len(self.steps) < max_steps, "the requests do not finish"
            self.step()

    def steps_of(self, request_id: int) -> tuple[int, int]:
        """First step of a request, and the one after its last; it ran in all between."""
        at = [number for number, ids in enumerate(self.steps) if request_id in ids]
        assert at == list(range(at[0], at[-1] + 1))
        return at[0], at[-1] + 1

    def _compute(self, request: Request) -> None:
        request.num_computed_tokens = request.prompt + len(request.output_token_ids)
        request.output_token_ids.append(0)
        request.state = "generation"
        if len(request.output_token_ids) == request.max_tokens:
            request.state = "generation_to_complete"
            if not self.overlaps:
                self._end([request])

    def _end(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self.kv.free_resources(request)
            self.active.remove(request)

    def _check_budgets(self, decision: CapacityDecision[Request]) -> None:
        """What holds in every pass, whatever the policy."""
        scheduled, paused = decision.scheduled, decision.paused
        assert len(scheduled) <= self.max_num_requests
        positions = [self.active.index(request) for request in scheduled]
        assert positions == sorted(set(positions))
        assert not set(scheduled) & set(paused)
        assert not {r.request_id for r in scheduled + paused} & decision.errors.keys()
        completing = [r for r in self.active if r.state == "generation_to_complete"]
        assert not set(completing) & set(scheduled + paused)
        on_device = self.peft.sum_of(scheduled + completing, self.peft.leased)
        assert on_device <= self.peft.max_device_pages
        started = [r for r in self.active if r.has_started]
        assert self.peft.sum_of(scheduled + started) <= self.peft.max_host_pages
        assert self.policy == "max_utilization" or not paused


def ids(requests: list[Any]) -> list[int]:
    return [request.request_id for request in requests]


def started(engine: Engine, request: Request, tokens: int = 4) -> Request:
    """Gives the request blocks for so many tokens, as if they had been computed."""
    assert engine.kv.try_allocate(request, tokens)
    request.num_computed_tokens = tokens
    request.state = "generation"
    return request


def scheduled(engine: Engine, *requests: Request, inflight: tuple[int, ...] = ()) -> list[int]:
    return ids(engine.scheduler.schedule_request(requests, inflight).scheduled)
