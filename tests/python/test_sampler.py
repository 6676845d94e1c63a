"""Tokens from logits: exact filters, right distribution, no influence of the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlora.engine import sampler
from pagedlora.engine.sampler import TokenChoice, sample_tokens, uniform, with_seed
from pagedlora.sampling_params import SamplingParams


def sample_one(logits: Any, token_index: int = 0, **fields: Any) -> int | None:
    row = torch.as_tensor(logits, dtype=torch.float32).unsqueeze(0)
    return sample_tokens(row, [TokenChoice(SamplingParams(**fields), token_index)])[0]


def kept_by_definition(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Token to probability, written from the definitions, token by token."""
    exact = [float(np.float32(x)) for x in logits]
    order = sorted(range(len(exact)), key=lambda token: (-exact[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = {t: math.exp((exact[t] - max(exact)) / params.temperature) for t in order}
    total = math.fsum(weights.values())
    kept: dict[int, float] = {}
    for token in order:
        if math.fsum(kept.values()) >= params.top_p * total * (1 - 1e-12):
            break
        kept[token] = weights[token]
    kept_total = math.fsum(kept.values())
    return {token: weight / kept_total for token, weight in kept.items()}


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 5003)
    logits[1, [17, 4000]] = 2.0
    logits[2, 5002] = 1.0
    choices = [TokenChoice(SamplingParams(temperature=0), 0)] * 3
    assert sample_tokens(logits, choices) == [0, 17, 5002]


def test_nothing_to_sample() -> None:
    assert sample_tokens(torch.empty(0, 7), []) == []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"top_k": 6, "top_p": 0.8, "temperature": 1.5},
    ],
)
def test_distribution_is_the_exact_one(fields: dict[str, Any]) -> None:
    logits = np.random.default_rng(5).normal(size=12).tolist()
    params = SamplingParams(seed=1234, **fields)
    draws = 4000
    rows = torch.tensor(logits).expand(draws, -1)
    tokens = sample_tokens(rows, [TokenChoice(params, index) for index in range(draws)])
    expected = kept_by_definition(logits, params)
    counts = np.bincount(np.array(tokens), minlength=12)
    assert set(np.flatnonzero(counts)) <= expected.keys()
    for token, probability in expected.items():
        deviation = math.sqrt(draws * probability * (1 - probability))
        assert counts[token] == pytest.approx(draws * probability, abs=5 * deviation + 1e-9)


@settings(deadline=None)
@given(
    st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=1, max_size=30),
    st.integers(0, 12),
    st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_only_kept_tokens_are_drawn_also_among_ties(
    logits: list[float], top_k: int, top_p: float, seed: int
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, seed=seed)
    rows = torch.tensor(logits).expand(20, -1)
    tokens = sample_tokens(rows, [TokenChoice(params, index) for index in range(20)])
    assert set(tokens) <= kept_by_definition(logits, params).keys()


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1.0 - 2.0**-53, 3), (1.0, 3)])
def test_the_ends_of_the_interval_belong_to_possible_tokens(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, token_index: number)
    assert sample_one([-math.inf, 0.0, -math.inf, 0.0, -math.inf], seed=0) == token


def test_large_logits_do_not_overflow() -> None:
    assert {sample_one([5e4, 5e4 - 1, -5e4], index, seed=2) for index in range(100)} == {0, 1}


def test_ties_at_the_boundary_keep_the_lowest_ids() -> None:
    logits = [0.0, 1.0, 0.0, 0.0, 1.0]
    drawn = {sample_one(logits, index, top_k=3, seed=9) for index in range(200)}
    assert drawn == {0, 1, 4}
    drawn = {sample_one([0.0] * 8, index, top_p=0.5, seed=9) for index in range(200)}
    assert drawn == {0, 1, 2, 3}


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 1.0, -math.inf]
    assert {sample_one(logits, index, seed=3) for index in range(300)} == {1, 3}


@pytest.mark.parametrize("seed", range(5))
def test_a_token_depends_on_its_row_seed_and_index_only(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, 200, generator=generator)
    choices = [
        TokenChoice(SamplingParams(seed=row % 4, top_p=0.9, top_k=50 * (row % 2)), row)
        for row in range(8)
    ]
    choices.append(TokenChoice(SamplingParams(temperature=0), 5))
    together = sample_tokens(logits, choices)
    alone = [sample_tokens(logits[i : i + 1], [c])[0] for i, c in enumerate(choices)]
    backwards = sample_tokens(logits.flip(0), choices[::-1])[::-1]
    assert together == alone == backwards


def test_seed_and_index_both_change_the_number() -> None:
    numbers = {uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)}
    assert len(numbers) == 300
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_the_numbers_never_change_between_releases() -> None:
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(42, 7) == 0.4074136540795371
    assert uniform(2**64 - 1, 1000) == 0.5052943502604137


def test_without_a_seed_every_request_draws_its_own() -> None:
    seeds = {with_seed(SamplingParams()).seed for _ in range(50)}
    assert None not in seeds
    assert len(seeds) == 50


def test_a_given_seed_is_kept_and_greedy_needs_none() -> None:
    assert with_seed(SamplingParams(seed=5)).seed == 5
    greedy = SamplingParams(temperature=0)
    assert with_seed(greedy) is greedy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_have_no_token_and_harm_no_other(
    bad: float, temperature: float
) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 60.0
    logits[1, 2] = bad
    choice = TokenChoice(SamplingParams(temperature=temperature, seed=1), 0)
    assert sample_tokens(logits, [choice] * 3) == [4, None, 4]


def test_a_row_without_any_possible_token_has_none() -> None:
    assert sample_one([-math.inf, -math.inf], temperature=0) is None


def test_logits_are_not_changed() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample_tokens(logits, [TokenChoice(SamplingParams(seed=1, top_k=5, top_p=0.5), 0)] * 2)
    assert torch.equal(logits, before)
