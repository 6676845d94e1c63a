"""What the schedulers read of requests and managers, and what they answer.

Everything is duck-typed: any objects with these attributes will do, of this package or of another
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedlora.errors import PagedLoraError


class SchedulableRequest(Protocol):
    """What a scheduler reads of a request."""

    @property
    def request_id(self) -> int:
        """Unique among live requests."""

    @property
    def lora_task_id(self) -> int | None:
        """The task of its adapter; None for the base model."""

    @property
    def priority(self) -> int:
        """Higher runs first."""

    @property
    def num_context_tokens(self) -> int:
        """Tokens to compute before it generates.

        Its prompt, and what it had generated when it lost its keys and values.
        """

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are stored."""

    @property
    def max_total_tokens(self) -> int:
        """Prompt and the longest possible answer together."""

    @property
    def has_started(self) -> bool:
        """Whether anything was ever computed for it."""


class KvManager(Protocol):
    """What a scheduler uses of a `KVCacheManager`."""

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request owns."""

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks of the host pool that no request owns."""

    def blocks_needed(self, num_tokens: int, /) -> int:
        """Blocks that hold so many tokens."""

    def block_table(self, request: Any, /) -> Sequence[int]:
        """The request's blocks on the device."""

    def host_block_table(self, request: Any, /) -> Sequence[int]:
        """The request's blocks in the host pool."""

    def try_allocate(self, request: Any, num_tokens: int, /) -> bool:
        """Grows the request's blocks, or brings them back first; False changes nothing."""

    def is_suspended(self, request: Any, /) -> bool:
        """Whether its blocks are in the host pool."""

    def suspend_request(self, request: Any, /) -> bool:
        """Moves its blocks to the host pool; False, and nothing changed, if that is too full."""

    def confirm_resume(self, request: Any, /) -> None:
        """Releases the host blocks of a request that was brought back."""

    def free_resources(self, request: Any, /) -> None:
        """Drops its blocks wherever they are."""


class PeftManager(Protocol):
    """What a scheduler uses of a `PeftCacheManager`."""

    @property
    def max_device_pages(self) -> int:
        """Pages of the device tier."""

    def determine_num_pages(self, request: Any, /) -> int:
        """Pages of the request's adapter."""

    def add_request_peft(self, request: Any, try_gpu_cache: bool = True, /) -> None:
        """Makes the request an owner of its task, or raises and changes nothing."""

    def mark_request_done(self, request: Any, pause: bool = False, /) -> None:
        """Ends the ownership, or pauses it."""

    def adapter_state(self, request: Any, /) -> str:
        """Says "waiting", "loading", "ready" or "failed"."""

    def open_lease_tasks(self) -> set[int]:
        """Tasks whose device pages open leases hold."""


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A piece of a request's context to compute in one step, from `num_computed_tokens` on.

    Attributes:
        request: Whose context.
        num_tokens: Tokens of the piece.
    """

    request: Any
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the context is complete after this piece."""
        request = self.request
        return bool(request.num_computed_tokens + self.num_tokens == request.num_context_tokens)


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes, and who had to give way.

    Attributes:
        generation: Requests that compute one token each; those of one adapter stand together.
        context: Pieces of contexts; those of one adapter stand together.
        suspended: Requests whose keys and values are in the host pool now. Nothing is to be done.
        recompute_paused: Requests that lost their keys and values and must compute their prompt and
            what they generated again: the caller sets `num_computed_tokens` to 0 and
            `num_context_tokens` to all of it.
        failed: Requests that cannot go on, and why: the caller gives back what they hold.
    """

    generation: list[Any] = field(default_factory=list)
    context: list[ContextChunk] = field(default_factory=list)
    suspended: list[Any] = field(default_factory=list)
    recompute_paused: list[Any] = field(default_factory=list)
    failed: list[tuple[Any, PagedLoraError]] = field(default_factory=list)
