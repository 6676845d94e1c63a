"""A weights file on disk, read in pieces and checked to be the one that was registered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pagedlora import _core
from pagedlora.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    PagedLoraError,
)
from pagedlora.shown import quoted

CHUNK_BYTES = 1 << 20
"""What is in memory of a file at a time."""


class FileIdentity(NamedTuple):
    """What tells one state of a file from another without reading it; times in nanoseconds."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """What the system says of a file."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class SourceFile(NamedTuple):
    """A file and what it was when it was registered. Immutable."""

    path: str
    identity: FileIdentity
    root: _core.AdapterRoot | None = None

    @classmethod
    def of(cls, path: str, root: _core.AdapterRoot | None = None) -> SourceFile:
        """The file as it is now.

        Args:
            path: The file.
            root: Where it must lie whenever it is opened; None: anywhere.

        Raises:
            AdapterNotFoundError: There is none.
            AdapterPathError: It does not lie in the root.
            AdapterReadError: The system does not say.
        """
        with _closing(_core.open_file(path, root)) as descriptor, _system_errors(path):
            return cls(path, FileIdentity.of(os.fstat(descriptor)), root)

    def is_unchanged(self) -> bool:
        """Whether the file is still there as it was; reads nothing."""
        try:
            return SourceFile.of(self.path, self.root).identity == self.identity
        except PagedLoraError:
            return False

    @contextmanager
    def open(self) -> Iterator[Callable[[int, int], Iterator[memoryview]]]:
        """Opens the file, if it is the registered one, and checks at the end that it still is.

        Yields:
            A function of an offset and a size in bytes that gives the bytes between, in pieces of
            `CHUNK_BYTES` at most. A piece is valid until the next one is asked for.

        Raises:
            AdapterNotFoundError: The file is gone.
            AdapterPathError: Its path leads out of the root now.
            AdapterReadError: The system will not read it.
            AdapterSourceChangedError: It is another file, or was written to, before or meanwhile.
        """
        try:
            opened = _core.open_file(self.path, self.root)
        except AdapterFormatError:
            raise self._changed("it is no regular file any more") from None
        except AdapterNotFoundError:
            if self.root is None or not self.root.was_replaced:
                raise
            raise self._changed(f"the directory '{self.root.path}' was replaced") from None
        with _closing(opened) as descriptor, _system_errors(self.path):
            self._check(os.fstat(descriptor))
            yield lambda offset, size: self._chunks(descriptor, offset, size)
            self._check(os.fstat(descriptor))

    def _chunks(self, descriptor: int, offset: int, size: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
        end = offset + size
        while offset < end:
            count = os.preadv(descriptor, [buffer[: end - offset]], offset)
            if count == 0:
                raise self._changed(f"it ends at {offset} of {self.identity.size_bytes} bytes")
            yield buffer[:count]
            offset += count

    def _check(self, status: os.stat_result) -> None:
        now = FileIdentity.of(status)
        if now != self.identity:
            field = next(f for f in now._fields if getattr(now, f) != getattr(self.identity, f))
            before, after = getattr(self.identity, field), getattr(now, field)
            raise self._changed(f"its {field} was {before} and is {after}")

    def _changed(self, difference: str) -> AdapterSourceChangedError:
        return AdapterSourceChangedError(
            f"'{self.path}' changed after it was registered: {difference}; give its name the new "
            "content with reload(), or unload() and load() it (a name of lora_dir gets it with its "
            "next request)",
            path=self.path,
        )


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    """Closes it at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Turns the system's errors into this package's."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterNotFoundError(f"there is no file {quoted(path)}", name=path) from None
    except PagedLoraError:
        raise  # some are OSErrors themselves
    except OSError as error:
        raise AdapterReadError(
            f"{quoted(path)} cannot be read: {error.strerror}", path=path, errno=error.errno
        ) from error
