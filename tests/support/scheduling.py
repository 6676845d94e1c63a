"""A scheduler over counted pages or the real cache, and what an engine does with its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.support.cache_fixtures import FakeAdapter, build_cache, fake_adapter
from tests.support.recorded_peft import RecordedPeftManager

from pagedlora import LoraModelConfig, PagedLoraError, PeftCacheConfig, PeftCacheManager
from pagedlora._core import Clock, Device
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.scheduler.kv_cache_v2 import KVCacheV2Scheduler
from pagedlora.scheduler.step import SchedulerOutput

SHAPES = {"q_proj": (24, 40), "down_proj": (56, 24)}
PAGE_BYTES = 256


class SpiedPeftManager(PeftCacheManager):
    """The real cache, which remembers the calls made to it and refuses on command.

    Attributes:
        calls: As those of `RecordedPeftManager`.
        add_errors: Task to the error that its next adds raise instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, int]] = []
        self.add_errors: dict[int, PagedLoraError] = {}

    def add_request_peft(self, request: Any, try_gpu_cache: bool = True) -> None:
        self.calls.append(("add", request.request_id))
        if request.lora_task_id in self.add_errors:
            raise self.add_errors[request.lora_task_id]
        super().add_request_peft(request, try_gpu_cache)

    def mark_request_done(self, request: Any, pause: bool = False) -> None:
        self.calls.append(("pause" if pause else "done", request.request_id))
        super().mark_request_done(request, pause)

    def count(self, method: str, request_id: int) -> int:
        """How often a method was called for a request."""
        return self.calls.count((method, request_id))


class PeftKind:
    """A manager of either kind with tasks "A", "B" and so on, each of the same number of pages.

    Attributes:
        manager: The manager, or None.
        is_real: Whether there are bytes behind it.
        sources: Adapters of the real one, by task.
    """

    def __init__(self, kind: str, *, device_adapters: int = 2, host_adapters: int = 100) -> None:
        """Makes one of kind "recorded" or "real", with room for so many adapters."""
        self.is_real = kind == "real"
        self.sources: dict[int, FakeAdapter] = {}
        if self.is_real:
            pages = pages_of(4)
            self.manager: Any = spied_cache(device_adapters * pages, host_adapters * pages)
            self._tasks = {name: self._register(seed) for seed, name in enumerate("ABCDE")}
        else:
            self._tasks = dict(zip("ABCDE", range(5, 10), strict=True))
            self.manager = RecordedPeftManager(
                dict.fromkeys(self._tasks.values(), 1),
                device_pages=device_adapters,
                host_pages=host_adapters,
            )

    def _register(self, seed: int) -> int:
        adapter = fake_adapter(self.manager.model_config, 4, seed)
        task = int(self.manager.core.register_task(adapter.plan))
        self.sources[task] = adapter
        return task

    def task(self, name: str | None) -> int | None:
        """The task of an adapter."""
        return None if name is None else self._tasks[name]

    def warm(self, name: str) -> None:
        """Brings an adapter into the host tier, where nobody owns it."""
        if self.is_real:
            core, visitor = self.manager.core, 10**9
            core.add_request_peft(visitor, self._tasks[name])
            self.settle()
            core.mark_request_done(visitor)
            self.iteration_stats()

    def settle(self) -> None:
        """Loads end and take effect."""
        if self.is_real:
            assert self.manager.wait_idle()

    def owner_state(self, request: LlmRequest) -> str:
        """Says "active", "paused" or "none"."""
        task, request_id = request.lora_task_id, request.request_id
        if self.is_real:
            if request_id in self.manager.active_tasks.get(task, ()):
                return "active"
            return "paused" if request_id in self.manager.paused_tasks.get(task, ()) else "none"
        if request_id in self.manager.paused:
            return "paused"
        return "active" if request_id in self.manager.owners.get(task, ()) else "none"

    def counts(self, request: LlmRequest) -> tuple[int, int, int]:
        """Adds, pauses and releases of a request so far."""
        count = self.manager.count
        request_id = request.request_id
        return count("add", request_id), count("pause", request_id), count("done", request_id)

    def iteration_stats(self) -> dict[str, int] | None:
        """The real one's counters since the last call; None: it has none."""
        return self.manager.get_and_reset_iteration_stats() if self.is_real else None

    def check_and_close(self) -> None:
        """Invariants, before and after closing."""
        if self.is_real:
            self.manager.check_invariants()
            self.manager.close()
            self.manager.check_invariants()


def small_model() -> LoraModelConfig:
    """The model of `spied_cache`."""
    return build_cache(torch.float16, shapes=SHAPES, num_layers=1, max_lora_rank=32).config


def pages_of(rank: int) -> int:
    """Pages of an adapter of that rank in `spied_cache`."""
    cache = build_cache(
        torch.float16, page_bytes=PAGE_BYTES, shapes=SHAPES, num_layers=1, max_lora_rank=32
    )
    return cache.peft.core.num_pages_of_plan(fake_adapter(cache.config, rank).plan)


def spied_cache(
    device_pages: int,
    host_pages: int,
    *,
    device: str | Device = "cpu",
    clock: Clock | None = None,
    options: Mapping[str, Any] | None = None,
) -> SpiedPeftManager:
    """A real cache of so many pages in each tier."""
    config = PeftCacheConfig(
        host_cache_size=host_pages * PAGE_BYTES,
        device_cache_size=device_pages * PAGE_BYTES,
        page_size=PAGE_BYTES,
        **(options or {}),
    )
    return SpiedPeftManager(small_model(), config, device, clock=clock)


MakePeft = Callable[..., PeftKind]


@pytest.fixture(params=["recorded", "real"])
def make_peft(request: pytest.FixtureRequest) -> Iterator[MakePeft]:
    """Managers of both kinds, checked at teardown."""
    made: list[PeftKind] = []

    def make(**rooms: int) -> PeftKind:
        made.append(PeftKind(request.param, **rooms))
        return made[-1]

    yield make
    for peft in made:
        peft.check_and_close()


class Bench:
    """A scheduler, its managers, and what an engine does with each decision.

    Attributes:
        kv: KV blocks of four tokens.
        peft: The adapters; None: the scheduler has no manager for them.
        scheduler: Under test.
        live: Live requests in arrival order.
    """

    def __init__(
        self,
        peft: PeftKind | None,
        *,
        num_blocks: int = 64,
        host_blocks: int = 64,
        **options: Any,
    ) -> None:
        options = {
            "policy": "max_utilization",
            "max_batch_size": 16,
            "max_num_tokens": 64,
        } | options
        self.kv = KVCacheManager(num_blocks, 4, num_host_blocks=host_blocks)
        self.peft = peft
        manager = None if peft is None else peft.manager
        self.scheduler = KVCacheV2Scheduler(self.kv, manager, **options)
        self.live: list[LlmRequest] = []
        self._ids = iter(range(1000))
        self._passes_left = 1000

    def add(
        self,
        adapter: str | None = None,
        *,
        prompt: int = 4,
        max_tokens: int | None = None,
        priority: int = 0,
        is_owner: bool = True,
    ) -> LlmRequest:
        """A new request, whose adapter is in the host tier already; its answer is long."""
        if max_tokens is None:
            max_tokens = max(2, min(40, 4 * self.kv.num_blocks - prompt))
        request = LlmRequest(
            next(self._ids),
            lora_task_id=None if self.peft is None else self.peft.task(adapter),
            priority=priority,
            prompt_token_ids=range(prompt),
            max_tokens=max_tokens,
        )
        self.live.append(request)
        if self.peft is not None and adapter is not None and is_owner:
            self.peft.manager.add_request_peft(request)
            self.peft.settle()
        return request

    def step(
        self, *, inflight: Iterable[LlmRequest] = (), between: Callable[[], None] | None = None
    ) -> SchedulerOutput:
        """Decides and computes one step; who has all its tokens ends."""
        output = self.schedule(inflight)
        if between is not None:
            between()
        self.compute(output)
        self.kv.check_invariants()
        return output

    def schedule(self, inflight: Iterable[LlmRequest] = ()) -> SchedulerOutput:
        """Decides one step and takes note of who gave way."""
        self._passes_left -= 1
        assert self._passes_left >= 0, f"{len(self.live)} requests do not end"
        output = self.scheduler.schedule_request(self.live, [r.request_id for r in inflight])
        for request in output.suspended:
            request.advance_to(RequestState.SUSPENDED)
        for request in output.recompute_paused:
            request.restart()
        for request, error in output.failed:
            request.error = error
            self.end(request)
        for state, requests in (
            (RequestState.PREFILLING, [chunk.request for chunk in output.context]),
            (RequestState.DECODING, output.generation),
        ):
            for request in requests:
                if request.state is not state:
                    request.advance_to(state)
        return output

    def compute(self, output: SchedulerOutput) -> None:
        """Leases, computes, ends."""
        context = [chunk.request for chunk in output.context]
        if self.peft is not None:
            lease = self.peft.manager.ensure_batch(context, output.generation)
            assert not lease.errors
            lease.close()
        for request in output.generation:
            request.num_computed_tokens += 1
            self._give_token(request)
        for chunk in output.context:
            request = chunk.request
            request.num_computed_tokens += chunk.num_tokens
            if request.num_computed_tokens == request.num_context_tokens:
                request.advance_to(RequestState.DECODING)
                self._give_token(request)

    def _give_token(self, request: LlmRequest) -> None:
        held = len(self.kv.block_table(request))
        assert held >= self.kv.blocks_needed(request.num_computed_tokens)
        request.output_token_ids.append(len(request.output_token_ids))
        if len(request.output_token_ids) == request.max_tokens:
            self.end(request)

    def end(self, request: LlmRequest) -> None:
        """Gives back what it holds."""
        request.advance_to(RequestState.FAILED if request.error else RequestState.FINISHED)
        self.kv.free_resources(request)
        if self.peft is not None and request.lora_task_id is not None:
            self.peft.manager.mark_request_done(request)
        self.live.remove(request)

    def run(self) -> None:
        """Steps until nobody is live."""
        while self.live:
            self.step()


def names_in(output: SchedulerOutput) -> list[int]:
    """Ids of who computes in the step, in its order."""
    return [r.request_id for r in (*output.generation, *(c.request for c in output.context))]
