"""Reading an adapter again, against a bare `pread` of its file into a warm buffer."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.python.harness import Case, Result, run_rounds
from safetensors.torch import load_file, save_file
from tests.support.cache_fixtures import add_and_wait

from pagedlora import LoraManager, LoraModelConfig, PeftCacheConfig, PeftCacheManager
from pagedlora.demo.generated_adapters import ALL_LINEAR, AdapterShape, write_adapters
from pagedlora.demo.smollm2 import fetch_smollm2
from pagedlora.engine.pretrained import skeleton

FILES = {"fp32 -> bf16": (torch.float32, 32), "bf16 -> bf16": (torch.bfloat16, 64)}
"""Label to type in the file and rank: 39 MB of all-linear SmolLM2 shapes each."""
DEVICE_GOALS = {"fp32 -> bf16": 0.75, "bf16 -> bf16": 0.5}
HOST_GOAL = 0.8
ROUNDS = 41


class _Rereader:
    """A cache, one adapter, and the calls that bring it in."""

    def __init__(self, config: LoraModelConfig, directory: Path) -> None:
        self.cache = PeftCacheManager(
            config, PeftCacheConfig(host_cache_size="64MiB", device_cache_size="64MiB")
        )
        self._manager = LoraManager(config, self.cache)
        self._directory = directory
        self._file = directory / "adapter_model.safetensors"
        self._numbers = itertools.count()
        self._request: Any = None
        self.register()

    def register(self) -> None:
        name = f"adapter-{next(self._numbers)}"
        self._manager.register(name, self._directory)
        self._request = SimpleNamespace(
            request_id=next(self._numbers),
            lora_task_id=self._manager.task_id(name),
            lora_weights=None,
        )

    def evict(self) -> None:
        """Takes the adapter out of both tiers."""
        self.cache.mark_request_done(self._request)
        for tier in ("device", "host"):
            self.cache.core.evict_unowned(tier)
        assert not self.cache.is_task_cached(self._request.lora_task_id)

    def to_host(self) -> None:
        add_and_wait(self.cache, self._request)

    def to_device(self) -> None:
        """Both tiers in one pass: the batch waits for the load that has just begun."""
        self.cache.add_request_peft(self._request)
        lease = self.cache.ensure_batch([self._request], [])
        assert not lease.errors, lease.errors
        lease.close()

    def first_load(self) -> None:
        """Digest, headers and weights of an adapter that is not known yet."""
        with self._file.open("rb") as file:
            hashlib.file_digest(file, "sha256")
        self.register()
        self.to_device()


class _BarePread:
    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDONLY)
        self._buffer = memoryview(bytearray(file.stat().st_size))

    def run(self) -> None:
        done = 0
        while done < len(self._buffer):
            done += os.preadv(self._fd, [self._buffer[done:]], done)

    def close(self) -> None:
        os.close(self._fd)


def measure() -> list[Result]:
    """The ratios for both file types."""
    model_dir = fetch_smollm2()
    config = LoraModelConfig.from_module(
        skeleton(model_dir), ALL_LINEAR, dtype=torch.bfloat16, max_lora_rank=64
    )
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (label, (dtype, rank)) in enumerate(FILES.items()):
            directory = _write(Path(scratch) / str(number), config, dtype, rank)
            results += _measure_file(config, directory, label)
    return results


def _write(root: Path, config: LoraModelConfig, dtype: torch.dtype, rank: int) -> Path:
    shapes = [("adapter", AdapterShape(rank, ALL_LINEAR))]
    directory = write_adapters(root, shapes, config.modules, seed=1, strength=0.1)["adapter"]
    file = directory / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _measure_file(config: LoraModelConfig, directory: Path, label: str) -> list[Result]:
    reader = _Rereader(config, directory)
    file = directory / "adapter_model.safetensors"
    pread = _BarePread(file)
    timings = run_rounds(
        {
            "pread": Case(pread.run),
            "device": Case(reader.to_device, prepare=reader.evict),
            "host": Case(reader.to_host, prepare=reader.evict),
            "first": Case(reader.first_load, prepare=reader.evict),
        },
        ROUNDS,
        warm_up=2,
    )
    pread.close()
    gigabytes = file.stat().st_size / 1e9

    def detail(case: str) -> str:
        cpu = timings.median(case).cpu
        bare = timings.median("pread").cpu
        return f"{cpu * 1e3:.2f} ms ({gigabytes / cpu:.1f} GB/s), pread {bare * 1e3:.2f} ms"

    return [
        timings.result(
            f"re-read {label}: file -> host -> device / pread",
            "pread",
            "device",
            DEVICE_GOALS[label],
            detail("device"),
        ),
        timings.result(
            f"re-read {label}: file -> host alone / pread",
            "pread",
            "host",
            HOST_GOAL,
            detail("host"),
        ),
        timings.result(
            f"first load {label}, with SHA-256 (hashlib) / pread",
            "pread",
            "first",
            None,
            detail("first"),
        ),
    ]
