"""Checks the values of those fields of a PEFT configuration that decide answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedlora.errors import AdapterFormatError
from pagedlora.loaders.patterns import MAX_PATTERN_LENGTH
from pagedlora.shown import quoted

MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_MAX_RANK = 2**31 - 1
_MAX_LAYER = 2**31 - 1
_MAX_KEYS = 100_000


class FieldReader:
    """The fields of one configuration. Every method raises AdapterFormatError naming the field."""

    def __init__(self, fields: Mapping[str, Any], path: str) -> None:
        """Reads nothing yet.

        Args:
            fields: As in `adapter_config.json`.
            path: Named in errors.
        """
        self._fields = fields
        self._path = path

    def rank(self, name: str) -> int:
        """A rank, which must be there."""
        return self._check_rank(name, self._fields.get(name))

    def number(self, name: str) -> float:
        """A number in float32's range, which must be there."""
        return self._check_number(name, self._fields.get(name))

    def flag(self, name: str) -> bool:
        """True or false; false if it is missing."""
        value = self._fields.get(name, False)
        if not isinstance(value, bool):
            raise self._error(f"has {name}={shorten(value)}: it must be true or false")
        return value

    def targets(self) -> tuple[str, ...] | str:
        """`target_modules`, which must name something."""
        targets = self.names_or_expression("target_modules")
        if not targets:
            raise self._error(
                f"has target_modules={shorten(self._fields.get('target_modules'))}: a list of "
                "names, a regular expression or 'all-linear' is needed"
            )
        return "all-linear" if _is_all_linear(targets) else targets

    def names_or_expression(self, name: str) -> tuple[str, ...] | str:
        """A list of names or a regular expression; empty if it is missing."""
        value = self._fields.get(name)
        if not isinstance(value, str):
            return self._names(name, value)
        if len(value) > MAX_PATTERN_LENGTH:
            raise self._error(
                f"has {name}={shorten(value)}: regular expressions have at most "
                f"{MAX_PATTERN_LENGTH} characters"
            )
        return value

    def rank_pattern(self) -> dict[str, int]:
        """Keys to ranks."""
        name = "rank_pattern"
        return {k: self._check_rank(_member(name, k), v) for k, v in self._dict(name).items()}

    def alpha_pattern(self) -> dict[str, float]:
        """Keys to numbers."""
        name = "alpha_pattern"
        return {k: self._check_number(_member(name, k), v) for k, v in self._dict(name).items()}

    def layers(self) -> tuple[int, ...]:
        """`layers_to_transform`; empty: all."""
        value = self._fields.get("layers_to_transform")
        if value is None:
            return ()
        layers = value if isinstance(value, list) else [value]
        if not all(_is_integer(layer) and 0 <= layer <= _MAX_LAYER for layer in layers):
            raise self._error(
                f"has layers_to_transform={shorten(value)}: a number or a list of numbers, 0 or "
                "more, is needed"
            )
        if isinstance(self._fields.get("target_modules"), str):
            raise self._error(
                "has layers_to_transform, which PEFT takes only with a list of target_modules: "
                "name the modules, or put the layers into the expression"
            )
        return tuple(layers)

    def layers_pattern(self) -> tuple[str, ...]:
        """What stands before the number of a layer; empty: anything."""
        value = self._fields.get("layers_pattern")
        if isinstance(value, str) and value:
            value = [value]
        names = self._names("layers_pattern", value)
        if names and self._fields.get("layers_to_transform") is None:
            raise self._error("has layers_pattern without layers_to_transform: remove it")
        return names

    def _names(self, name: str, value: Any) -> tuple[str, ...]:
        if value is None or value == "":
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._error(f"has {name}={shorten(value)}: names are needed")
        return tuple(value)

    def _dict(self, name: str) -> Mapping[str, Any]:
        value = self._fields.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self._error(f"has {name}={shorten(value)}: names with a number each are needed")
        if len(value) > _MAX_KEYS:
            raise self._error(f"has {name} with {len(value)} keys, over the limit of {_MAX_KEYS}")
        return value

    def _check_rank(self, name: str, value: Any) -> int:
        if not _is_integer(value) or not 1 <= value <= _MAX_RANK:
            raise self._error(
                f"has {name}={shorten(value)}: it must be an integer from 1 to {_MAX_RANK}"
            )
        return int(value)

    def _check_number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, float) or _is_integer(value)
        if is_number and -MAX_FLOAT32 <= value <= MAX_FLOAT32:
            return float(value)
        raise self._error(f"has {name}={shorten(value)}: it must be a number in float32's range")

    def _error(self, problem: str) -> AdapterFormatError:
        return format_error(self._path, problem)


def shorten(value: Any) -> str:
    """A value as errors show it."""
    try:
        return f"{value!r:.80}"
    except RecursionError:
        return f"{type(value).__name__} of great depth"


def format_error(path: str, problem: str) -> AdapterFormatError:
    """What is wrong with a file as a whole."""
    return AdapterFormatError(f"{quoted(path)} {problem}", path=path, tensor="")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_all_linear(targets: tuple[str, ...] | str) -> bool:
    return isinstance(targets, str) and targets.lower() == "all-linear"


def _member(name: str, key: str) -> str:
    return f"{name}[{key!r:.80}]"
