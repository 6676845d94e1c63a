"""Pages that the scatter kernel fills are those of the host tier, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.support.adapters import adapter_tensors, write_adapter
from torch.utils.dlpack import from_dlpack

from pagedlora import (
    BatchLease,
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    _core,
)
from pagedlora.errors import AdapterFormatError, InvalidArgumentError
from pagedlora.loaders.hf import make_plan, open_peft_directory
from pagedlora.loaders.module_table import ModuleTable

GPU = torch.device("cuda", 0)
SIZES = ((64, 96), (1000, 24), (24, 3000), (4096, 512))
RANKS = (16, 7, 64, 33)
CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]
ROOMY = 16 << 20
SMALL = 64 << 10


@dataclass(frozen=True)
class Leased:
    """Adapters on a GPU.

    Attributes:
        cache: Its device tier is the GPU's.
        lease: Of all requests.
        requests: One per adapter.
        plans: Request id to what reads its adapter again.
    """

    cache: PeftCacheManager
    lease: BatchLease
    requests: list[LlmRequest]
    plans: dict[int, _core.AdapterPlan]

    def pool(self) -> torch.Tensor:
        """The device tier's bytes."""
        return from_dlpack(_core.device_pool_to_dlpack(self.cache.core, GPU.index))

    def is_as_host(self, request: LlmRequest) -> bool:
        """Whether a request's pages hold what its host copy does."""
        task = request.lora_task_id
        assert task is not None
        device, host = (self.cache.task_weights(task, tier) for tier in ("device", "host"))
        return device.keys() == host.keys() and all(
            left is right
            or torch.equal(left.cpu().view(torch.uint8), right.cpu().view(torch.uint8))
            for name in host
            for left, right in zip(device[name], host[name], strict=True)
        )


def model_of(tp: tuple[int, int] | None, dtype: torch.dtype) -> LoraModelConfig:
    model = torch.nn.ModuleDict(
        {"m": torch.nn.ModuleList([torch.nn.Linear(i, o, bias=False) for i, o in SIZES])}
    )
    config = LoraModelConfig.from_module(model, dtype=dtype)
    if tp is None:
        return config
    plan = {f"m.{n}": ("rowwise", "colwise")[n % 2] for n in range(len(SIZES))}
    return config.shard(plan, tp_size=tp[0], tp_rank=tp[1])


@contextmanager
def lease(
    directory: Path,
    dtypes: tuple[torch.dtype, torch.dtype],
    ranks: tuple[int, ...],
    tp: tuple[int, int] | None = None,
) -> Iterator[Leased]:
    """Adapters of normal numbers, of the first type in their files, of the second in the cache."""
    config = model_of(tp, dtypes[1])
    modules = model_of(None, dtypes[1]).modules
    table = ModuleTable(config)
    cache = PeftCacheManager(
        config, PeftCacheConfig(device_cache_size="32MiB", host_cache_size="32MiB"), device="cuda"
    )
    adapters = LoraManager(config, cache)
    requests, plans = [], {}
    try:
        for number, rank in enumerate(ranks):
            name = f"adapter-{number}"
            tensors = adapter_tensors(modules, rank, number, dtype=dtypes[0], integers=False)
            path = write_adapter(directory / name, tensors)
            adapters.register(name, path)
            opened = open_peft_directory(path)
            plans[number] = make_plan(opened.bind(table), table, opened.source)
            requests.append(LlmRequest(number, lora_task_id=adapters.task_id(name)))
            cache.add_request_peft(requests[-1])
        with cache.ensure_batch(requests, []) as leased:
            assert not leased.errors
            yield Leased(cache, leased, requests, plans)
    finally:
        cache.close()


def poison(leased: Leased) -> None:
    """Makes every byte of the device tier 0xFF."""
    leased.pool().fill_(0xFF)
    torch.cuda.synchronize()
    assert not any(leased.is_as_host(request) for request in leased.requests)


@pytest.mark.parametrize("staging", ["pinned", "device"])
@pytest.mark.parametrize("staging_bytes", [ROOMY, SMALL])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("tp", [None, (2, 1)], ids=["whole", "slice"])
@pytest.mark.parametrize("dtypes", CASTS, ids=str)
def test_scattered_pages_are_those_of_the_host(  # noqa: PLR0917 - each is a way of its own
    dtypes: tuple[torch.dtype, torch.dtype],
    tp: tuple[int, int] | None,
    count: int,
    staging_bytes: int,
    staging: str,
    tmp_path: Path,
) -> None:
    scatter = _core.GpuScatter(staging_bytes=staging_bytes, staging=staging)
    with lease(tmp_path, dtypes, RANKS[:count], tp) as leased:
        poison(leased)
        stream = torch.cuda.Stream()
        read = scatter.execute(leased.lease, list(leased.plans.items()), stream.cuda_stream)
        assert all(read)
        assert (scatter.num_launches == 1) == (staging_bytes == ROOMY)
        assert all(leased.is_as_host(request) for request in leased.requests)


@pytest.mark.parametrize("staging", ["pinned", "device"])
def test_a_launch_can_be_repeated(staging: str, tmp_path: Path) -> None:
    scatter = _core.GpuScatter(staging_bytes=ROOMY, staging=staging)
    with lease(tmp_path, CASTS[0], RANKS) as leased:
        scatter.execute(leased.lease, list(leased.plans.items()))
        poison(leased)
        scatter.repeat()
        torch.cuda.synchronize()
        assert all(leased.is_as_host(request) for request in leased.requests)


def test_a_plan_of_another_shape_is_refused(tmp_path: Path) -> None:
    scatter = _core.GpuScatter(staging_bytes=ROOMY)
    with lease(tmp_path, CASTS[0], RANKS) as leased:
        with pytest.raises(InvalidArgumentError, match="not of the shape"):
            scatter.execute(leased.lease, [(0, leased.plans[1])])
        with pytest.raises(KeyError):
            scatter.execute(leased.lease, [(77, leased.plans[1])])
        assert all(leased.is_as_host(request) for request in leased.requests)


def test_an_overflow_of_float16_is_told(tmp_path: Path) -> None:
    """The cache's own read would refuse the file, so it is another one of the same shape."""
    scatter = _core.GpuScatter(staging_bytes=ROOMY)
    with lease(tmp_path, (torch.float32, torch.float16), RANKS[:1]) as leased:
        config = leased.cache.model_config
        tensors = adapter_tensors(config.modules, RANKS[0], 9)
        tensors["base_model.model.m.1.lora_B.weight"][-1, -1] = 1e6
        opened = open_peft_directory(write_adapter(tmp_path / "large", tensors))
        table = ModuleTable(config)
        plan = make_plan(opened.bind(table), table, opened.source)
        with pytest.raises(AdapterFormatError, match=r"m\.1\.lora_B"):
            scatter.execute(leased.lease, [(0, plan)])
