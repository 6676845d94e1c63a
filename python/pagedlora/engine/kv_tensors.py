"""The memory of the paged KV cache: one key and one value tensor per layer, on device and host.

Which block belongs to whom is not known here; see `pagedlora.kv_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pagedlora.engine.model_spec import ModelSpec
from pagedlora.errors import InvalidArgumentError, OutOfMemoryError


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
    """Keys and values of `num_blocks` blocks, and room for suspended ones; thread-compatible.

    It is the `BlockCopier` of a `KVCacheManager`.

    Attributes:
        keys: Per layer `[num_blocks, block_size, num_kv_heads, key_dim]`, contiguous.
        values: Per layer `[num_blocks, block_size, num_kv_heads, value_dim]`, contiguous.
        host_keys: As `keys`, of `num_host_blocks` blocks; memory of its own also on the CPU.
        host_values: As `values`, likewise.
        device: Where `keys` and `values` lie; the others lie on the CPU, pinned for a GPU.
        dtype: Of all of them.
        num_blocks: Block ids are 0 to this, exclusive.
        num_host_blocks: Host block ids are 0 to this, exclusive.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        num_host_blocks: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserves the memory; the system commits it as blocks are first written.

        Args:
            spec: The model's layers.
            num_blocks: At least 1.
            block_size: Tokens per block, at least 1.
            dtype: Of keys and values.
            num_host_blocks: At least 0.
            device: Where the model computes.

        Raises:
            InvalidArgumentError: A size is below that.
            OutOfMemoryError: There is not as much memory.
        """
        if num_blocks < 1 or block_size < 1:
            raise InvalidArgumentError(
                f"a KV cache needs at least one block of one token, not {num_blocks} blocks of "
                f"{block_size}"
            )
        if num_host_blocks < 0:
            raise InvalidArgumentError(f"num_host_blocks is {num_host_blocks}: give 0 or more")
        self.device = torch.device(device)
        self.dtype = dtype
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.keys, self.values = _key_and_value_tensors(
            spec, (num_blocks, block_size), {"dtype": dtype, "device": self.device}
        )
        self.host_keys, self.host_values = _key_and_value_tensors(
            spec,
            (num_host_blocks, block_size),
            {"dtype": dtype, "pin_memory": self.device.type == "cuda"},
        )
        self._device_tensors = [*self.keys, *self.values]
        self._host_tensors = [*self.host_keys, *self.host_values]

    def copy_to_host(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies the keys and values of device blocks into host blocks, bit for bit.

        Args:
            device_blocks: Read; the n-th goes to the n-th of `host_blocks`.
            host_blocks: Written; no block twice.

        Raises:
            IndexError: There is no such block, or the numbers of blocks differ.
        """
        _copy_blocks(self._device_tensors, device_blocks, self._host_tensors, host_blocks)

    def copy_from_host(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        """Copies the keys and values of host blocks into device blocks, bit for bit.

        Args:
            host_blocks: Read; the n-th goes to the n-th of `device_blocks`.
            device_blocks: Written; no block twice.

        Raises:
            IndexError: There is no such block, or the numbers of blocks differ.
        """
        _copy_blocks(self._host_tensors, host_blocks, self._device_tensors, device_blocks)


def _key_and_value_tensors(
    spec: ModelSpec, lead: tuple[int, int], options: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Zeroed keys and values, one tensor each per layer; `lead` are blocks and tokens per block."""
    shapes_of_keys = [(*lead, layer.num_kv_heads, layer.key_dim) for layer in spec.layers]
    shapes_of_values = [(*lead, layer.num_kv_heads, layer.value_dim) for layer in spec.layers]
    try:
        keys = [torch.zeros(shape, **options) for shape in shapes_of_keys]
        values = [torch.zeros(shape, **options) for shape in shapes_of_values]
    except RuntimeError as error:  # torch has no type of its own for this on the CPU
        elements = sum(map(math.prod, shapes_of_keys + shapes_of_values))
        num_bytes = elements * options["dtype"].itemsize
        tier = "device" if "device" in options else "host"
        fields = "num_blocks or size" if tier == "device" else "host_blocks or host_size"
        raise OutOfMemoryError(
            f"cannot allocate {num_bytes} bytes for the {lead[0]} {tier} blocks of the KV cache; "
            f"lower {fields} of KvCacheConfig or free memory (torch: {error!s:.200})",
            tier=tier,
            bytes=num_bytes,
        ) from error
    return keys, values


_SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy_blocks(
    sources: Sequence[torch.Tensor],
    source_blocks: Sequence[int],
    targets: Sequence[torch.Tensor],
    target_blocks: Sequence[int],
) -> None:
    """Copies rows of each source tensor into rows of the target tensor in the same place.

    Checked here, because a GPU would not survive an index that is out of range.
    """
    if len(source_blocks) != len(target_blocks):
        raise IndexError(f"{len(source_blocks)} blocks cannot go to {len(target_blocks)}")
    for tensors, blocks in ((sources, source_blocks), (targets, target_blocks)):
        num_blocks = tensors[0].shape[0]
        for block in blocks:
            if not 0 <= block < num_blocks:
                raise IndexError(f"there is no block {block} among {num_blocks}")
    from_rows = torch.tensor(source_blocks, dtype=torch.int64).to(sources[0].device)
    to_rows = torch.tensor(target_blocks, dtype=torch.int64).to(targets[0].device)
    for source, target in zip(sources, targets, strict=True):
        # As integers no NaN can lose its payload on the way.
        bits = _SAME_SIZE_INTEGERS[source.dtype.itemsize]
        rows = source.view(bits).index_select(0, from_rows)
        target.view(bits).index_copy_(0, to_rows, rows.to(target.device))
