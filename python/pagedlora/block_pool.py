"""Which blocks of one memory are free. Numbers only: the memory is the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Hands out blocks 0 to `num_blocks`, exclusive, deterministically, in O(1) per block.

    A fresh pool hands out the lowest numbers first; released blocks are used again first, in the
    order in which their holder had them. Not thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        """Starts with all blocks free.

        Args:
            num_blocks: Blocks in all; may be 0.
        """
        self._num_blocks = num_blocks
        self._free: list[int] = []
        self.reset()

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self._num_blocks - len(self._free)

    def peek(self, count: int) -> list[int]:
        """The blocks that `take(count)` would give, which stay free.

        Args:
            count: At least 0 and at most `num_free`.
        """
        return self._free[: -count - 1 : -1]

    def take(self, count: int) -> list[int]:
        """Gives out blocks.

        Args:
            count: At least 0 and at most `num_free`.
        """
        taken = self.peek(count)
        del self._free[len(self._free) - count :]
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Takes back blocks that were given out, each once."""
        self._free.extend(reversed(blocks))

    def reset(self) -> None:
        """Takes back all blocks, in whatever state an interrupt left the list."""
        self._free = list(range(self._num_blocks - 1, -1, -1))

    def check(self, held: Iterable[int], name: str) -> None:
        """Verifies that every block is free or held, once.

        Args:
            held: All blocks that anybody holds.
            name: What the blocks are, for the error.

        Raises:
            AssertionError: A block is lost, invented, or in two places.
        """
        blocks = [*self._free, *held]
        if sorted(blocks) != list(range(self._num_blocks)):
            raise AssertionError(
                f"{len(self._free)} free and {len(blocks) - len(self._free)} held {name} blocks "
                f"are not each of the {self._num_blocks} blocks once"
            )
