"""Fixtures that make caches, and check their invariants whether or not a test asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    Tensors,
    adapter_config,
    adapter_tensors,
    layered_modules,
    write_random_adapter,
)

from pagedlora import (
    AdapterWeights,
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    _core,
)
from pagedlora._core import (
    AdapterPlan,
    CarriedWeights,
    Clock,
    Device,
    Dtype,
    FakeSource,
    LoraModule,
    PlannedRow,
)
from pagedlora.engine.dtypes import to_core_dtype
from pagedlora.peft_cache import LoadOutcome, Tier

SHAPES = {
    "self_attn.q_proj": (48, 64),
    "self_attn.k_proj": (48, 16),
    "self_attn.v_proj": (48, 16),
    "self_attn.o_proj": (64, 48),
    "mlp.up_proj": (48, 104),
    "mlp.down_proj": (104, 48),
}
NUM_LAYERS = 2
PAGE_BYTES = 1024


@dataclass(frozen=True)
class Cache:
    """A manager of each kind over one model.

    Attributes:
        config: The model.
        peft: The cache.
        adapters: The registry over it.
    """

    config: LoraModelConfig
    peft: PeftCacheManager
    adapters: LoraManager

    def request(self, request_id: int, name: str | None) -> LlmRequest:
        """A request for a registered adapter, or for the base model."""
        task = None if name is None else self.adapters.task_id(name)
        return LlmRequest(request_id, lora_task_id=task)


def model_config(
    dtype: torch.dtype = torch.float32,
    *,
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    num_layers: int = NUM_LAYERS,
    modules: Sequence[LoraModule] | None = None,
    max_lora_rank: int = 16,
) -> LoraModelConfig:
    """A model of a few small modules of unlike shapes, or of the given modules."""
    if modules is None:
        modules = layered_modules(num_layers, shapes)
    return LoraModelConfig(list(modules), to_core_dtype(dtype), max_lora_rank)


def build_cache(
    dtype: torch.dtype = torch.float32,
    *,
    host_pages: int = 400,
    device_pages: int = 400,
    page_bytes: int | None = PAGE_BYTES,
    device: str | Device = "cpu",
    clock: Clock | None = None,
    options: Mapping[str, Any] | None = None,
    **model: Any,
) -> Cache:
    """A cache of so many pages; `page_bytes` None: 400 KiB in each tier, page size searched.

    `options` are more fields of its `PeftCacheConfig`.
    """
    config = model_config(dtype, **model)
    unit = page_bytes or 1024
    peft = PeftCacheManager(
        config,
        PeftCacheConfig(
            host_cache_size=host_pages * unit,
            device_cache_size=device_pages * unit,
            page_size=page_bytes or "auto",
            **(options or {}),
        ),
        device,
        clock=clock,
    )
    return Cache(config, peft, LoraManager(config, peft))


@pytest.fixture
def make_cache() -> Iterator[Callable[..., Cache]]:
    """Builds caches as `build_cache`; at teardown each is checked, closed and checked again."""
    made: list[Cache] = []

    def make(*args: Any, **kwargs: Any) -> Cache:
        made.append(build_cache(*args, **kwargs))
        return made[-1]

    yield make
    for cache in made:
        check_pages(cache.peft)
        cache.peft.close()
        check_pages(cache.peft)


@pytest.fixture
def small_cache(make_cache: Callable[..., Cache]) -> Cache:
    """A float32 cache with room for many adapters."""
    return make_cache()


PATIENCE_S = 60.0
"""Real time within which workers and other threads must have done what they can."""


def wait_until(holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Looks again and again; False if it does not come about."""
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


class Call:
    """A call on a thread of its own, which a test can wait for with a bound."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._outcome: Future[Any] = Future()

        def run() -> None:
            try:
                self._outcome.set_result(function(*args))
            except BaseException as error:
                self._outcome.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    @property
    def has_returned(self) -> bool:
        """Whether the call is over."""
        return self._outcome.done()

    def result(self) -> Any:
        """Waits for it; raises what it raised, TimeoutError if it does not come back."""
        return self._outcome.result(PATIENCE_S)


def look_at_loads(peft: PeftCacheManager) -> tuple[list[LoadOutcome], list[int]]:
    """Polls and lets nothing take effect.

    Returns:
        The loads that have ended, sorted, and the requests that `poll` says have failed.
    """
    seen: list[LoadOutcome] = []

    def agree(ended: list[LoadOutcome]) -> list[LoadOutcome]:
        seen.extend(ended)
        return []

    failed = peft.poll(agree=agree)
    return sorted(seen), failed


def add_and_wait(peft: PeftCacheManager, request: LlmRequest) -> None:
    """Adds a request and waits for its load; raises its error, the request being done then."""
    peft.add_request_peft(request)
    assert peft.wait_idle(), "loads take for ever"
    error = peft.adapter_error(request)
    if error is not None:
        peft.mark_request_done(request)
        raise error


def check_pages(peft: PeftCacheManager) -> None:
    """Runs the cache's own checks and compares what it reports about pages."""
    peft.check_invariants()
    totals: dict[Tier, int] = {"host": peft.max_host_pages, "device": peft.max_device_pages}
    for tier, total in totals.items():
        assert 0 <= peft.free_pages(tier) <= total
        assert (peft.free_pages(tier) == total) == (peft.resident_tasks(tier) == 0)


def carried_weights(seed: int, rank: int = 4, dtype: torch.dtype = torch.float32) -> AdapterWeights:
    """Weights for all modules of `model_config()`, for a request to carry."""
    tensors = adapter_tensors(model_config().modules, rank, seed, dtype=dtype)
    return AdapterWeights.from_tensors(tensors, adapter_config(tensors))


def pages_of_random_adapter(rank: int = 4) -> int:
    """Pages that an adapter of all modules takes in `build_cache()`."""
    request = LlmRequest(0, lora_task_id=0, lora_weights=carried_weights(0, rank))
    return build_cache().peft.determine_num_pages(request)


@dataclass(frozen=True, eq=False)
class FakeAdapter:
    """An adapter whose source does what a test says; also weights that a request carries.

    Attributes:
        tensors: Named as PEFT names them.
        source: They lie in it back to back.
        plan: How they are read.
    """

    tensors: Tensors
    source: FakeSource
    plan: AdapterPlan

    def carried(self, _: _core.LoraModelConfig) -> CarriedWeights:
        """As `AdapterWeights.carried`."""
        return CarriedWeights(self.plan, self.source.description)


def fake_adapter(config: _core.LoraModelConfig, rank: int = 4, seed: int = 0) -> FakeAdapter:
    """An adapter of all modules, the same for the same arguments."""
    tensors = adapter_tensors(config.modules, rank, seed)
    pieces = [tensor.numpy().tobytes() for tensor in tensors.values()]
    offsets = [sum(map(len, pieces[:position])) for position in range(len(pieces))]
    rows = [
        PlannedRow(
            position,
            rank,
            1.0,
            offsets[2 * position],
            Dtype.float32,
            offsets[2 * position + 1],
            Dtype.float32,
        )
        for position in range(len(config.modules))
    ]
    source = FakeSource(b"".join(pieces), f"fake of rank {rank}, seed {seed}")
    return FakeAdapter(tensors, source, AdapterPlan(config, rows, source))


def register_adapters(cache: Cache, path: Path, *names: str, rank: int = 4) -> None:
    """Writes and registers adapters of all modules; the seed is the position of the name."""
    for seed, name in enumerate(names):
        directory = write_random_adapter(path / name, cache.config, rank=rank, seed=seed)
        cache.adapters.register(name, directory)
