"""In bfloat16 nobody is right to the last bit; we may not be further off than PEFT itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.equality_bench import FAMILIES, make_cases, open_bench
from tests.support.peft_oracle import PeftOracle

MAX_RATIO = 1.1


@pytest.mark.parametrize("family", FAMILIES)
def test_our_error_is_hardly_larger_than_pefts_own(
    family: str, adapters_of: Callable[[str], dict[str, Path]]
) -> None:
    adapters, cases = adapters_of(family), make_cases(family)
    with open_bench(family, adapters, dtype=torch.bfloat16) as bench:
        answers = bench.ask(cases)
    exact = PeftOracle(family, adapters, rounded_to=torch.bfloat16)
    peft = PeftOracle(family, adapters, dtype=torch.bfloat16, rounded_to=torch.bfloat16)
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for case, answer in zip(cases, answers, strict=True):
        right = exact.logits(case, answer.tokens)
        ours.append(relative_error(answer.logits, right))
        theirs.append(relative_error(peft.logits(case, answer.tokens), right))
    our_error, their_error = (float(torch.cat(errors).median()) for errors in (ours, theirs))
    assert 0 < their_error < 0.2
    assert our_error <= MAX_RATIO * their_error


def relative_error(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Root mean square of the error of each row, in standard deviations of the right row."""
    return (logits - right).square().mean(dim=1).sqrt() / right.std(dim=1)
