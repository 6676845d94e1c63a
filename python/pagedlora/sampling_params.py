"""How the tokens of a request are chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagedlora.arguments import to_integer, to_number
from pagedlora.errors import InvalidArgumentError
from pagedlora.shown import shown

_MAX_SEED = 2**64 - 1
_MAX_LOGPROBS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when to stop. Immutable.

    Attributes:
        max_tokens: Most tokens to generate, at least 1.
        min_tokens: Tokens before which nothing but `max_tokens` ends the answer: those that would
            end it are not chosen. At most `max_tokens`.
        temperature: Divides the logits; 0 takes the most probable token (greedy).
        top_k: Choose among the `top_k` most probable tokens; 0 or -1 among all.
        top_p: Choose among the fewest most probable tokens whose probabilities (after `top_k`)
            reach `top_p`; 1 among all.
        seed: Same seed, same tokens, whatever else is in the batch. None draws one at random
            for each request.
        stop: A string or strings that end the answer, which is cut before it; needs a tokenizer.
        stop_token_ids: Tokens that end the answer beside the model's own end of sequence.
        ignore_eos: Go on after the model's end of sequence (not after `stop_token_ids`).
        logprobs: Report, for each token, the log probabilities of so many most probable tokens and
            of the one that was chosen, by the model's own logits (before temperature, `top_k` and
            `top_p`); None: do not.

    Raises:
        InvalidArgumentError: A value is out of range; the message names the field.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        values: dict[str, object] = {
            "max_tokens": to_integer(self.max_tokens, "max_tokens", 1),
            "min_tokens": to_integer(self.min_tokens, "min_tokens", 0),
            "temperature": to_number(self.temperature, "temperature"),
            "top_k": to_integer(self.top_k, "top_k"),
            "top_p": to_number(self.top_p, "top_p"),
            "seed": None if self.seed is None else to_integer(self.seed, "seed"),
            "stop": _strings(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "logprobs": None if self.logprobs is None else to_integer(self.logprobs, "logprobs"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"min_tokens is {shown(self.min_tokens)}: it must be from 0 to max_tokens "
                f"{shown(self.max_tokens)}"
            )
        if not 0.0 <= self.temperature < math.inf:
            raise InvalidArgumentError(
                f"temperature is {self.temperature}: it must be 0 (greedy) or a positive number"
            )
        if self.top_k < -1:
            raise InvalidArgumentError(
                f"top_k is {shown(self.top_k)}: it must be at least 1, or 0 or -1 to switch it off"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidArgumentError(
                f"top_p is {self.top_p}: it must be over 0 and at most 1 (1 switches it off)"
            )
        if self.seed is not None and not 0 <= self.seed <= _MAX_SEED:
            raise InvalidArgumentError(
                f"seed is {shown(self.seed)}: it must be from 0 to 2^64 - 1, or None for a random "
                "one"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= _MAX_LOGPROBS:
            raise InvalidArgumentError(
                f"logprobs is {shown(self.logprobs)}: it must be from 0 to {_MAX_LOGPROBS}, or None"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


def _strings(value: object) -> tuple[str, ...]:
    """`value` as a tuple of strings that are not empty."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple, set, frozenset)) or not all(
        isinstance(string, str) and string for string in strings
    ):
        raise InvalidArgumentError(
            f"stop is {shown(value)}: it must be a string, or a list of strings, not empty"
        )
    return tuple(strings)


def _token_ids(value: object) -> tuple[int, ...]:
    """`value` as a tuple of token ids."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidArgumentError(
            f"stop_token_ids is {shown(value)}: it must be a list of token ids"
        )
    return tuple(to_integer(token, "an element of stop_token_ids", 0) for token in value)


def _flag(name: str, value: object) -> bool:
    """`value` as a bool; numpy's passes."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise InvalidArgumentError(f"{name} is {shown(value)}: it must be True or False")
