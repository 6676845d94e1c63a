"""The adapters below a directory, known by their relative path and parsed by whoever asks first."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from pagedlora import _core
from pagedlora.errors import AdapterNotFoundError, AdapterReadError
from pagedlora.loaders.hf import WEIGHTS_NAME
from pagedlora.loaders.peft_config import CONFIG_NAME
from pagedlora.loaders.pickled import PICKLE_NAME
from pagedlora.loaders.source_file import FileIdentity
from pagedlora.paths import SourcePath, is_possible_path

MAX_NAME_BYTES = 256


class AdapterFiles(NamedTuple):
    """What tells one state of an adapter's directory from another without reading it.

    Attributes:
        config: Of its configuration.
        weights: Of its weights, whatever form they have.
    """

    config: FileIdentity
    weights: FileIdentity


class LoraDirectory:
    """Names of adapters that lie in a directory. Thread-safe.

    Nothing of an adapter is read here. Files are opened beneath the directory, whatever a name or
    a link says. If another directory gets its path, that is the one from then on; what was found
    before is opened where it was found.
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
        self._listing = _list(path)

    @property
    def path(self) -> str:
        """The directory, absolute."""
        return self._listing.root.path

    @property
    def names(self) -> frozenset[str]:
        """What was there at construction, or when another directory was found in its place."""
        return self._current().names

    def find(self, name: str) -> SourcePath | None:
        """Where the adapter of that name lies, whether it was listed or not.

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
        root, names = self._current()
        source = SourcePath(os.path.join(root.path, name), root)
        if name not in names:
            try:
                root.check(os.path.join(source.path, CONFIG_NAME))
            except AdapterNotFoundError:
                return None
            except AdapterReadError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return None
                raise
        return source

    def files(self, name: str) -> AdapterFiles | None:
        """What lies under a name now; None where no adapter does, or the system does not say.

        By path: it is for comparing, and what it is found to be may be opened no more than before.
        """
        directory = os.path.join(self.path, name)
        config = _identity(os.path.join(directory, CONFIG_NAME))
        if config is None:
            return None
        weights = _identity(os.path.join(directory, WEIGHTS_NAME))
        if weights is None:
            weights = _identity(os.path.join(directory, PICKLE_NAME))
        return None if weights is None else AdapterFiles(config, weights)

    def _current(self) -> _Listing:
        listing = self._listing
        if listing.root.was_replaced:
            listing = self._listing = _list(listing.root.path)
        return listing


class _Listing(NamedTuple):
    root: _core.AdapterRoot
    names: frozenset[str]


def _list(path: str) -> _Listing:
    root = _core.AdapterRoot(path)
    directories = directories_below(root.path)
    return _Listing(root, frozenset(name for name, files in directories if CONFIG_NAME in files))


def is_name(name: object) -> bool:
    """Whether something can be the name of an adapter, as its path below a directory."""
    if not isinstance(name, str) or not is_possible_path(name):
        return False
    parts = name.split("/")
    return len(os.fsencode(name)) <= MAX_NAME_BYTES and not {"", ".", ".."} & {*parts}


def directories_below(root: str) -> Iterator[tuple[str, list[str]]]:
    """Directories at any depth that can be adapters, by relative path, and the files in each.

    Follows no links, passes over what the system will not list, and comes in no order.
    """
    for directory, children, files, _ in os.fwalk(root):
        name = os.path.relpath(directory, root)
        if is_name(name) and _is_text(name):
            yield name, files
        prefix = "" if name == "." else f"{name}/"
        children[:] = [child for child in children if is_name(prefix + child)]


def _is_text(name: str) -> bool:
    """Whether the file system's bytes are UTF-8, as those of a request are."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _identity(path: str) -> FileIdentity | None:
    try:
        return FileIdentity.of(os.stat(path))
    except OSError:
        return None
