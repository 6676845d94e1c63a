"""What a user may configure, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from pagedlora.config import (
    KvCacheConfig,
    LoraConfig,
    PeftCacheConfig,
    SchedulerConfig,
    resolve_max_lora_rank,
)
from pagedlora.errors import InvalidArgumentError

ALL = (KvCacheConfig, LoraConfig, PeftCacheConfig, SchedulerConfig)


def test_defaults() -> None:
    assert LoraConfig().max_lora_rank == 64
    assert LoraConfig().lora_target_modules == "all-linear"
    assert PeftCacheConfig().host_cache_size == 2**30
    assert PeftCacheConfig().device_budget_bytes(10_000) == 200
    assert PeftCacheConfig().page_size == "auto"
    assert KvCacheConfig().block_size == 16
    assert SchedulerConfig().enable_chunked_prefill


def test_sizes_are_read_from_strings() -> None:
    config = PeftCacheConfig(
        host_cache_size="256KiB",  # type: ignore[arg-type]
        device_cache_size="1.5 GiB",  # type: ignore[arg-type]
        page_size="64KiB",  # type: ignore[arg-type]
    )
    assert config.host_cache_size == 256 * 1024
    assert config.device_budget_bytes(0) == 3 * 2**29
    assert config.page_size == 65536
    assert KvCacheConfig(size="40MB").size == 40_000_000  # type: ignore[arg-type]
    assert KvCacheConfig(host_size="1KiB").host_size == 1024  # type: ignore[arg-type]


@pytest.mark.parametrize("config_class", ALL)
def test_unknown_fields_are_refused_by_name(config_class: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="policy_of_nobody"):
        config_class(policy_of_nobody=1)


@pytest.mark.parametrize("value", [2, 2.5, 100.0, 1.001, 0, -0.02, float("inf"), float("nan")])
def test_a_percentage_is_told_that_a_fraction_is_needed(value: float) -> None:
    with pytest.raises(ValidationError, match=f"{value:g} is no fraction .* up to 1: 0.02 is 2 %"):
        PeftCacheConfig(device_cache_percent=value)


@pytest.mark.parametrize("value", [1e-9, 0.02, 1.0, 1])
def test_fractions_up_to_all_of_the_memory_are_taken(value: float) -> None:
    assert PeftCacheConfig(device_cache_percent=value).device_cache_percent == value


@pytest.mark.parametrize("value", [True, "0.02", 10**5000], ids=["flag", "text", "endless"])
def test_what_is_no_number_is_no_fraction(value: Any) -> None:
    with pytest.raises(ValidationError, match="device_cache_percent"):
        PeftCacheConfig(device_cache_percent=value)


@pytest.mark.parametrize("config_class", ALL)
def test_configurations_are_immutable(config_class: type[BaseModel]) -> None:
    config = config_class()
    name = next(iter(config_class.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(config, name, None)


@pytest.mark.parametrize(
    ("config_class", "field", "value"),
    [
        (LoraConfig, "max_lora_rank", 0),
        (LoraConfig, "max_lora_rank", True),
        (LoraConfig, "max_loras", 0),
        (LoraConfig, "lora_target_modules", []),
        (LoraConfig, "lora_target_modules", "q_proj"),
        (LoraConfig, "lora_target_modules", [1]),
        (PeftCacheConfig, "host_cache_size", "lots"),
        (PeftCacheConfig, "host_cache_size", 0),
        (PeftCacheConfig, "device_cache_size", -5),
        (PeftCacheConfig, "device_cache_percent", 2.0),
        (PeftCacheConfig, "device_cache_percent", 0.0),
        (PeftCacheConfig, "dtype", "int8"),
        (PeftCacheConfig, "page_size", "huge"),
        (PeftCacheConfig, "eviction_policy", "random"),
        (KvCacheConfig, "num_blocks", 0),
        (KvCacheConfig, "block_size", 0),
        (KvCacheConfig, "size", "1 XB"),
        (KvCacheConfig, "size", 0),
        (KvCacheConfig, "host_blocks", -1),
        (KvCacheConfig, "host_blocks", True),
        (KvCacheConfig, "host_size", "1 XB"),
        (KvCacheConfig, "host_size", -1),
        (SchedulerConfig, "max_batch_size", 0),
        (SchedulerConfig, "max_num_tokens", 1.5),
        (SchedulerConfig, "enable_chunked_prefill", "yes"),
    ],
)
def test_a_bad_value_names_its_field(config_class: type[BaseModel], field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        config_class(**{field: value})


def test_a_bad_size_says_what_is_right() -> None:
    with pytest.raises(ValidationError, match="256KiB"):
        PeftCacheConfig(host_cache_size="4 XB")  # type: ignore[arg-type]


def test_two_device_budgets_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"device_cache_size.*device_cache_percent"):
        PeftCacheConfig(device_cache_size=1024, device_cache_percent=0.5)


def test_two_kv_budgets_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"num_blocks 3 and size 1024"):
        KvCacheConfig(num_blocks=3, size=1024)
    with pytest.raises(ValidationError, match=r"host_blocks 0 and host_size 0"):
        KvCacheConfig(host_blocks=0, host_size=0)
    one_of_each = KvCacheConfig(num_blocks=3, host_size=1024)
    assert (one_of_each.num_blocks, one_of_each.host_size) == (3, 1024)


def test_the_host_must_hold_what_the_device_holds() -> None:
    with pytest.raises(ValidationError, match="max_cpu_loras 2 is less than max_loras 4"):
        LoraConfig(max_loras=4, max_cpu_loras=2)


@pytest.mark.parametrize("names", [("q_proj", "v_proj"), ["q_proj", "v_proj"]])
def test_target_modules_may_be_any_list(names: Any) -> None:
    assert LoraConfig(lora_target_modules=names).lora_target_modules == ["q_proj", "v_proj"]


def test_max_lora_rank_is_the_explicit_one() -> None:
    assert resolve_max_lora_rank(LoraConfig(), PeftCacheConfig()) == 64
    assert resolve_max_lora_rank(LoraConfig(max_lora_rank=16), PeftCacheConfig()) == 16
    assert resolve_max_lora_rank(LoraConfig(), PeftCacheConfig(max_lora_rank=8)) == 8
    both = LoraConfig(max_lora_rank=32), PeftCacheConfig(max_lora_rank=32)
    assert resolve_max_lora_rank(*both) == 32


def test_two_explicit_max_lora_ranks_are_an_error_with_both_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match=r"64.*16"):
        resolve_max_lora_rank(LoraConfig(max_lora_rank=64), PeftCacheConfig(max_lora_rank=16))


def test_a_part_size_needs_a_page_size() -> None:
    with pytest.raises(ValidationError, match="max_part_size 4096 is given without page_size"):
        PeftCacheConfig(max_part_size=4096)
    config = PeftCacheConfig(page_size="64KiB", max_part_size="16KiB")  # type: ignore[arg-type]
    assert config.max_part_bytes == 16384
