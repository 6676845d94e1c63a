"""A step while adapters are being loaded, against the same step while none is."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.python.harness import Result

from pagedlora import LoraManager, LoraModelConfig, PeftCacheConfig, PeftCacheManager
from pagedlora.demo.generated_adapters import ALL_LINEAR, AdapterShape, write_adapters
from pagedlora.demo.smollm2 import fetch_smollm2
from pagedlora.engine.pretrained import skeleton

RESIDENT = 8
LOADING = 10
RANK = 64
ROUNDS = 15
STEPS_PER_ROUND = 5


class _Engine:
    """Leases resident adapters and computes for some milliseconds, over and over."""

    def __init__(self, config: LoraModelConfig, root: Path) -> None:
        self.cache = PeftCacheManager(
            config, PeftCacheConfig(host_cache_size="1GiB", device_cache_size="320MiB")
        )
        adapters = LoraManager(config, self.cache)
        shapes = [("adapter", AdapterShape(RANK, ALL_LINEAR))]
        source = write_adapters(root, shapes, config.modules, seed=1, strength=0.1)["adapter"]
        self._requests: list[Any] = []
        for number in range(RESIDENT + LOADING):
            adapters.register(str(number), source)
            self._requests.append(
                SimpleNamespace(
                    request_id=number,
                    lora_task_id=adapters.task_id(str(number)),
                    lora_weights=None,
                )
            )
        self._batch = self._requests[:RESIDENT]
        for request in self._batch:
            self.cache.add_request_peft(request)
        self._matrix = torch.ones(512, 512)

    def step(self) -> float:
        """Wall seconds of one step."""
        start = time.perf_counter()
        with self.cache.ensure_batch(self._batch, []) as lease:
            assert len(lease) == RESIDENT
            product = self._matrix
            for _ in range(8):
                product = product @ self._matrix * (1 / 512)
        self.cache.poll()
        return time.perf_counter() - start

    def start_loads(self) -> None:
        for request in self._requests[RESIDENT:]:
            self.cache.add_request_peft(request)

    def forget_loads(self) -> None:
        self.cache.wait_idle()
        for request in self._requests[RESIDENT:]:
            assert self.cache.is_task_cached(request.lora_task_id)
            self.cache.mark_request_done(request)
        self.cache.core.evict_unowned("host")


def measure() -> list[Result]:
    """The ratio of step times, by wall time alone: loads run on other threads."""
    config = LoraModelConfig.from_module(
        skeleton(fetch_smollm2()), ALL_LINEAR, dtype=torch.bfloat16, max_lora_rank=RANK
    )
    with tempfile.TemporaryDirectory() as scratch:
        engine = _Engine(config, Path(scratch))
        engine.step()
        ratios, alone, beside = [], [], []
        for _ in range(ROUNDS):
            alone.append(statistics.median(engine.step() for _ in range(STEPS_PER_ROUND)))
            engine.start_loads()
            beside.append(statistics.median(engine.step() for _ in range(STEPS_PER_ROUND)))
            engine.forget_loads()
            ratios.append(alone[-1] / beside[-1])
        engine.cache.close()
    ratio = statistics.median(ratios)
    detail = (
        f"{statistics.median(beside) * 1e3:.2f} ms, without {statistics.median(alone) * 1e3:.2f} ms"
    )
    name = f"a step while {LOADING} adapters of 39 MB load / while none does"
    return [Result(name, ratio, ratio, None, detail)]
