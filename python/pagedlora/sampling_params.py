"""How the tokens of a request are chosen."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from pagedlora.errors import InvalidArgumentError

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
        max_tokens = _integer("max_tokens", self.max_tokens)
        if max_tokens < 1:
            raise InvalidArgumentError(f"max_tokens is {max_tokens}: it must be at least 1")
        if not 0 <= _integer("min_tokens", self.min_tokens) <= max_tokens:
            raise InvalidArgumentError(
                f"min_tokens is {self.min_tokens}: it must be from 0 to max_tokens {max_tokens}"
            )
        temperature = _number("temperature", self.temperature)
        if not 0.0 <= temperature < math.inf:
            raise InvalidArgumentError(
                f"temperature is {temperature}: it must be 0 (greedy) or a positive number"
            )
        top_k = _integer("top_k", self.top_k)
        if top_k < -1:
            raise InvalidArgumentError(
                f"top_k is {top_k}: it must be at least 1, or 0 or -1 to switch it off"
            )
        top_p = _number("top_p", self.top_p)
        if not 0.0 < top_p <= 1.0:
            raise InvalidArgumentError(
                f"top_p is {top_p}: it must be over 0 and at most 1 (1 switches it off)"
            )
        if self.seed is not None and not 0 <= _integer("seed", self.seed) <= _MAX_SEED:
            raise InvalidArgumentError(
                f"seed is {self.seed}: it must be from 0 to 2^64 - 1, or None for a random one"
            )
        if (
            self.logprobs is not None
            and not 0 <= _integer("logprobs", self.logprobs) <= _MAX_LOGPROBS
        ):
            raise InvalidArgumentError(
                f"logprobs is {self.logprobs}: it must be from 0 to {_MAX_LOGPROBS}, or None"
            )
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


def _integer(name: str, value: object) -> int:
    """`value` as an int; numpy integers pass, bools and floats do not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}: it must be an integer") from None


def _number(name: str, value: object) -> float:
    """`value` as a float; NaN and what is not a number is refused."""
    if isinstance(value, (bool, str, bytes)):
        raise InvalidArgumentError(f"{name} is {value!r}: it must be a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"{name} is {value!r}: it must be a number") from None
    if math.isnan(number):
        raise InvalidArgumentError(f"{name} is NaN: it must be a number")
    return number


def _strings(value: object) -> tuple[str, ...]:
    """`value` as a tuple of strings that are not empty."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple, set, frozenset)) or not all(
        isinstance(string, str) and string for string in strings
    ):
        raise InvalidArgumentError(
            f"stop is {value!r:.200}: it must be a string, or a list of strings, not empty"
        )
    return tuple(strings)


def _token_ids(value: object) -> tuple[int, ...]:
    """`value` as a tuple of token ids."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidArgumentError(f"stop_token_ids is {value!r}: it must be a list of token ids")
    ids = tuple(_integer("an element of stop_token_ids", token) for token in value)
    negative = [token for token in ids if token < 0]
    if negative:
        raise InvalidArgumentError(f"stop_token_ids holds {negative[0]}: token ids start at 0")
    return ids
