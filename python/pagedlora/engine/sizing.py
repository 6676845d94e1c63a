"""How much memory the caches of an `LLM` get when the user does not say."""

from __future__ import annotations

from pagedlora import _core
from pagedlora.config import KvCacheConfig, LoraConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.errors import InvalidArgumentError
from pagedlora.sizes import format_size

MAX_DEFAULT_KV_BYTES = 2**30
_DEFAULT_KV_FRACTION = 4
"""By default keys and values take at most the free memory divided by this."""
_DTYPE_BYTES = {_core.Dtype.float32: 4, _core.Dtype.float16: 2, _core.Dtype.bfloat16: 2}


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
        if config.size < block_bytes:
            raise InvalidArgumentError(
                f"KvCacheConfig.size is {format_size(config.size)}, less than one block of "
                f"{config.block_size} tokens ({format_size(block_bytes)}): raise it"
            )
        return config.size // block_bytes
    affordable = min(MAX_DEFAULT_KV_BYTES, free_bytes // _DEFAULT_KV_FRACTION) // block_bytes
    if max_model_tokens is not None:
        per_request = -(-max_model_tokens // config.block_size)
        affordable = min(affordable, per_request * scheduler.max_batch_size)
    return max(affordable, 1)


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
    rows = [(index, model_config.max_lora_rank) for index in range(len(model_config.modules))]
    element_bytes = _DTYPE_BYTES[model_config.dtype]

    def adapter_bytes(params: _core.LayoutParams) -> int:
        pages: int = _core.measure_layout(model_config, rows, params)[0]
        return pages * params.page_bytes

    def sized(num_bytes: int) -> PeftCacheConfig:
        changes: dict[str, int | None] = {}
        if lora.max_loras is not None:
            changes |= {"device_cache_size": lora.max_loras * num_bytes}
            changes |= {"device_cache_percent": None}
        if lora.max_cpu_loras is not None:
            changes |= {"host_cache_size": lora.max_cpu_loras * num_bytes}
        return config.model_copy(update=changes)

    def searched(candidate: PeftCacheConfig) -> _core.LayoutParams:
        device_bytes = candidate.device_budget_bytes(free_bytes)
        return _core.search_layout_params(
            model_config, min(candidate.host_cache_size, device_bytes)
        )

    if config.page_size != "auto":
        return sized(adapter_bytes(_core.LayoutParams(config.page_size, element_bytes)))
    features = sum(module.in_features + module.out_features for module in model_config.modules)
    params = searched(sized(features * model_config.max_lora_rank * element_bytes))
    result = sized(adapter_bytes(params))
    again = searched(result)
    if (again.page_bytes, again.max_part_bytes) == (params.page_bytes, params.max_part_bytes):
        return result
    # The budgets would change the page size that they were computed with: fix it.
    fixed = sized(adapter_bytes(_core.LayoutParams(params.page_bytes, element_bytes)))
    return fixed.model_copy(update={"page_size": params.page_bytes})
