"""Byte sizes as people write them: one parser and one formatter for the whole package."""

from __future__ import annotations

import re
from fractions import Fraction

from pagedlora.errors import InvalidArgumentError
from pagedlora.shown import shown

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_WAY_OUT = 'give bytes as an int, or a string such as "256KiB", "1.5 GiB" or "40MB"'


def parse_size(value: object) -> int:
    """Reads a size in bytes.

    KiB, MiB, GiB, TiB are powers of 1024; kB, MB, GB, TB powers of 1000. Case and blanks do not
    matter; a fraction of a byte is dropped.

    Args:
        value: Bytes as an int, or a string of a number and an optional unit.

    Returns:
        Bytes, zero or more.

    Raises:
        InvalidArgumentError: `value` is neither, is negative, or has an unknown unit.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise InvalidArgumentError(f"size {value} is negative: {_WAY_OUT}")
        return value
    if not isinstance(value, str):
        raise InvalidArgumentError(f"size {shown(value)} is a {type(value).__name__}: {_WAY_OUT}")
    match = _PATTERN.fullmatch(value)
    if match is None:
        raise InvalidArgumentError(f"size {shown(value)} is not a number with a unit: {_WAY_OUT}")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise InvalidArgumentError(
            f"size {shown(value)} has the unknown unit {shown(unit)}: {_WAY_OUT}"
        )
    return int(Fraction(number) * factor)


def format_size(num_bytes: int) -> str:
    """Writes a size for people, in the largest binary unit of which there is at least one.

    Args:
        num_bytes: Bytes, zero or more.

    Returns:
        At most four digits and the unit, such as "640 B", "256 KiB" or "1.46 GiB".
    """
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            decimals = 2 if num_bytes < 10 * factor else 1
            number = f"{num_bytes / factor:.{decimals}f}".rstrip("0").rstrip(".")
            return f"{number} {unit}"
    return f"{num_bytes} B"
