"""Checks of what callers pass: a wrong type or range is named with its value and what would do."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

from pydantic import BaseModel

from pagedlora.errors import InvalidArgumentError
from pagedlora.shown import shown

MAX_ID = 2**64 - 1
"""Of requests and tasks."""
MAX_WAIT_S = 1e9
"""Longer waits are as long: no clock's sum overflows with it."""

_REQUEST_ATTRIBUTES = ("request_id", "lora_task_id", "lora_weights")

ConfigT = TypeVar("ConfigT", bound=BaseModel)
ValueT = TypeVar("ValueT")


def to_config(cls: type[ConfigT], value: object, name: str) -> ConfigT:
    """A configuration from one, or from its fields by name.

    Args:
        cls: What it must be.
        value: One of these, a mapping of its fields, or None for the defaults.
        name: The argument's name, for the message.

    Raises:
        InvalidArgumentError: It is something else.
        ValidationError: Of pydantic: a field is unknown, or has an impossible value.
    """
    if value is None:
        return cls()
    if isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        return cls.model_validate(dict(value))
    raise InvalidArgumentError(
        f"{name} is {shown(value)}: it must be a {cls.__name__}, a mapping of its fields, or None"
    )


def check_type(value: object, cls: type[ValueT], name: str, way_out: str = "") -> ValueT:
    """The value, if it is one of that class.

    Raises:
        InvalidArgumentError: It is something else.
    """
    if isinstance(value, cls):
        return value
    raise InvalidArgumentError(
        f"{name} is {shown(value)}: it must be a {cls.__name__}{way_out and '; ' + way_out}"
    )


def check_choice(value: object, choices: Sequence[str], name: str) -> None:
    """Refuses what is none of some words.

    Raises:
        InvalidArgumentError: Names them all.
    """
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgumentError(
            f"{name} is {shown(value)}: it must be one of {', '.join(choices)}"
        )


def check_mapping(value: object, name: str, way_out: str) -> None:
    """Refuses what is no mapping, or has keys that are no strings.

    Raises:
        InvalidArgumentError: `way_out` completes the message.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidArgumentError(f"{name} is {shown(value)}: {way_out}")


def to_integer(value: object, name: str, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int; numpy's and torch's integers pass, bools and floats do not.

    Raises:
        InvalidArgumentError: It is no integer, or is not from `least` to `most`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except Exception:  # what foreign types raise differs
        raise InvalidArgumentError(f"{name} is {shown(value)}: it must be an integer") from None
    if (least is not None and number < least) or (most is not None and number > most):
        upto = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise InvalidArgumentError(f"{name} is {shown(number)}: it must be {upto}")
    return number


def to_names(value: object, name: str) -> list[str]:
    """Names of modules as a list.

    Raises:
        InvalidArgumentError: It is no list of strings, or empty.
    """
    names = list(value) if isinstance(value, (set, frozenset)) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
        raise InvalidArgumentError(f"{name} is {shown(value)}: it must be a list of names")
    if not names:
        raise InvalidArgumentError(f"{name} is empty: name at least one module")
    return list(names)


def to_number(value: object, name: str) -> float:
    """`value` as a float, infinity too.

    Raises:
        InvalidArgumentError: It is no number, or NaN.
    """
    try:
        if isinstance(value, (bool, str, bytes, bytearray)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # what foreign types raise differs
        raise InvalidArgumentError(f"{name} is {shown(value)}: it must be a number") from None
    if math.isnan(number):
        raise InvalidArgumentError(f"{name} is NaN: it must be a number")
    return number


def to_seconds(value: object, name: str) -> float:
    """A time to wait, at most `MAX_WAIT_S`.

    Raises:
        InvalidArgumentError: It is no number, or negative.
    """
    try:
        # An integer may be too large for a float.
        limited = min(value, int(MAX_WAIT_S)) if isinstance(value, int) else value
        seconds = to_number(value if isinstance(value, bool) else limited, name)
    except InvalidArgumentError:
        seconds = -1.0
    if seconds < 0:
        raise InvalidArgumentError(f"{name} is {shown(value)}: give 0 or more seconds")
    return min(seconds, MAX_WAIT_S)


def id_of(request: object) -> int:
    """The request's id; its range is not checked.

    Raises:
        InvalidArgumentError: It has none, or one that is no integer.
    """
    try:
        request_id = request.request_id  # type: ignore[attr-defined]
    except AttributeError as error:
        refuse_request(request, error, ("request_id",))
    return request_id if type(request_id) is int else to_integer(request_id, "request_id")


def refuse_request(
    request: object, error: Exception, attributes: Sequence[str] = _REQUEST_ATTRIBUTES
) -> NoReturn:
    """Says that something is no request; any other error is raised as it is.

    Args:
        request: What a caller gave as one.
        error: What came of using it.
        attributes: That were used.
    """
    missing = [name for name in attributes if not hasattr(request, name)]
    if missing:
        raise InvalidArgumentError(
            f"the request is {shown(request)}, which has no {' and no '.join(missing)}: give an "
            "LlmRequest, or an object with its attributes"
        ) from None
    to_integer(getattr(request, "request_id", 0), "request_id", 0, MAX_ID)
    raise error


def refuse_requests(
    requests: object, name: str, error: Exception, attributes: Sequence[str]
) -> NoReturn:
    """The same of several."""
    try:
        listed: tuple[object, ...] = tuple(requests)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(
            f"{name} is {shown(requests)}: give a list of requests"
        ) from None
    for request in listed:
        if not all(hasattr(request, attribute) for attribute in attributes):
            refuse_request(request, error, attributes)
        to_integer(getattr(request, "request_id", 0), "request_id", 0, MAX_ID)
    raise error
