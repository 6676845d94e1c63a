"""The two members of a .nemo file that make an adapter: a tar archive, plain or gzipped.

An archive may come from anybody. So nothing in it is extracted under a name; it is read once, from
its beginning to its end, with limits on what it unpacks to; and it has regular files and
directories only. The weights go to a nameless temporary file, because unpickling them needs seeks.
"""

from __future__ import annotations

import gzip
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, NamedTuple

from pagedlora.errors import (
    AdapterFormatError,
    AdapterReadError,
    PagedLoraError,
    UnsupportedAdapterError,
)
from pagedlora.loaders import pickled
from pagedlora.loaders.stored import tensor_error
from pagedlora.shown import quoted

CONFIG_MEMBER = "model_config.yaml"
WEIGHTS_MEMBER = "model_weights.ckpt"
MAX_CONFIG_BYTES = 256 << 10
MAX_MEMBERS = 64
_MAX_HEADER_BYTES = 256 << 10
"""Of one member's headers, with what is read ahead of them."""
_CHUNK_BYTES = 64 << 10
_MAX_RATIO = 100
"""How many times what was read of a file it may unpack to; weights shrink to a half at best."""
_FREE_BYTES = 16 << 20
"""What may be unpacked beside that, such as text."""
_GZIP_MAGIC = b"\x1f\x8b"


class NemoMembers(NamedTuple):
    """What was read of an archive.

    Attributes:
        config: The bytes of `model_config.yaml`.
        weights: `model_weights.ckpt`, at its beginning; the caller closes it.
    """

    config: bytes
    weights: IO[bytes]


def read_archive(file: IO[bytes], path: str) -> NemoMembers:
    """Reads a .nemo file.

    Args:
        file: At its beginning; not closed.
        path: Names it in errors.

    Raises:
        AdapterReadError: The system will not read it, or take the temporary file.
        AdapterFormatError: It is no such archive, is cut off, lacks a member or has one twice, or
            unpacks to more than the limits.
        UnsupportedAdapterError: It has the weights of several ranks.
    """
    with _typed_errors(path), ExitStack() as closer:
        weights = closer.enter_context(tempfile.TemporaryFile(prefix="pagedlora-"))
        config = _read_members(_Bounded(file, path), path, weights)
        weights.seek(0)
        closer.pop_all()
        return NemoMembers(config, weights)


@contextmanager
def _typed_errors(path: str) -> Iterator[None]:
    """Turns what archives and the system raise into this package's errors."""
    try:
        yield
    except PagedLoraError:
        raise  # some are OSErrors or ValueErrors themselves
    except (gzip.BadGzipFile, zlib.error, EOFError, tarfile.TarError) as error:
        raise _error(path, f"is no tar archive, or is cut off: {error!s:.200}") from None
    except (RecursionError, ValueError) as error:
        raise _error(path, f"has headers that cannot be: {error!s:.200}") from None
    except OSError as error:
        raise AdapterReadError(
            f"{quoted(path)} cannot be read, or not be copied: {error.strerror}",
            path=path,
            errno=error.errno,
        ) from error


class _Bounded:
    """What `tarfile` reads from: a file, unzipped if need be, as far as was allowed last."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._raw = file
        self._file = _unzipped(file)
        self._path = path
        self._left = 0
        self._unpacked = 0

    def allow(self, num_bytes: int) -> None:
        """From now on so many bytes, and a member's headers."""
        self._left = num_bytes + _MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        """As a file does; raises AdapterFormatError beyond what is allowed."""
        if self._left <= 0:
            raise _error(
                self._path,
                f"has a member with over {_MAX_HEADER_BYTES} bytes of headers",
            )
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        self._unpacked += len(data)
        if self._unpacked > _FREE_BYTES + _MAX_RATIO * self._raw.tell():
            raise _error(self._path, f"unpacks to over {_MAX_RATIO} times its bytes")
        return data


def _unzipped(file: IO[bytes]) -> IO[bytes]:
    is_zipped = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if is_zipped else file  # type: ignore[return-value]


def _read_members(bounded: _Bounded, path: str, weights: IO[bytes]) -> bytes:
    bounded.allow(0)
    config: bytearray | None = None
    found: set[str] = set()
    limits = {CONFIG_MEMBER: MAX_CONFIG_BYTES}
    left = pickled.MAX_PICKLE_BYTES + MAX_CONFIG_BYTES
    with tarfile.open(fileobj=bounded, mode="r|", bufsize=_CHUNK_BYTES) as archive:  # type: ignore[call-overload]
        for count, member in enumerate(archive, start=1):
            name = _checked_name(member, path)
            limit = min(limits.get(name, pickled.MAX_PICKLE_BYTES), left)
            if count > MAX_MEMBERS:
                raise _error(path, f"has more than {MAX_MEMBERS} members")
            if member.isdir():
                bounded.allow(0)
                continue
            if not 0 <= member.size <= limit:
                raise _error(
                    path, f"has {name!r:.80} of {member.size} bytes, over the limit of {limit}"
                )
            left -= member.size
            if name in found and name in (CONFIG_MEMBER, WEIGHTS_MEMBER):
                raise _error(path, f"has {name!r} twice")
            found.add(name)
            bounded.allow(member.size)
            into = weights if name == WEIGHTS_MEMBER else None
            content = _read_member(archive, member, into, keep=name == CONFIG_MEMBER, path=path)
            config = content if name == CONFIG_MEMBER else config
            bounded.allow(0)
    for name in (CONFIG_MEMBER, WEIGHTS_MEMBER):
        if name not in found:
            raise _error(path, f"has no member {name!r}: {_shown(found)}")
    assert config is not None
    return bytes(config)


def _read_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    into: IO[bytes] | None,
    *,
    keep: bool,
    path: str,
) -> bytearray:
    """Reads all of a member, whether anybody wants it or not: what is skipped is read, too."""
    kept = bytearray()
    source = archive.extractfile(member)
    assert source is not None
    num_bytes = 0
    while piece := source.read(_CHUNK_BYTES):
        num_bytes += len(piece)
        if into is not None:
            into.write(piece)
        if keep:
            kept += piece
    if num_bytes != member.size:
        raise _error(path, f"is cut off in {member.name!r:.80}: {num_bytes} of {member.size} bytes")
    return kept


def _checked_name(member: tarfile.TarInfo, path: str) -> str:
    """A member's name without a leading `./`."""
    name = member.name
    if not (member.isdir() or (member.isreg() and not member.issparse())):
        raise _error(path, f"has {name!r:.80}, which is neither a regular file nor a directory")
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _error(path, f"has a member {name!r:.80}, whose name leads out of the archive")
    plain = "/".join(part for part in parts if part not in ("", "."))
    if len(plain) > len(WEIGHTS_MEMBER) and plain.endswith(f"/{WEIGHTS_MEMBER}"):
        raise UnsupportedAdapterError(
            f"{quoted(path)} has {plain!r:.80}, the weights of one of several ranks. Way out: "
            "merge the ranks into one, and save the adapter again",
            field=WEIGHTS_MEMBER,
        )
    return plain


def _shown(found: set[str]) -> str:
    if not found:
        return "it has none"
    return "it has " + ", ".join(f"{name!r:.60}" for name in sorted(found)[:5])


def _error(path: str, problem: str) -> AdapterFormatError:
    return tensor_error(path, "", problem)
