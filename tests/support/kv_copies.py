"""A block copier whose blocks hold one value each, so that a test can read what is where."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class RecordingCopier:
    """Device and host blocks as lists of values, and the copies made so far.

    Attributes:
        device: Value of each device block; None if nobody wrote it.
        host: Value of each host block.
        copies: Direction, source blocks and destination blocks of every copy, failed ones too.
        fail_after: None: copies succeed. n: the next copy raises after n blocks, then None again.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.device: list[object] = [None] * num_blocks
        self.host: list[object] = [None] * num_host_blocks
        self.copies: list[tuple[str, list[int], list[int]]] = []
        self.fail_after: int | None = None
        self.on_copy: Callable[[], None] = lambda: None

    def copy_to_host(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy("to host", self.device, device_blocks, self.host, host_blocks)

    def copy_from_host(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        self._copy("from host", self.host, host_blocks, self.device, device_blocks)

    def _copy(
        self,
        direction: str,
        source: list[object],
        source_blocks: Sequence[int],
        target: list[object],
        target_blocks: Sequence[int],
    ) -> None:
        assert source_blocks
        assert len(source_blocks) == len(target_blocks)
        self.copies.append((direction, list(source_blocks), list(target_blocks)))
        self.on_copy()
        limit, self.fail_after = self.fail_after, None
        for count, (from_block, to_block) in enumerate(
            zip(source_blocks, target_blocks, strict=True)
        ):
            if count == limit:
                raise CopyFailedError
            target[to_block] = source[from_block]
        if limit is not None:
            raise CopyFailedError


class CopyFailedError(RuntimeError):
    """What a copy raises that was told to fail."""
