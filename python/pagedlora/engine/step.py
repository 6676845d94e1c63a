"""What one forward pass computes: which tokens of which requests, in one ragged row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pagedlora.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one request that a step computes.

    Attributes:
        request_id: The request.
        token_ids: The new tokens, at least one; their keys and values enter the cache.
        past_tokens: Tokens whose keys and values are in the cache already; the position of the
            first new token.
        block_table: KV blocks in order; they cover past and new tokens.
        uses_adapter: Whether the lease holds an adapter for the request.
        sample: Whether the logits after the last new token are wanted. False for all chunks of a
            prompt but the last.
    """

    request_id: int
    token_ids: list[int]
    past_tokens: int
    block_table: list[int]
    uses_adapter: bool
    sample: bool


@dataclass(frozen=True)
class StepBatch:
    """The scheduled sequences in row order; everything else about the row follows from it.

    Attributes:
        sequences: At least one, each with at least one new token.

    Raises:
        InvalidArgumentError: There is nothing to compute, or a position is negative.
    """

    sequences: Sequence[ScheduledSequence]

    def __post_init__(self) -> None:
        if not self.sequences:
            raise InvalidArgumentError("a step needs at least one sequence")
        for sequence in self.sequences:
            if not sequence.token_ids:
                raise InvalidArgumentError(f"request {sequence.request_id} has no new tokens")
            if sequence.past_tokens < 0:
                raise InvalidArgumentError(
                    f"request {sequence.request_id} has past_tokens {sequence.past_tokens}"
                )

    @cached_property
    def num_tokens(self) -> int:
        """Length T of the row."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @cached_property
    def num_sampled(self) -> int:
        """Sequences whose logits are wanted."""
        return sum(sequence.sample for sequence in self.sequences)

    @cached_property
    def token_ids(self) -> list[int]:
        """The row, T token ids."""
        return [token for sequence in self.sequences for token in sequence.token_ids]

    @cached_property
    def position_ids(self) -> list[int]:
        """Position of each of the T tokens in its own sequence."""
        return [
            position
            for sequence in self.sequences
            for position in range(
                sequence.past_tokens, sequence.past_tokens + len(sequence.token_ids)
            )
        ]

    @cached_property
    def logits_rows(self) -> list[int]:
        """Rows of the last tokens of the sampled sequences, ascending."""
        rows: list[int] = []
        end = 0
        for sequence in self.sequences:
            end += len(sequence.token_ids)
            if sequence.sample:
                rows.append(end - 1)
        return rows

    @cached_property
    def any_adapter(self) -> bool:
        """Whether any sequence uses an adapter."""
        return any(sequence.uses_adapter for sequence in self.sequences)
