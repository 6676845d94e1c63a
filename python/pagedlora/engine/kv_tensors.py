"""The memory of the paged KV cache: one key and one value tensor per layer.

Which block belongs to whom is not known here; see `pagedlora.kv_cache`.
"""

from __future__ import annotations

import torch

from pagedlora.engine.model_spec import ModelSpec
from pagedlora.errors import InvalidArgumentError


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Size of one KV block over all layers.

    Args:
        spec: The model's layers.
        block_size: Tokens per block.
        dtype: Of keys and values.

    Returns:
        Bytes, keys and values together.
    """
    elements = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in spec.layers)
    return elements * block_size * dtype.itemsize


class KvTensors:
    """Keys and values of `num_blocks` blocks; thread-compatible.

    Attributes:
        keys: Per layer `[num_blocks, block_size, num_kv_heads, key_dim]`, contiguous.
        values: Per layer `[num_blocks, block_size, num_kv_heads, value_dim]`, contiguous.
        num_blocks: Block ids are 0 to this, exclusive.
        block_size: Tokens per block.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        """Reserves the memory; the system commits it as blocks are first written.

        Args:
            spec: The model's layers.
            num_blocks: At least 1.
            block_size: Tokens per block, at least 1.
            dtype: Of keys and values.

        Raises:
            InvalidArgumentError: A size is below 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise InvalidArgumentError(
                f"a KV cache needs at least one block of one token, not {num_blocks} blocks of "
                f"{block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        lead = (num_blocks, block_size)
        self.keys = [
            torch.zeros((*lead, layer.num_kv_heads, layer.key_dim), dtype=dtype)
            for layer in spec.layers
        ]
        self.values = [
            torch.zeros((*lead, layer.num_kv_heads, layer.value_dim), dtype=dtype)
            for layer in spec.layers
        ]
