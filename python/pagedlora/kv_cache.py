"""Which blocks of the paged KV cache belong to which request. Bookkeeping only: no tensors.

A request owns whole blocks of `block_size` tokens, listed in its block table in token order.
Every block is either free or in exactly one table, and free + used = total, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagedlora.errors import InvalidArgumentError


class HasRequestId(Protocol):
    """Anything that a block table can belong to."""

    @property
    def request_id(self) -> int:
        """Unique among live requests."""


class KVCacheManager:
    """Hands out KV blocks, deterministically and in O(1) per block.

    A fresh manager hands out the lowest numbers first; released blocks are used again first, in
    the order in which their request had them. Not thread-safe.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Starts with all blocks free.

        Args:
            num_blocks: Blocks in all, at least 1.
            block_size: Tokens per block, at least 1.

        Raises:
            InvalidArgumentError: One of them is less than 1.
        """
        if num_blocks < 1 or block_size < 1:
            raise InvalidArgumentError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens holds nothing: "
                "both must be at least 1"
            )
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free: list[int] = []
        self._tables: dict[int, list[int]] = {}
        self.reset()

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request owns."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in block tables."""
        return self._num_blocks - len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def try_allocate(self, request: HasRequestId, num_tokens: int) -> bool:
        """Grows the request's block table to hold `num_tokens` tokens in all.

        A table that already holds them is left as it is: tables never shrink here.

        Returns:
            Whether the table now holds them. If not, nothing was changed.
        """
        table = self._tables.get(request.request_id)
        missing = self.blocks_needed(num_tokens) - (0 if table is None else len(table))
        if missing > len(self._free):
            return False
        if table is None:
            table = self._tables[request.request_id] = []
        if missing > 0:
            taken = self._free[-missing:]
            del self._free[-missing:]
            table.extend(reversed(taken))
        return True

    def block_table(self, request: HasRequestId) -> Sequence[int]:
        """The request's blocks in token order; empty if it has none. A view: do not keep it."""
        return self._tables.get(request.request_id, ())

    def free_resources(self, request: HasRequestId) -> None:
        """Takes all blocks from the request; nothing if it has none."""
        table = self._tables.pop(request.request_id, None)
        if table:
            self._free.extend(reversed(table))

    def reset(self) -> None:
        """Takes all blocks from all requests, in whatever state an interrupt left the lists."""
        self._tables = {}
        self._free = list(range(self._num_blocks - 1, -1, -1))

    def check_invariants(self) -> None:
        """Verifies that every block is free or in one table.

        Raises:
            AssertionError: A block is lost, invented, or in two places.
        """
        blocks = list(self._free)
        for table in self._tables.values():
            blocks.extend(table)
        if sorted(blocks) != list(range(self._num_blocks)):
            raise AssertionError(
                f"{len(self._free)} free and {len(blocks) - len(self._free)} used blocks are not "
                f"each of the {self._num_blocks} blocks once"
            )
