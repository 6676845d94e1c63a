"""What callers of `LLM.generate` may pass, brought into one shape."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

from pagedlora.errors import InvalidArgumentError
from pagedlora.shown import counted, shown

Prompt: TypeAlias = str | Sequence[int]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """A list of prompts from one prompt or several.

    Args:
        prompts: A string, a list of token ids, or a list of such. Arrays and tensors of token
            ids count as lists.

    Returns:
        Strings and lists of token ids; empty for an empty list.

    Raises:
        InvalidArgumentError: It is something else; the message has the position.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _as_list(prompts, "prompts")
    if items and all(_is_token(item) for item in items):
        return [[operator.index(item) for item in items]]
    return [_as_prompt(item, position) for position, item in enumerate(items)]


def one_per_prompt(
    value: Any, num_prompts: int, name: str, single_types: tuple[type, ...]
) -> list[Any]:
    """A list with one element per prompt from one element for all or one per prompt.

    Args:
        value: An instance of `single_types`, or a list of them.
        num_prompts: Length of the result.
        name: The argument's name, for messages.
        single_types: What an element may be.

    Raises:
        InvalidArgumentError: The length differs, or an element is something else.
    """
    if isinstance(value, single_types):
        return [value] * num_prompts
    items = _as_list(value, name)
    if len(items) != num_prompts:
        raise InvalidArgumentError(
            f"{counted(num_prompts, 'prompt')} but {counted(len(items), 'element')} in {name}: "
            "give one for all or one per prompt"
        )
    for position, item in enumerate(items):
        if not isinstance(item, single_types):
            names = " or ".join(t.__name__ for t in single_types).replace("NoneType", "None")
            raise InvalidArgumentError(
                f"{name}[{position}] is a {type(item).__name__}: it must be {names}"
            )
    return items


def _as_list(value: Any, name: str) -> list[Any]:
    """`value` as a list: a sequence, an array or a tensor."""
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        try:
            value = tolist()
        except Exception as error:  # whatever a foreign array raises
            raise InvalidArgumentError(
                f"{name} is {shown(value)}, which has no list: {error}"
            ) from error
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidArgumentError(
            f"{name} is {shown(value)}, a {type(value).__name__}: give one or a list"
        )
    return list(value)


def _as_prompt(item: Any, position: int) -> str | list[int]:
    """One prompt of a list."""
    if isinstance(item, str):
        return item
    tokens = _as_list(item, f"prompt {position}")
    if not all(_is_token(token) for token in tokens):
        raise InvalidArgumentError(
            f"prompt {position} is neither a string nor a list of token ids: {shown(item)}"
        )
    return [operator.index(token) for token in tokens]


def _is_token(item: Any) -> bool:
    """Whether the item is an integer of any kind; bools and floats are not."""
    if isinstance(item, (bool, str, list, tuple)):
        return False
    try:
        operator.index(item)
    except Exception:  # what foreign types raise differs
        return False
    return True
