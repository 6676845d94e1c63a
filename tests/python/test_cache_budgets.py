"""TensorRT-LLM's ways to size a cache, in bytes and pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.packed_adapters import packed_model

from pagedlora import InvalidArgumentError, LoraConfig, LoraModelConfig, PeftCacheConfig
from pagedlora import PeftCacheManager as Manager
from pagedlora.cache_budgets import cache_budgets, module_layer_bytes
from pagedlora.engine.sizing import with_adapter_counts

FREE_BYTES = 10_000_000


def bytes_of_rank(model: LoraModelConfig, rank: int) -> int:
    features = sum(module.in_features + module.out_features for module in model.modules)
    return features * rank * 4


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, 256), (torch.float16, 128), (torch.bfloat16, 128)]
)
def test_a_module_layer_is_one_rank_of_the_largest_module(
    dtype: torch.dtype, expected: int
) -> None:
    assert module_layer_bytes(packed_model(dtype)) == expected  # 16 -> 48


def test_module_layers_are_bytes() -> None:
    model = packed_model()
    both = PeftCacheConfig(num_host_module_layer=2048, num_device_module_layer=1472)
    assert cache_budgets(both, model, FREE_BYTES) == (2048 * 256, 1472 * 256)
    host = PeftCacheConfig(num_host_module_layer=3)
    assert cache_budgets(host, model, FREE_BYTES) == (3 * 256, FREE_BYTES // 50)
    device = PeftCacheConfig(num_device_module_layer=3, host_cache_size=999)
    assert cache_budgets(device, model, FREE_BYTES) == (999, 3 * 256)
    none = PeftCacheConfig(
        num_host_module_layer=0, num_device_module_layer=0, device_cache_percent=0.5
    )
    assert cache_budgets(none, model, FREE_BYTES) == (2**30, FREE_BYTES // 2)


def test_a_cache_has_as_many_pages_as_fit_the_module_layers() -> None:
    config = PeftCacheConfig(
        num_host_module_layer=2048, num_device_module_layer=1472, page_size=1000 * 64
    )
    manager = Manager(packed_model(), config)
    assert manager.max_host_pages == 2048 * 256 // 64000 == 8
    assert manager.max_device_pages == 1472 * 256 // 64000 == 5


@pytest.mark.parametrize(
    ("count", "other", "value"),
    [
        ("num_host_module_layer", "host_cache_size", 1024),
        ("num_host_module_layer", "host_cache_size", 2**30),  # the default, but said
        ("num_device_module_layer", "device_cache_size", 1024),
        ("num_device_module_layer", "device_cache_percent", 0.02),
    ],
)
def test_two_sizes_of_one_tier_are_refused(count: str, other: str, value: float) -> None:
    fields: dict[str, Any] = {count: 7, other: value}
    with pytest.raises(ValidationError, match=f"{count} 7 and {other} {value} are both given"):
        PeftCacheConfig(**fields)
    PeftCacheConfig(**(fields | {count: 0}))
    PeftCacheConfig(**{count: 7})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_host_module_layer", -1),
        ("num_device_module_layer", -1),
        ("num_host_module_layer", 1.5),
        ("max_adapter_size", 0),
        ("optimal_adapter_size", 0),
        ("max_pages_per_block_host", 0),
        ("max_pages_per_block_device", -1),
    ],
)
def test_impossible_sizes_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        PeftCacheConfig(**{field: value})


@pytest.mark.parametrize("tier", ["host", "device"])
def test_the_largest_adapter_must_fit_either_tier(tier: str) -> None:
    model = packed_model()
    room = bytes_of_rank(model, 32)
    sizes: dict[str, Any] = {"page_size": 1024, "host_cache_size": 2 * room}
    sizes |= {"device_cache_size": 2 * room, f"{tier}_cache_size": room}
    Manager(model, PeftCacheConfig(**sizes, max_adapter_size=31))
    words = (
        rf"the {tier} cache has {room // 1024} pages of 1 KiB, but an adapter of rank 33 on all "
    )
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        Manager(model, PeftCacheConfig(**sizes, max_adapter_size=33))
    assert f"raise {tier}_cache_size or num_{tier}_module_layer" in str(caught.value)
    Manager(model, PeftCacheConfig(**sizes))  # not asked to check


def test_the_largest_adapter_is_none_over_the_models_maximum_rank() -> None:
    model = packed_model(max_lora_rank=8)
    room = bytes_of_rank(model, 9)
    config = PeftCacheConfig(
        host_cache_size=room, device_cache_size=room, page_size=1024, max_adapter_size=64
    )
    Manager(model, config)
    with pytest.raises(InvalidArgumentError, match="rank 64"):
        Manager(packed_model(max_lora_rank=64), config)


def test_fields_without_effect_have_none() -> None:
    sizes: dict[str, Any] = {"num_host_module_layer": 2048, "num_device_module_layer": 1472}
    plain = Manager(packed_model(), PeftCacheConfig(**sizes))
    tuned = Manager(
        packed_model(),
        PeftCacheConfig(
            **sizes,
            optimal_adapter_size=64,
            max_pages_per_block_host=1,
            max_pages_per_block_device=1,
        ),
    )
    for manager in (plain, tuned):
        assert manager.max_host_pages > manager.max_device_pages > 1
    assert (tuned.page_bytes, tuned.max_part_bytes) == (plain.page_bytes, plain.max_part_bytes)
    assert tuned.max_host_pages == plain.max_host_pages
    assert tuned.max_device_pages == plain.max_device_pages


def test_numbers_of_adapters_override_module_layers() -> None:
    model = packed_model(max_lora_rank=16)
    config = PeftCacheConfig(num_host_module_layer=5000, num_device_module_layer=5000)
    device = with_adapter_counts(config, LoraConfig(max_loras=2), model, free_bytes=FREE_BYTES)
    host, room = cache_budgets(device, model, FREE_BYTES)
    assert host == 5000 * 256
    assert 2 * bytes_of_rank(model, 16) <= room < 5000 * 256
    both = with_adapter_counts(
        config, LoraConfig(max_loras=2, max_cpu_loras=3), model, free_bytes=FREE_BYTES
    )
    assert cache_budgets(both, model, FREE_BYTES) == (room // 2 * 3, room)
