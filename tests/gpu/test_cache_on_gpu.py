"""What is in the GPU's pages is what the file holds, however it came there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.adapters import write_random_adapter
from tests.support.tiny_models import build_tiny_model

from pagedlora import (
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    make_cuda_device,
)


def same(
    left: dict[str, tuple[torch.Tensor, ...]], right: dict[str, tuple[torch.Tensor, ...]]
) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
        for name in left
        for a, b in zip(left[name], right[name], strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pages_on_the_gpu_are_those_of_the_host_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    config = LoraModelConfig.from_module(build_tiny_model("llama"), dtype=dtype)
    cache = PeftCacheManager(
        config, PeftCacheConfig(device_cache_size="320KiB", host_cache_size="8MiB"), device="cuda"
    )
    adapters = LoraManager(config, cache)
    try:
        for number in range(12):
            name = f"adapter-{number}"
            rank = (1, 3, 8, 33, 64)[number % 5]
            adapters.register(
                name, write_random_adapter(tmp_path / name, config, rank=rank, seed=number)
            )
        for _ in range(2):
            for number in range(12):
                request = LlmRequest(number, lora_task_id=adapters.task_id(f"adapter-{number}"))
                cache.add_request_peft(request)
                with cache.ensure_batch([request], []) as lease:
                    assert not lease.errors
                    task = request.lora_task_id
                    assert task is not None
                    assert same(
                        cache.task_weights(task, "device"), cache.task_weights(task, "host")
                    )
                cache.mark_request_done(request)
        assert cache.stats.device.tasks_evicted > 0
        cache.check_invariants()
    finally:
        cache.close()


def test_device_memory_does_not_grow_with_the_adapters_that_pass_through(tmp_path: Path) -> None:
    config = LoraModelConfig.from_module(build_tiny_model("llama"), dtype=torch.bfloat16)
    cache = PeftCacheManager(
        config, PeftCacheConfig(device_cache_size="256KiB", host_cache_size="8MiB"), device="cuda"
    )
    adapters = LoraManager(config, cache)
    used: list[int] = []
    try:
        for number in range(20):
            name = f"adapter-{number}"
            adapters.register(
                name, write_random_adapter(tmp_path / name, config, rank=16, seed=number)
            )
            request = LlmRequest(number, lora_task_id=adapters.task_id(name))
            cache.add_request_peft(request)
            cache.ensure_batch([request], []).close()
            cache.mark_request_done(request)
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
        growth = (used[-1] - used[4]) / (len(used) - 5)
        assert growth < 2**20, f"{growth:.0f} bytes per adapter"
    finally:
        cache.close()


def test_the_device_tier_lies_in_a_tensor_of_torch(tmp_path: Path) -> None:
    memory = torch.full((2**20,), 7, dtype=torch.uint8, device="cuda:0")
    begin = memory.data_ptr()
    config = LoraModelConfig.from_module(build_tiny_model("llama"), dtype=torch.bfloat16)
    device = make_cuda_device(0, memory)
    del memory
    assert device.memory_info()[1] == 2**20
    cache = PeftCacheManager(
        config, PeftCacheConfig(device_cache_percent=1.0, host_cache_size="8MiB"), device=device
    )
    adapters = LoraManager(config, cache)
    try:
        adapters.register("a", write_random_adapter(tmp_path / "a", config, rank=16, seed=1))
        task = adapters.task_id("a")
        request = LlmRequest(1, lora_task_id=task)
        cache.add_request_peft(request)
        stream = torch.cuda.current_stream()
        lease = cache.ensure_batch([request], [], stream=stream)
        pointers = [entry.weights_in_pointer for entry in lease[1]]
        assert all(begin <= pointer < begin + 2**20 for pointer in pointers)
        assert same(cache.task_weights(task, "device"), cache.task_weights(task, "host"))
        lease.close(stream)
    finally:
        cache.close()
