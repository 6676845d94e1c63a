"""Adapters of an 8B Llama in a cache on a GPU, for what is measured there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.python.harness import Result, Timings

from pagedlora import (
    BatchLease,
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
)
from pagedlora.demo.generated_adapters import ALL_LINEAR, AdapterShape, write_adapters

ROUNDS = 15
MODULES = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_dense",
    "mlp_h_to_4h",
    "mlp_gate",
    "mlp_4h_to_h",
)
BIG = AdapterShape(16, ALL_LINEAR)  # 84 MB
SMALL = AdapterShape(8, ("q_proj", "v_proj"))  # 6.8 MB
TINY = AdapterShape(4, ("q_proj", "v_proj"))
NUM_LAYERS = 32


def model_config(num_layers: int = NUM_LAYERS) -> LoraModelConfig:
    """Of an 8B Llama, or of its first layers."""
    return LoraModelConfig.from_dims(
        num_layers, 4096, 14336, 32, 8, 128, modules=MODULES, dtype=torch.bfloat16
    )


@dataclass
class Fleet:
    """A cache on the GPU and registered adapters."""

    config: LoraModelConfig
    cache: PeftCacheManager
    requests: dict[str, LlmRequest]
    paths: dict[str, Path]

    def add(self, names: Sequence[str]) -> None:
        """Makes requests own the adapters, and brings them into the host tier."""
        for name in names:
            self.cache.add_request_peft(self.requests[name])
        self.cache.wait_idle()

    def lease(self, names: Sequence[str]) -> BatchLease:
        """Adapters on the GPU; no load may fail."""
        lease = self.cache.ensure_batch([self.requests[name] for name in names], [])
        assert not lease.errors, lease.errors
        return lease

    def evict(self, names: Sequence[str]) -> None:
        """Takes adapters off the GPU; their host copies stay."""
        for name in names:
            self.cache.mark_request_done(self.requests[name])
        self.cache.evict_unowned("device")
        for name in names:
            self.cache.add_request_peft(self.requests[name])

    def num_bytes(self, name: str) -> int:
        """Of the pages of an adapter."""
        return self.cache.determine_num_pages(self.requests[name]) * self.cache.page_bytes


@contextmanager
def open_fleet(
    shapes: dict[str, AdapterShape], *, host: str, device: str, num_layers: int = NUM_LAYERS
) -> Iterator[Fleet]:
    """A fleet with room for so much; pinning a GiB of the host takes a third of a second."""
    config = model_config(num_layers)
    with tempfile.TemporaryDirectory() as scratch:
        cache = PeftCacheManager(
            config, PeftCacheConfig(host_cache_size=host, device_cache_size=device), device="cuda"
        )
        adapters = LoraManager(config, cache)
        paths = write_adapters(Path(scratch), shapes.items(), config.modules, seed=1, strength=0.1)
        requests = {}
        for number, (name, path) in enumerate(paths.items()):
            adapters.register(name, path)
            requests[name] = LlmRequest(number, lora_task_id=adapters.task_id(name))
        try:
            yield Fleet(config, cache, requests, paths)
        finally:
            cache.close()


def by_wall(result: Result) -> Result:
    """The GPU's time is not the process's: the wall decides."""
    return replace(result, ratio=result.wall_ratio)


def milliseconds(timings: Timings, *names: str) -> str:
    return ", ".join(f"{name} {timings.median(name).wall * 1e3:.3f} ms" for name in names)
