"""Sampling parameters are checked when they are made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from pagedlora.errors import InvalidArgumentError
from pagedlora.sampling_params import SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 1.0, 0, 1.0)
    assert params.seed is None
    assert not params.stop_token_ids
    assert not params.ignore_eos
    assert not params.greedy


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.0}, {"top_k": 1}])
def test_greedy(fields: dict[str, Any]) -> None:
    assert SamplingParams(**fields).greedy


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(7)],  # type: ignore[list-item]
    )
    assert params.max_tokens == 3
    assert params.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", "x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        SamplingParams(**{field: value})


def test_parameters_are_immutable_and_comparable() -> None:
    params = SamplingParams(seed=1, stop_token_ids=[1, 2])
    with pytest.raises(FrozenInstanceError):
        params.seed = 2  # type: ignore[misc]
    assert params == SamplingParams(seed=1, stop_token_ids=(1, 2))
    assert hash(params) == hash(SamplingParams(seed=1, stop_token_ids=(1, 2)))
