"""What callers may give as a path, and what it may lead to."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple, TypeAlias

from pagedlora import _core
from pagedlora.errors import AdapterNotFoundError, AdapterPathError, InvalidArgumentError
from pagedlora.shown import quoted, shown

SourceForm: TypeAlias = Literal["auto", "hf", "nemo"]
"""What lies at a path: a PEFT directory, a NeMo archive, or what the path's end says."""


class SourcePath(NamedTuple):
    """Where an adapter lies.

    Attributes:
        path: Its directory, or its file.
        root: The directory that its files must lie in; None: anywhere.
        form: What lies there.
    """

    path: str
    root: _core.AdapterRoot | None = None
    form: SourceForm = "auto"

    @classmethod
    def of(
        cls,
        source: object,
        name: str,
        root: _core.AdapterRoot | None,
        form: SourceForm = "auto",
    ) -> SourcePath:
        """What a caller gave.

        Args:
            source: A string or a path object of one; beneath a root also relative to it. Without
                a root "~" at its beginning is the home directory, as in a shell.
            name: What it is called in the error.
            root: Where it must lie; not looked at yet.
            form: What the caller says that it is.

        Raises:
            InvalidArgumentError: It is something else.
            AdapterPathError: There is a root, and no file can have that name.
        """
        path = to_path(source, name)
        if root is None:
            is_at_home = path == "~" or path.startswith("~/")
            return cls(os.path.expanduser(path) if is_at_home else path, None, form)
        if not is_possible_path(path):
            raise AdapterPathError(
                f"{name} is {quoted(path)}, which is no possible path below adapter_root "
                f"{quoted(root.path)}",
                path=path,
                root=root.path,
            )
        return cls(os.path.join(root.path, path), root, form)

    def real_path(self) -> str:
        """The path without links, for comparing.

        Raises:
            AdapterPathError: It leads out of the root.
            AdapterNotFoundError: No file can have it, it leads nowhere beneath the root, or changed
                meanwhile.
        """
        if not is_possible_path(self.path):
            raise AdapterNotFoundError(f"no file can be at {quoted(self.path)}", name=self.path)
        if self.root is not None:
            self.root.check(self.path)
        return without_links(self.path)


def without_links(path: str) -> str:
    """The path that links lead to, as far as it exists.

    Raises:
        AdapterNotFoundError: A link was taken away while it was followed.
    """
    try:
        return os.path.realpath(path)
    except OSError as error:
        raise AdapterNotFoundError(
            f"{quoted(path)} changed while it was looked at: {error.strerror}", name=path
        ) from error


def to_path(value: object, name: str) -> str:
    """The path as a string.

    Args:
        value: A string or a path object of one.
        name: What it is called in the error.

    Raises:
        InvalidArgumentError: It is something else, or empty.
    """
    try:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
    except Exception:  # whatever foreign code raises
        path = None
    if not isinstance(path, str):
        raise InvalidArgumentError(
            f"{name} is {shown(value)}: it must be a string or a path object"
        )
    if not path:
        raise InvalidArgumentError(f"{name} is empty: give a path, '.' for the current directory")
    return path


def is_possible_path(path: str) -> bool:
    """Whether the system could have a file of that name; where not, its calls raise ValueError."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
