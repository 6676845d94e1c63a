"""Caches whose sources, copies and time do what a test says.

A `ManualClock` stands still unless a test advances it: what could wait for time is called on a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.support.adapters import assert_same_weights, weights_of
from tests.support.cache_fixtures import Cache, FakeAdapter, fake_adapter, look_at_loads

from pagedlora import LlmRequest, PeftCacheManager
from pagedlora._core import BatchLease, FakeDevice, FakeSource, ManualClock

PAGES = 5  # of every adapter here
LIMIT_S = 10.0


@dataclass
class Bench:
    """A cache whose sources, copies and time do what a test says.

    Attributes:
        peft: The cache; adapters are its unit here.
        clock: Its time.
        device: Its device.
        adapters: By task.
    """

    peft: PeftCacheManager
    clock: ManualClock
    device: FakeDevice
    adapters: dict[int, FakeAdapter] = field(default_factory=dict)

    def register(self) -> int:
        """Another adapter."""
        adapter = fake_adapter(self.peft.model_config, rank=4, seed=len(self.adapters))
        task = self.peft.core.register_task(adapter.plan)
        assert self.peft.core.num_pages_of_task(task) == PAGES
        self.adapters[task] = adapter
        return task

    def register_late(self) -> int:
        """Another adapter, whose reads hang until they are released."""
        task = self.register()
        self.source(task).hold_reads()
        return task

    def source(self, task: int) -> FakeSource:
        """Where its bytes come from."""
        return self.adapters[task].source

    def add(self, request_id: int, task: int, *, started: bool = False) -> LlmRequest:
        """A request that owns the task."""
        request = LlmRequest(request_id, task, num_computed_tokens=int(started))
        self.peft.add_request_peft(request)
        return request

    def add_and_load(self, request_id: int, task: int, *, started: bool = False) -> LlmRequest:
        """A request whose adapter is there."""
        request = self.add(request_id, task, started=started)
        assert self.peft.wait_idle()
        assert self.peft.adapter_state(request) == "ready"
        return request

    def ensure(self, *requests: LlmRequest) -> BatchLease:
        """A batch of them."""
        return self.peft.ensure_batch(requests, [])

    def ended(self) -> list[tuple[int, str, bool]]:
        """Loads that have ended and have not taken effect."""
        return look_at_loads(self.peft)[0]

    def states(self, *requests: LlmRequest) -> list[str]:
        """Of each."""
        return [self.peft.adapter_state(request) for request in requests]

    def on_host(self, *tasks: int) -> list[bool]:
        """Which of them are resident there."""
        return [self.peft.is_task_cached(task) for task in tasks]

    def check_content(self, task: int, tier: Any = "host") -> None:
        """Fails unless the copy is what was registered."""
        expected = weights_of(self.adapters[task].tensors, torch.float16)
        assert_same_weights(self.peft.task_weights(task, tier), expected)


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(make_cache: Callable[..., Cache]) -> Iterator[MakeBench]:
    """Makes caches that hold so many adapters; at the end everything that hangs is released."""
    made: list[Bench] = []

    def make(host: int = 8, device: int = 8, *, one_pass: bool = False, **options: Any) -> Bench:
        clock, fake = ManualClock(), FakeDevice(is_host_memory=one_pass)
        cache = make_cache(
            torch.float16,
            host_pages=host * PAGES,
            device_pages=device * PAGES,
            page_bytes=256,
            shapes={"q_proj": (24, 40), "down_proj": (56, 24)},
            num_layers=1,
            clock=clock,
            device=fake,
            options={"load_timeout_s": LIMIT_S, **options},
        )
        made.append(Bench(cache.peft, clock, fake))
        return made[-1]

    yield make
    for bench in made:
        bench.device.release_copies()
        for adapter in bench.adapters.values():
            adapter.source.release_reads()


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """Room for many."""
    return make_bench()
