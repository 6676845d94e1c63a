"""From a cache configuration to bytes and pages of the two tiers, for one model."""

from __future__ import annotations

from typing import NamedTuple

from pagedlora import _core
from pagedlora.config import PeftCacheConfig
from pagedlora.errors import InvalidArgumentError
from pagedlora.sharding import sharding_of
from pagedlora.shown import counted
from pagedlora.sizes import format_size

ELEMENT_BYTES = {_core.Dtype.float32: 4, _core.Dtype.float16: 2, _core.Dtype.bfloat16: 2}


_MAX_BYTES = 2**60


class CacheBudgets(NamedTuple):
    """Budgets in bytes; page counts round down to them.

    Attributes:
        host_bytes: Of the host tier.
        device_bytes: Of the device tier.
    """

    host_bytes: int
    device_bytes: int


def cache_budgets(
    config: PeftCacheConfig, model_config: _core.LoraModelConfig, free_bytes: int
) -> CacheBudgets:
    """The budgets of both tiers.

    Args:
        config: Its sizes in bytes, as a fraction, or in module layers.
        model_config: A module layer is one rank of its largest module, in its dtype.
        free_bytes: Memory of the device that is free at construction.

    Raises:
        InvalidArgumentError: The model is that of a tensor parallel rank, and the device tier would
            be a fraction of the free memory; or a tier would be larger than any memory.
    """
    _check_same_on_all_ranks(config, model_config)
    host = config.host_cache_size
    if config.num_host_module_layer:
        host = config.num_host_module_layer * module_layer_bytes(model_config)
    device = config.device_budget_bytes(free_bytes)
    if config.num_device_module_layer:
        device = config.num_device_module_layer * module_layer_bytes(model_config)
    for tier, num_bytes in (("host", host), ("device", device)):
        if num_bytes > _MAX_BYTES:
            raise InvalidArgumentError(
                f"the {tier} cache would have {num_bytes} bytes, over the limit of {_MAX_BYTES}: "
                "give fewer module layers or adapters"
            )
    return CacheBudgets(host, device)


def _check_same_on_all_ranks(config: PeftCacheConfig, model_config: _core.LoraModelConfig) -> None:
    """Free memory differs by rank, and with it the number of pages, and what is evicted."""
    sharding = sharding_of(model_config)
    is_fraction = config.device_cache_size is None and not config.num_device_module_layer
    if sharding is not None and sharding.parallel.tp_size > 1 and is_fraction:
        raise InvalidArgumentError(
            f"with tp_size {sharding.parallel.tp_size} the device cache cannot be a fraction of "
            "the free memory, which differs by rank: give device_cache_size"
        )


def module_layer_bytes(model_config: _core.LoraModelConfig) -> int:
    """Bytes of one rank of the model's largest module: a column of B and a row of A."""
    largest = max(module.in_features + module.out_features for module in model_config.modules)
    return largest * ELEMENT_BYTES[model_config.dtype]


def pages_of_rank(
    model_config: _core.LoraModelConfig, rank: int, params: _core.LayoutParams
) -> int:
    """Pages of an adapter of one rank on all modules of the model."""
    rows = [(index, rank) for index in range(len(model_config.modules))]
    pages, _ = _core.measure_layout(model_config, rows, params)
    return pages


def check_max_adapter(
    config: PeftCacheConfig, model_config: _core.LoraModelConfig, core: _core.PeftCacheManager
) -> None:
    """Checks that either tier has room for the largest adapter that the configuration names.

    Args:
        config: Its `max_adapter_size`; nothing is checked if it is None.
        model_config: The modules; its `max_lora_rank` bounds the rank.
        core: Its pages.

    Raises:
        InvalidArgumentError: A tier has too few pages, with both numbers.
    """
    if config.max_adapter_size is None:
        return
    rank = min(config.max_adapter_size, model_config.max_lora_rank)
    params = core.layout_params
    needed = pages_of_rank(model_config, rank, params)
    for tier in ("host", "device"):
        pages = core.max_pages(tier)
        if pages < needed:
            raise InvalidArgumentError(
                f"the {tier} cache has {pages} pages of {format_size(params.page_bytes)}, but an "
                f"adapter of rank {rank} on all {counted(len(model_config.modules), 'module')} "
                f"takes {needed} ({format_size(needed * params.page_bytes)}): raise "
                f"{tier}_cache_size or num_{tier}_module_layer, or lower max_adapter_size"
            )


def check_agreement(config: PeftCacheConfig, model_config: _core.LoraModelConfig) -> None:
    """Refuses another dtype or rank than the model configuration's, which would go unheard.

    Raises:
        InvalidArgumentError: Names the field and both values.
    """
    for field, wanted, actual in (
        ("dtype", config.dtype, model_config.dtype.name),
        ("max_lora_rank", config.max_lora_rank, model_config.max_lora_rank),
    ):
        if wanted not in ("auto", None, actual):
            raise InvalidArgumentError(
                f"PeftCacheConfig.{field} is {wanted}, but the model configuration's is {actual}: "
                "give the same to both, or leave it out of PeftCacheConfig"
            )
