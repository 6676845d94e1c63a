"""What the capacity scheduler reads of the requests and managers it is given.

Any objects with these attributes do. Attributes that only some requests have are read with a
default: `lora_task_id` (None), `priority` (0; higher goes first), `num_computed_tokens` (0: tokens
whose keys and values are stored), `output_token_ids` (none) and `has_started` (whether it has
computed tokens; one that generates has started in any case).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagedlora.errors import InvalidArgumentError


class CapacityRequest(Protocol):
    """A request; the module names what else is read where it exists."""

    @property
    def request_id(self) -> int:
        """Unique in the list of active requests."""

    @property
    def state(self) -> object:
        """A member of an enum, or a string, whose name is in `PHASES`; upper or lower case."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens; not read without a KV manager."""

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate; not read without a KV manager."""


class BlockManager(Protocol):
    """What is read of a `KVCacheManager`."""

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request owns."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def blocks_needed(self, num_tokens: int, /) -> int:
        """Blocks that hold so many tokens."""

    def block_table(self, request: Any, /) -> Sequence[int]:
        """The request's blocks; empty if it has none."""


class PageManager(Protocol):
    """What is read of a `PeftCacheManager`.

    Where they exist, `max_host_pages` (default: no bound) and `open_lease_tasks()` (default: no
    open leases) are read too.
    """

    @property
    def max_device_pages(self) -> int:
        """Pages of the device tier."""

    def determine_num_pages(self, request: Any, /) -> int:
        """Pages that the request's adapter takes in either tier."""


class Phase(enum.Enum):
    """What a request's state means to admission."""

    PROMPT = enum.auto()
    """It waits, or its prompt is being computed."""
    GENERATION = enum.auto()
    """It has computed its prompt."""
    COMPLETING = enum.auto()
    """Its last token is under way: nothing is left to schedule, but it still holds everything."""
    ENDED = enum.auto()
    """It holds nothing."""


PHASES: Mapping[str, Phase] = {
    "waiting": Phase.PROMPT,
    "suspended": Phase.PROMPT,
    "paused": Phase.PROMPT,
    "context": Phase.PROMPT,
    "context_init": Phase.PROMPT,
    "prefilling": Phase.PROMPT,
    "generation": Phase.GENERATION,
    "generation_in_progress": Phase.GENERATION,
    "decoding": Phase.GENERATION,
    "generation_to_complete": Phase.COMPLETING,
    "generation_complete": Phase.ENDED,
    "finished": Phase.ENDED,
    "failed": Phase.ENDED,
}
"""Names of states, in lower case, that the scheduler knows."""


def phase_of(request: CapacityRequest) -> Phase:
    """The phase of a request.

    Raises:
        InvalidArgumentError: `PHASES` does not have its state.
    """
    state = request.state
    name = str(getattr(state, "name", state)).lower()
    phase = PHASES.get(name)
    if phase is None:
        raise InvalidArgumentError(
            f"request {request.request_id} is in state {state!r}: the scheduler knows the names "
            + ", ".join(PHASES)
        )
    return phase


def task_of(request: CapacityRequest) -> int | None:
    """The task of the request's adapter; None for the base model."""
    task: int | None = getattr(request, "lora_task_id", None)
    return task


@dataclass(eq=False, slots=True)
class Candidate:
    """A request in one pass.

    Attributes:
        request: As given.
        position: In the list of active requests.
        held_blocks: KV blocks that it owns now.
        in_progress: Whether it has started or owns blocks. One that owns blocks counts although
            nothing was computed for it, or requests ahead of it could wait for its blocks for
            ever.
        is_settled: Whether this pass has scheduled, paused or refused it.
    """

    request: CapacityRequest
    position: int
    held_blocks: int
    in_progress: bool
    is_settled: bool = False


def candidate_at(
    position: int, request: CapacityRequest, phase: Phase, kv: BlockManager | None
) -> Candidate:
    """Looks up what a pass needs to know of a request."""
    held = 0 if kv is None else len(kv.block_table(request))
    computed = getattr(request, "num_computed_tokens", 0) > 0
    started = phase is not Phase.PROMPT or bool(getattr(request, "has_started", computed))
    return Candidate(request, position, held, in_progress=started or held > 0)


def tokens_to_completion(request: CapacityRequest) -> int:
    """Tokens of the prompt and the longest answer."""
    return request.num_prompt_tokens + request.max_tokens


def tokens_of_next_step(request: CapacityRequest) -> int:
    """Tokens that are stored once the request's next step is computed.

    That is the prompt with the answer so far, whether the step computes all of it, as after a
    pause that dropped the blocks, or its last token.
    """
    stored = getattr(request, "num_computed_tokens", 0) + 1
    known = request.num_prompt_tokens + len(getattr(request, "output_token_ids", ()))
    return int(max(stored, known))
