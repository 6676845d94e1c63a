"""The adapters below a directory, known by their relative path and parsed by whoever asks first."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from pagedlora import _core
from pagedlora.errors import AdapterNotFoundError, AdapterReadError
from pagedlora.loaders.peft_config import CONFIG_NAME
from pagedlora.paths import SourcePath, is_possible_path

MAX_NAME_BYTES = 256


class LoraDirectory:
    """Names of adapters that lie in a directory. Thread-safe.

    Nothing of an adapter is read here. Files are opened beneath the directory, whatever a name or
    a link says.
    """

    def __init__(self, path: str) -> None:
        """Lists the directory.

        Args:
            path: Every directory below that has an `adapter_config.json` is an adapter. Links to
                directories are not listed; `find` follows those that stay inside.

        Raises:
            AdapterNotFoundError: There is no such directory.
            AdapterReadError: The system will not open it.
        """
        self._root = _core.AdapterRoot(path)
        self._names = frozenset(_adapters_below(self._root.path))

    @property
    def path(self) -> str:
        """The directory, absolute."""
        return self._root.path

    @property
    def names(self) -> frozenset[str]:
        """What was there at construction."""
        return self._names

    def find(self, name: str) -> SourcePath | None:
        """Where the adapter of that name lies, whether it was there at construction or not.

        Args:
            name: The relative path in its shortest form. Others are not found, so that one adapter
                has one name.

        Returns:
            Its directory, confined to this one; None if there is no such adapter.

        Raises:
            AdapterPathError: A link leads out of this directory.
            AdapterReadError: The system will not look.
        """
        if not is_name(name):
            return None
        source = SourcePath(os.path.join(self._root.path, name), self._root)
        if name not in self._names:
            try:
                self._root.check(os.path.join(source.path, CONFIG_NAME))
            except AdapterNotFoundError:
                return None
            except AdapterReadError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return None
                raise
        return source


def is_name(name: object) -> bool:
    """Whether something can be the name of an adapter, as its path below a directory."""
    if not isinstance(name, str) or not is_possible_path(name):
        return False
    parts = name.split("/")
    return len(os.fsencode(name)) <= MAX_NAME_BYTES and not {"", ".", ".."} & {*parts}


def _adapters_below(root: str) -> Iterator[str]:
    """Relative paths of directories with an adapter's configuration; follows no links."""
    for directory, children, files, _ in os.fwalk(root):
        name = os.path.relpath(directory, root)
        if CONFIG_NAME in files and is_name(name) and _is_text(name):
            yield name
        prefix = "" if name == "." else f"{name}/"
        children[:] = [child for child in children if is_name(prefix + child)]


def _is_text(name: str) -> bool:
    """Whether the file system's bytes are UTF-8, as those of a request are."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
