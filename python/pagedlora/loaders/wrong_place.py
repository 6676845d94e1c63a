"""What lies where an adapter's configuration was looked for in vain: words for the error."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from pagedlora import _core
from pagedlora.shown import counted, quoted

_LOOKED_AT = 200
"""Entries of a directory: it may have very many, and lie on a slow file system."""
_SHOWN = 3
_GIVE = "give the directory that PEFT's save_pretrained wrote"


def why_missing(path: Path, root: _core.AdapterRoot | None) -> str:
    """Why there is no configuration, as far as that can be seen, and what to give instead.

    Args:
        path: Where it should be.
        root: There is one: a request may have given the path, and is told nothing of what lies
            beside it. None: the caller may know.
    """
    directory = path.parent
    plain = f"there is no {path.name} in {quoted(str(directory))}: {_GIVE}"
    if root is not None:
        return plain
    try:
        return _why_missing(directory, path.name) or plain
    except (OSError, ValueError):  # it went away, or may not be looked at
        return plain


def _why_missing(directory: Path, name: str) -> str:
    shown = quoted(str(directory))
    if not os.path.lexists(directory):
        return f"{shown} does not exist: {_GIVE}"
    if directory.is_file():
        place = directory.parent
        if (place / name).is_file():
            return f"{shown} is a file: give its directory, {quoted(str(place))}"
        return f"{shown} is a file: {_GIVE}"
    below, are_all = _adapters_below(directory, name)
    if below:
        first = ", ".join(quoted(each) for each in below[:_SHOWN])
        rest = len(below) - _SHOWN
        more = (f" and {counted(rest, 'other')}" if are_all else " and others") if rest > 0 else ""
        return f"there is no {name} in {shown}, but in {first}{more} below it: give one of these"
    if (directory / "config.json").is_file():
        return f"there is no {name} in {shown}, which has a model's config.json: {_GIVE}"
    return ""


def _adapters_below(directory: Path, name: str) -> tuple[list[str], bool]:
    """Names of directories in it that have the file, 9 before 10, and whether they are all."""
    with os.scandir(directory) as entries:
        below = [
            entry.name
            for entry in islice(entries, _LOOKED_AT)
            if entry.is_dir(follow_symlinks=False)
            and os.path.isfile(os.path.join(entry.path, name))
        ]
        are_all = next(entries, None) is None
    return sorted(below, key=lambda each: (len(each), each)), are_all
