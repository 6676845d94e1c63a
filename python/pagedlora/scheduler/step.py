"""What a scheduler decides, and what it needs to know about adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagedlora.requests import LlmRequest


class PeftManager(Protocol):
    """What the scheduler uses of a `PeftCacheManager`."""

    @property
    def max_device_pages(self) -> int:
        """Pages of the device tier."""

    def determine_num_pages(self, request: LlmRequest, /) -> int:
        """Device pages of the request's adapter."""

    def add_request_peft(self, request: LlmRequest, try_gpu_cache: bool = True, /) -> None:
        """Makes the request an owner of its task, or raises and changes nothing."""

    def mark_request_done(self, request: LlmRequest, /) -> None:
        """Ends the ownership."""


@dataclass(frozen=True)
class PrefillChunk:
    """A piece of a prompt to compute in one step, from `request.num_computed_tokens` on.

    Attributes:
        request: Whose prompt.
        num_tokens: Tokens of the piece.
    """

    request: LlmRequest
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after this piece."""
        done = self.request.num_computed_tokens + self.num_tokens
        return done == self.request.num_prompt_tokens


@dataclass(frozen=True)
class ScheduledStep:
    """What to compute in one step.

    Attributes:
        generation: Requests that compute one token each, in arrival order.
        context: Pieces of prompts, in arrival order.
        failed: Requests that failed in this pass; their resources are released already.
    """

    generation: list[LlmRequest]
    context: list[PrefillChunk]
    failed: list[LlmRequest]
