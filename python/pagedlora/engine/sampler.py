"""Logits into tokens.

A token depends on its own row of logits, the request's parameters, its seed and the token's index
in the answer; never on the batch, nor on how often the request was suspended or recomputed.

Sampling is by inverse CDF: one uniform number from a counter-based generator (Philox, keyed by
the seed, counted by the token index) is looked up in the cumulated probabilities of the kept
tokens. Which tokens `top_k` and `top_p` keep follows a total order: more probable first, lower id
first among equals. The kept ones are cumulated by id, so rounding in the last bits of the logits
moves a boundary by as little, where cumulating by probability could swap two tokens.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedlora.sampling_params import SamplingParams


class TokenChoice(NamedTuple):
    """How one token is to be chosen.

    Attributes:
        params: Of the request; its seed is not None unless it is greedy.
        token_index: Index of the token in the answer, from 0.
        banned: Tokens that must not be chosen.
    """

    params: SamplingParams
    token_index: int
    banned: frozenset[int] = frozenset()


def with_seed(params: SamplingParams) -> SamplingParams:
    """The same parameters with a seed: their own, or one drawn from the system's randomness."""
    if params.greedy or params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(64))


def sample_tokens(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> list[int | None]:
    """Chooses one token per row.

    Args:
        logits: `[len(choices), vocabulary]`, float32, on the CPU; not changed.
        choices: How to choose, row by row.

    Returns:
        Token ids; None where the largest logit of the row is NaN or infinite, which means that
        the weights of the model or of the adapter overflow.
    """
    if not choices:
        return []
    logits = _without_banned(logits, choices)
    largest, tokens = logits.max(dim=-1)
    finite = torch.isfinite(largest).tolist()
    chosen: list[int | None] = [
        token if ok else None for token, ok in zip(tokens.tolist(), finite, strict=True)
    ]
    for row, choice in enumerate(choices):
        if finite[row] and not choice.params.greedy:
            chosen[row] = _sample(logits[row].numpy(), choice)
    return chosen


def top_logprobs(logits: torch.Tensor, token: int, count: int) -> dict[int, float]:
    """Log probabilities of the most probable tokens and of one more.

    Args:
        logits: `[vocabulary]`, float32.
        token: Is among them whatever its probability.
        count: How many of the most probable ones, 0 or more.

    Returns:
        By token, the most probable first; `token` at its place or last.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    values, tokens = logprobs.topk(min(count, logprobs.numel()))
    found = dict(zip(tokens.tolist(), values.tolist(), strict=True))
    found.setdefault(token, float(logprobs[token]))
    return found


def _without_banned(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """The logits, or a copy in which banned tokens have no chance."""
    rows = [row for row, choice in enumerate(choices) if choice.banned]
    if rows:
        logits = logits.clone()
        for row in rows:
            banned = [token for token in choices[row].banned if token < logits.shape[1]]
            if torch.isfinite(logits[row].max()):
                logits[row, banned] = -torch.inf
    return logits


def uniform(seed: int, token_index: int) -> float:
    """The random number of one token, in [0, 1), with 53 bits."""
    raw = int(np.random.Philox(key=seed, counter=token_index).random_raw())
    return (raw >> 11) * 2.0**-53


def _sample(logits: npt.NDArray[np.float32], choice: TokenChoice) -> int:
    """One token by inverse CDF from one row of logits whose largest is finite."""
    params = choice.params
    assert params.seed is not None, "sampling needs a seed: see with_seed"
    kept, weights = _kept_tokens(logits, params)
    cumulated = np.cumsum(weights)
    target = uniform(params.seed, choice.token_index) * cumulated[-1]
    position = int(np.searchsorted(cumulated, target, side="right"))
    # Rounding of the product can reach the total; the last token of positive weight owns it.
    if position == len(cumulated):
        position = int(np.flatnonzero(weights)[-1])
    return position if kept is None else int(kept[position])


def _kept_tokens(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.intp] | None, npt.NDArray[np.float64]]:
    """Tokens that `top_k` and `top_p` keep, by ascending id, and their unnormalised weights.

    The tokens are None if all are kept. The largest weight is 1.
    """
    tokens: npt.NDArray[np.intp] | None = None
    if 0 < params.top_k < len(logits):
        boundary = np.partition(logits, len(logits) - params.top_k)[len(logits) - params.top_k]
        tokens = _first(logits, boundary, params.top_k)
        logits = logits[tokens]
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # at next to no temperature all but the largest are -inf
        scaled /= params.temperature
    weights: npt.NDArray[np.float64] = np.exp(scaled)
    if params.top_p < 1.0:
        descending = np.sort(weights)[::-1]
        reached = np.cumsum(descending)
        count = int(np.searchsorted(reached, params.top_p * reached[-1], side="left")) + 1
        nucleus = _first(weights, descending[count - 1], count)
        tokens = nucleus if tokens is None else tokens[nucleus]
        weights = weights[nucleus]
    return tokens, weights


def _first(
    values: npt.NDArray[np.floating[Any]], boundary: np.floating[Any], count: int
) -> npt.NDArray[np.intp]:
    """Indices, ascending, of the first `count` values in the order (value down, index up).

    Args:
        values: One-dimensional.
        boundary: The `count`-th largest value; of those equal to it the first are taken.
        count: At least 1.
    """
    indices = np.flatnonzero(values >= boundary)
    surplus = len(indices) - count
    if surplus > 0:
        equal = np.flatnonzero(values[indices] == boundary)
        indices = np.delete(indices, equal[-surplus:])
    return indices
