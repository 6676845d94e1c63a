"""In bfloat16 nobody is right to the last bit; we may not be further off than PEFT itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.equality_bench import FAMILIES, make_cases, open_bench
from tests.support.peft_oracle import assert_rounding_like_peft


@pytest.mark.parametrize("family", FAMILIES)
def test_our_error_is_hardly_larger_than_pefts_own(
    family: str, adapters_of: Callable[[str], dict[str, Path]]
) -> None:
    adapters, cases = adapters_of(family), make_cases(family)
    with open_bench(family, adapters, dtype=torch.bfloat16) as bench:
        answers = bench.ask(cases)
    assert_rounding_like_peft(family, adapters, cases, answers)
