"""What may come of a call with a wrong argument."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError

from pagedlora import PagedLoraError

MAX_MESSAGE_CHARS = 2000


def check_refusal(name: str, call: Callable[[], object]) -> None:
    """Fails unless the call ends well, or with an error as design 4 says, that prints plainly.

    Args:
        name: Which call, for the message.
        call: Without what it cannot know.
    """
    error = error_of(call)
    if error is None or isinstance(error, ValidationError):
        return
    assert isinstance(error, PagedLoraError), f"{name}: {type(error).__name__}: {error!s:.200}"
    assert str(error).isprintable(), name
    assert len(str(error)) <= MAX_MESSAGE_CHARS, name


def error_of(call: Callable[[], object]) -> Exception | None:
    """What the call raises; None if it does not."""
    try:
        call()
    except Exception as error:
        return error
    return None
