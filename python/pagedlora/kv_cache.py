"""Which blocks of the paged KV cache belong to which request. Bookkeeping only: no tensors.

A request owns whole blocks of `block_size` tokens, listed in its block table in token order. They
lie on the device, where steps read and write them. A second, bounded pool of blocks lies on the
host: a request that is suspended there gives up its device blocks and loses nothing.

What a request holds is its state; nothing else is remembered about it:

- none: nothing.
- allocated: device blocks.
- suspended: host blocks, with the content that its device blocks had.
- resuming: both. The host blocks stay until the resume is confirmed, so that it can be taken back
  without a copy when something else that the request needs is not to be had.

| state     | try_allocate | suspend_request | confirm_resume | free_resources |
|-----------|--------------|-----------------|----------------|----------------|
| none      | allocated    | none            | none           | none           |
| allocated | allocated    | suspended       | allocated      | none           |
| suspended | resuming     | suspended       | suspended      | none           |
| resuming  | resuming     | suspended       | allocated      | none           |

Two calls may refuse, return False and change nothing: `try_allocate` when too few device blocks are
free, and `suspend_request` of an allocated request when too few host blocks are. Blocks are copied
in two transitions only: allocated to suspended, and suspended to resuming.

Always: free + used device blocks = `num_blocks`, free + suspended host blocks = `num_host_blocks`,
and every block is free or held by one request, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedlora.arguments import id_of, refuse_request, to_integer
from pagedlora.block_pool import BlockPool

_MAX_BLOCKS = 2**31 - 1


class HasRequestId(Protocol):
    """Anything that a block table can belong to."""

    @property
    def request_id(self) -> int:
        """Unique among live requests."""


class BlockCopier(Protocol):
    """Moves the content of whole blocks between the device and the host, bit for bit.

    The n-th block of one list goes to the n-th of the other; lists are equally long, not empty, and
    belong to the call only. When a call returns, its source may be overwritten and its destination
    read. When it raises, the source is as it was, and the destination, which is nobody's yet, may
    hold anything.
    """

    def copy_to_host(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copies device blocks into host blocks."""

    def copy_from_host(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        """Copies host blocks into device blocks."""


@dataclass(slots=True)
class _Holding:
    """The blocks of one request in token order. A holding of nothing is not kept.

    With both, `host` has the content of the first `len(host)` blocks of `device`, as it was when
    the request was suspended.
    """

    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class KVCacheManager:
    """Hands out KV blocks, deterministically and in O(1) per block.

    A fresh manager hands out the lowest numbers first; released blocks are used again first, in
    the order in which their request had them. Not thread-safe. Calls block for as long as the
    copier does.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        copier: BlockCopier | None = None,
    ) -> None:
        """Starts with all blocks free.

        Args:
            num_blocks: Device blocks in all, at least 1.
            block_size: Tokens per block, at least 1.
            num_host_blocks: Host blocks in all. With 0, no request that has blocks can be
                suspended.
            copier: Copies the blocks' content. None: it is left to the caller.

        Raises:
            InvalidArgumentError: A number is less than that, or none.
        """
        num_blocks = to_integer(num_blocks, "num_blocks", 1, _MAX_BLOCKS)
        block_size = to_integer(block_size, "block_size", 1)
        num_host_blocks = to_integer(num_host_blocks, "num_host_blocks", 0, _MAX_BLOCKS)
        self._block_size = block_size
        self._device = BlockPool(num_blocks)
        self._host = BlockPool(num_host_blocks)
        self._copier = copier
        self._held: dict[int, _Holding] = {}

    @property
    def num_blocks(self) -> int:
        """Device blocks in all."""
        return self._device.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that no request owns."""
        return self._device.num_free

    @property
    def num_used_blocks(self) -> int:
        """Device blocks in block tables."""
        return self._device.num_used

    @property
    def num_host_blocks(self) -> int:
        """Host blocks in all."""
        return self._host.num_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that no request owns."""
        return self._host.num_free

    @property
    def num_suspended_blocks(self) -> int:
        """Host blocks of suspended and resuming requests."""
        return self._host.num_used

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        if type(num_tokens) is not int:
            num_tokens = to_integer(num_tokens, "num_tokens")
        return -(-num_tokens // self._block_size)

    def try_allocate(self, request: HasRequestId, num_tokens: int) -> bool:
        """Grows the request's block table to hold `num_tokens` tokens in all.

        A table that already holds them is left as it is: tables never shrink here. A suspended
        request gets back at least as many blocks as it had, with their content, and is resuming
        until `confirm_resume`.

        Returns:
            Whether the table now holds them. If not, nothing was changed.

        Raises:
            Exception: What the copier raised; nothing was changed.
        """
        try:
            held = self._held.get(request.request_id)
        except (AttributeError, TypeError) as error:
            refuse_request(request, error, ("request_id",))
        if held is None:
            held = _Holding()
        # A resuming table is never shorter than its host blocks, so only suspended ones gain here.
        missing = max(self.blocks_needed(num_tokens), len(held.host)) - len(held.device)
        if missing <= 0:
            return True
        if missing > self._device.num_free:
            return False
        if held.host and not held.device and self._copier is not None:
            target = self._device.peek(len(held.host))
            self._copier.copy_from_host(list(held.host), target)
        held.device.extend(self._device.take(missing))
        self._held[request.request_id] = held
        return True

    def confirm_resume(self, request: HasRequestId) -> None:
        """Releases the host blocks of a resuming request; nothing for any other.

        From here on the device blocks are the only copy. Call it before anything is computed for
        the request, and once nothing can take the resume back.
        """
        held = self._held.get(id_of(request))
        if held is not None and held.device and held.host:
            blocks, held.host = held.host, []
            self._host.release(blocks)

    def suspend_request(self, request: HasRequestId) -> bool:
        """Moves the request's blocks to the host and frees its device blocks.

        A resuming request is suspended again without a copy, and always can be: it keeps the host
        blocks that it still has. What it was given since it began to resume, blocks that
        `try_allocate` added and anything that was written, is dropped.

        Returns:
            Whether the request holds no device blocks now. That is True at once for one that held
            none: a suspended one, or one without any blocks, which is *not* suspended then. False:
            there are too few free host blocks, and nothing was changed.

        Raises:
            Exception: What the copier raised; nothing was changed.
        """
        held = self._held.get(id_of(request))
        if held is None or not held.device:
            return True
        if not held.host:
            count = len(held.device)
            if count > self._host.num_free:
                return False
            if self._copier is not None:
                self._copier.copy_to_host(list(held.device), self._host.peek(count))
            held.host = self._host.take(count)
        blocks, held.device = held.device, []
        self._device.release(blocks)
        return True

    def is_suspended(self, request: HasRequestId) -> bool:
        """Whether the request has blocks, all of them on the host. Not while it is resuming."""
        held = self._held.get(id_of(request))
        return held is not None and not held.device

    def block_table(self, request: HasRequestId) -> Sequence[int]:
        """The request's device blocks in token order; empty if it has none, as when suspended.

        A view: do not keep it.
        """
        try:
            held = self._held.get(request.request_id)
        except (AttributeError, TypeError) as error:
            refuse_request(request, error, ("request_id",))
        return () if held is None else held.device

    def host_block_table(self, request: HasRequestId) -> Sequence[int]:
        """The request's host blocks in token order; empty if it is not suspended or resuming.

        A view: do not keep it.
        """
        held = self._held.get(id_of(request))
        return () if held is None else held.host

    def free_resources(self, request: HasRequestId) -> None:
        """Takes all blocks from the request, on device and host; nothing if it has none."""
        held = self._held.pop(id_of(request), None)
        if held is not None:
            self._device.release(held.device)
            self._host.release(held.host)

    def reset(self) -> None:
        """Takes all blocks from all requests, in whatever state an interrupt left the lists."""
        self._held = {}
        self._device.reset()
        self._host.reset()

    def check_invariants(self) -> None:
        """Verifies that every block is free or in one place, and that the states are those above.

        Raises:
            AssertionError: A block is lost, invented, or in two places; a request without blocks
                is remembered; or a resuming one has fewer device blocks than host blocks.
        """
        holdings = self._held.values()
        self._device.check((block for held in holdings for block in held.device), "device")
        self._host.check((block for held in holdings for block in held.host), "host")
        for request_id, held in self._held.items():
            if not held.device and not held.host:
                raise AssertionError(f"request {request_id} is remembered without any block")
            if 0 < len(held.device) < len(held.host):
                raise AssertionError(
                    f"request {request_id} is resuming with {len(held.device)} device blocks for "
                    f"{len(held.host)} host blocks"
                )
