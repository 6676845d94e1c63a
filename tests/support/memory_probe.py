"""Run as a script: sends many adapters through a small cache and prints what that costs as JSON.

A process of its own, so that nothing but the adapters can make its memory grow. Usage:
python -m tests.support.memory_probe DIRECTORY NUM_ADAPTERS
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.adapters import CONFIG_FILE, WEIGHTS_FILE, layered_modules
from tests.support.cache_fixtures import add_and_wait

from pagedlora import (
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    _core,
)
from pagedlora._core import Dtype

SHAPES = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down", "extra"), (16, 16))
NUM_LAYERS = 26  # 208 modules
RESIDENT = 8
WARM_UP = 50


def model_config() -> LoraModelConfig:
    """208 tiny modules."""
    return LoraModelConfig(layered_modules(NUM_LAYERS, SHAPES), Dtype.float32, 8)


def shape_of(number: int, config: LoraModelConfig) -> tuple[int, int]:
    """Rank and number of modules of an adapter; more shapes than a layout cache would keep."""
    return number % 4 + 1, len(config.modules) - number % 8


@functools.cache
def header_of(rank: int, num_modules: int) -> tuple[bytes, int]:
    """Header of a weights file of that shape, and how many float32 numbers follow it."""
    tensors: dict[str, Any] = {}
    at = 0
    for module in model_config().modules[:num_modules]:
        for matrix, shape in (("A", [rank, 16]), ("B", [16, rank])):
            tensors[f"base_model.model.{module.name}.lora_{matrix}.weight"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [at, at + rank * 64],
            }
            at += rank * 64
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header, at // 4


def write(directory: Path, number: int, config: LoraModelConfig) -> Path:
    """Writes one adapter of its own content; all of its numbers are `number`."""
    rank, num_modules = shape_of(number, config)
    header, num_values = header_of(rank, num_modules)
    path = directory / str(number)
    path.mkdir()
    content = header + np.full(num_values, number, np.float32).tobytes()
    (path / WEIGHTS_FILE).write_bytes(content)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(SHAPES)}
    (path / CONFIG_FILE).write_text(json.dumps(fields))
    return path


def anonymous_bytes() -> int:
    """Anonymous memory of this process, after giving back what is free."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def make_cache(config: LoraModelConfig) -> PeftCacheManager:
    """Room for eight of the largest adapters in each tier."""
    page_bytes = 4096
    sizing = PeftCacheManager(
        config,
        PeftCacheConfig(host_cache_size=2**22, device_cache_size=2**22, page_size=page_bytes),
    )
    largest = [(index, 4) for index in range(len(config.modules))]
    pages, _ = _core.measure_layout(config, largest, sizing.core.layout_params)
    budget = RESIDENT * pages * page_bytes
    return PeftCacheManager(
        config,
        PeftCacheConfig(host_cache_size=budget, device_cache_size=budget, page_size=page_bytes),
    )


def serve(peft: PeftCacheManager, manager: LoraManager, number: int) -> None:
    """One request from its start to its end, in a batch with the previous adapter."""
    names = [str(n) for n in (number, max(number - 1, 0))]
    requests = [LlmRequest(2 * number + i, manager.task_id(n)) for i, n in enumerate(names)]
    for request in requests:
        add_and_wait(peft, request)
    with peft.ensure_batch(requests, []) as lease:
        assert lease[requests[0].request_id]
        a, b = peft.task_weights(requests[0].lora_task_id)["model.layers.7.k"]
        assert a.eq(number).all()
        assert b.eq(number).all()
    for request in requests:
        peft.mark_request_done(request)


def run(directory: Path, num_adapters: int) -> dict[str, Any]:
    """Registers and serves adapters one after the other, twice."""
    config = model_config()
    peft = make_cache(config)
    manager = LoraManager(config, peft)
    paths = [write(directory, number, config) for number in range(num_adapters)]
    base = 0
    for number, path in enumerate(paths):
        manager.register(str(number), path)
        serve(peft, manager, number)
        if number + 1 == WARM_UP:
            base = anonymous_bytes()
    first_pass = anonymous_bytes()
    for number in range(num_adapters):
        serve(peft, manager, number)
    second_pass = anonymous_bytes()
    peft.check_invariants()
    stats = peft.stats
    peft.evict_unowned("host")
    peft.evict_unowned("device")
    peft.check_invariants()
    return {
        "bytes_per_adapter": (first_pass - base) / (num_adapters - WARM_UP),
        "second_pass_bytes_per_adapter": (second_pass - first_pass) / num_adapters,
        "source_reads": stats.source_reads,
        "source_rereads": stats.source_rereads,
        "host_evictions": stats.host.tasks_evicted,
        "device_evictions": stats.device.tasks_evicted,
        "lost_pages": peft.max_host_pages
        - peft.free_pages("host")
        + peft.max_device_pages
        - peft.free_pages("device"),
        "modules": len(config.modules),
        "registered": len(manager),
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))
