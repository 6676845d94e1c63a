"""What callers may give as a path."""

from __future__ import annotations

import os

from pagedlora.errors import InvalidArgumentError


def to_path(value: object, name: str) -> str:
    """The path as a string.

    Args:
        value: A string or a path object of one.
        name: What it is called in the error.

    Raises:
        InvalidArgumentError: It is something else.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise InvalidArgumentError(f"{name} is {value!r:.80}: it must be a string or a path object")
    return path


def is_possible_path(path: str) -> bool:
    """Whether the system could have a file of that name; where not, its calls raise ValueError."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
