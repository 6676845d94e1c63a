"""The engine with attention in torch, as on a GPU, answers as PEFT does too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.equality_bench import (
    FAMILIES,
    assert_answers_as_peft,
    make_cases,
    open_bench,
)
from tests.support.peft_oracle import PeftOracle, assert_equal_to_peft

from pagedlora.engine import paged_model, torch_attention
from pagedlora.engine.torch_attention import TorchAttention


@pytest.fixture(autouse=True)
def _attention_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_model, "make_backend", TorchAttention)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_answer_as_peft_does(
    family: str,
    adapters_of: Callable[[str], dict[str, Path]],
    oracle_of: Callable[[str], PeftOracle],
) -> None:
    assert_answers_as_peft(family, adapters_of, oracle_of)


def test_a_mask_that_shows_too_much_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    adapters_of: Callable[[str], dict[str, Path]],
    oracle_of: Callable[[str], PeftOracle],
) -> None:
    cases = make_cases("mistral")
    with open_bench("mistral", adapters_of("mistral")) as bench:
        mask = torch_attention._Group.mask
        monkeypatch.setattr(torch_attention._Group, "mask", lambda group, _: mask(group, 0))
        answers = bench.ask(cases)
    with pytest.raises(AssertionError):
        assert_equal_to_peft(oracle_of("mistral"), cases, answers)
