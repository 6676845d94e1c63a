"""How much memory the caches of an `LLM` get when the user does not say."""

from __future__ import annotations

from pagedlora import _core
from pagedlora.cache_budgets import ELEMENT_BYTES, cache_budgets, pages_of_rank
from pagedlora.config import KvCacheConfig, LoraConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.errors import InvalidArgumentError
from pagedlora.sizes import format_size

MAX_DEFAULT_KV_BYTES = 2**30
_DEFAULT_KV_FRACTION = 4
"""By default keys and values take at most the free memory divided by this."""


def num_kv_blocks(
    config: KvCacheConfig,
    scheduler: SchedulerConfig,
    *,
    block_bytes: int,
    max_model_tokens: int | None,
    free_bytes: int,
) -> int:
    """Blocks of the KV cache.

    Args:
        config: Its `num_blocks` or `size` decides, if given.
        scheduler: Its batch size bounds what can be used by default.
        block_bytes: Bytes of a block over all layers.
        max_model_tokens: Longest sequence; None if the model does not say.
        free_bytes: Memory that is free now.

    Returns:
        At least 1.

    Raises:
        InvalidArgumentError: `size` is less than one block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.size is not None:
        return _blocks_of_size("size", config.size, config, block_bytes)
    affordable = min(MAX_DEFAULT_KV_BYTES, free_bytes // _DEFAULT_KV_FRACTION) // block_bytes
    if max_model_tokens is not None:
        per_request = -(-max_model_tokens // config.block_size)
        affordable = min(affordable, per_request * scheduler.max_batch_size)
    return max(affordable, 1)


def num_host_kv_blocks(config: KvCacheConfig, *, block_bytes: int) -> int:
    """Blocks of the host pool, for suspended requests.

    Args:
        config: Its `host_blocks` or `host_size` decides.
        block_bytes: Bytes of a block over all layers.

    Returns:
        At least 0; 0 if neither is given.

    Raises:
        InvalidArgumentError: `host_size` is less than one block, and not 0.
    """
    if config.host_blocks is not None:
        return config.host_blocks
    if not config.host_size:
        return 0
    return _blocks_of_size("host_size", config.host_size, config, block_bytes)


def _blocks_of_size(field: str, size: int, config: KvCacheConfig, block_bytes: int) -> int:
    """Whole blocks in `size` bytes, the value of the field; an error if there is none."""
    if size < block_bytes:
        raise InvalidArgumentError(
            f"KvCacheConfig.{field} is {format_size(size)}, less than one block of "
            f"{config.block_size} tokens ({format_size(block_bytes)}): raise it"
        )
    return size // block_bytes


def with_adapter_counts(
    config: PeftCacheConfig,
    lora: LoraConfig,
    model_config: _core.LoraModelConfig,
    *,
    free_bytes: int,
) -> PeftCacheConfig:
    """The cache configuration with the budgets that `max_loras` and `max_cpu_loras` mean.

    Args:
        config: Its budgets stay where no number of adapters is given.
        lora: Numbers of adapters of the maximum rank on all target modules.
        model_config: The modules, the maximum rank and the dtype.
        free_bytes: Memory that is free now.

    Returns:
        Budgets of exactly so many adapters' pages.
    """
    if lora.max_loras is None and lora.max_cpu_loras is None:
        return config
    element_bytes = ELEMENT_BYTES[model_config.dtype]
    if config.page_size != "auto":
        params = _core.LayoutParams(config.page_size, element_bytes, config.max_part_bytes)
        return _with_budgets(config, lora, _largest_adapter_bytes(model_config, params))
    # The page size follows from the budgets and the budgets from the page size: guess, then look.
    features = sum(module.in_features + module.out_features for module in model_config.modules)
    guess = _with_budgets(config, lora, features * model_config.max_lora_rank * element_bytes)
    params = _searched_params(guess, model_config, free_bytes)
    result = _with_budgets(config, lora, _largest_adapter_bytes(model_config, params))
    again = _searched_params(result, model_config, free_bytes)
    if (again.page_bytes, again.max_part_bytes) == (params.page_bytes, params.max_part_bytes):
        return result
    # The budgets would change the sizes that they were computed with: fix them.
    return result.model_copy(
        update={"page_size": params.page_bytes, "max_part_size": params.max_part_bytes}
    )


def _largest_adapter_bytes(model_config: _core.LoraModelConfig, params: _core.LayoutParams) -> int:
    """Bytes of the pages of an adapter of the maximum rank on all target modules."""
    return pages_of_rank(model_config, model_config.max_lora_rank, params) * params.page_bytes


def _with_budgets(config: PeftCacheConfig, lora: LoraConfig, num_bytes: int) -> PeftCacheConfig:
    """The configuration with room for as many adapters of `num_bytes` as `lora` says."""
    changes: dict[str, int | None] = {}
    if lora.max_loras is not None:
        changes |= {
            "device_cache_size": lora.max_loras * num_bytes,
            "device_cache_percent": None,
            "num_device_module_layer": 0,
        }
    if lora.max_cpu_loras is not None:
        changes |= {
            "host_cache_size": lora.max_cpu_loras * num_bytes,
            "num_host_module_layer": 0,
        }
    return config.model_copy(update=changes)


def _searched_params(
    config: PeftCacheConfig, model_config: _core.LoraModelConfig, free_bytes: int
) -> _core.LayoutParams:
    """The page and part sizes that a cache of these budgets would choose."""
    budgets = cache_budgets(config, model_config, free_bytes)
    return _core.search_layout_params(model_config, min(budgets))
