"""What `generate` takes as prompts, parameters and adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedlora.engine.prompts import as_prompt_list, one_per_prompt
from pagedlora.errors import InvalidArgumentError
from pagedlora.requests import LoRARequest

LORA_TYPES = (LoRARequest, str, type(None))


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hello", ["hello"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2), [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([[]], [[]]),
        ([], []),
        ([np.int64(4)], [[4]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([torch.tensor([1, 2])], [[1, 2]]),
    ],
)
def test_prompts_become_a_list(prompts: Any, expected: list[Any]) -> None:
    assert as_prompt_list(prompts) == expected


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, b"x", [1.5], [[1.5]], [None], [[True]]])
def test_other_prompts_are_refused(prompts: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt"):
        as_prompt_list(prompts)


def test_one_value_serves_all_prompts() -> None:
    assert one_per_prompt("a", 3, "lora_request", LORA_TYPES) == ["a", "a", "a"]
    assert one_per_prompt(None, 2, "lora_request", LORA_TYPES) == [None, None]


def test_a_list_gives_one_value_per_prompt() -> None:
    loras = [None, "a", LoRARequest("b")]
    assert one_per_prompt(loras, 3, "lora_request", LORA_TYPES) == loras


def test_a_list_of_another_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match="3 prompts but 2 elements in lora_request"):
        one_per_prompt(["a", "b"], 3, "lora_request", LORA_TYPES)


def test_an_element_of_another_type_is_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"lora_request\[1\] is a int: .*LoRARequest or str or None"
    ):
        one_per_prompt(["a", 5], 2, "lora_request", LORA_TYPES)
