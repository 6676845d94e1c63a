"""Weights that are in no safetensors file: a pickle's, a caller's. They are kept as one.

So the cache reads them again after an eviction as it reads all others: in pieces, without Python,
and without a pickle. Pickles only where the caller allows it, and with `weights_only=True`, which
builds tensors and plain containers and calls nothing else.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, TypeGuard

from pagedlora.errors import AdapterFormatError, AdapterReadError
from pagedlora.loaders.pickle_sizes import MAX_ELEMENTS, largest_tuple
from pagedlora.shown import quoted, shown

if TYPE_CHECKING:
    import torch

PICKLE_NAME = "adapter_model.bin"
MAX_PICKLE_BYTES = 8 << 30
"""Larger files and tensors are refused: all of them are in memory while they are converted."""
_METADATA = "__metadata__"
"""What safetensors files have beside tensors."""
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_RECORD = "data.pkl"
_LEGACY_PICKLES = 5
"""Before torch 1.6: a number, a version, the system, the tensors and the keys of their memory."""
_SHOWN = 200


class PrivateCopy:
    """A file in a directory that only this user can read; both are removed with the object.

    Attributes:
        path: The file.
    """

    __slots__ = ("__weakref__", "_remove", "path")

    def __init__(self, name: str) -> None:
        """Makes the directory, not the file."""
        directory = tempfile.mkdtemp(prefix="pagedlora-")
        self.path = os.path.join(directory, name)
        self._remove = weakref.finalize(self, _remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    """Removes it, unless this is a child of the process that made it and reads from it."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def convert_pickle(file: IO[bytes], path: str, name: str) -> PrivateCopy:
    """Reads a pickle of tensors and writes them to a safetensors file.

    Args:
        file: The pickle, a regular file at its beginning; not closed.
        path: Names it in errors.
        name: Of the new file.

    Returns:
        The new file, for as long as the caller keeps the object.

    Raises:
        AdapterReadError: The system will not read it, or write the new one.
        AdapterFormatError: It is too large, or not a pickle of named tensors.
    """
    return keep_tensors(load_pickle(file, path), path, name)


def load_pickle(file: IO[bytes], path: str) -> dict[Any, Any]:
    """What a pickle of tensors has by name, as far as it is known; see `convert_pickle`.

    Of its tensors none is larger than what it is a view of, and all together are within the limit.
    """
    try:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > MAX_PICKLE_BYTES:
            raise _error(path, f"has {size_bytes} bytes, over the limit of {MAX_PICKLE_BYTES}")
        _check_unpacked(file, size_bytes, path)
        content = _unpickle(file, path)
    except AdapterFormatError:
        raise
    except OSError as error:
        raise AdapterReadError(
            f"{quoted(path)} cannot be read: {error.strerror}", path=path, errno=error.errno
        ) from error
    if not isinstance(content, dict):
        raise _error(path, f"has a {type(content).__name__} instead of tensors by name")
    for name, tensor in content.items():
        if is_dense(tensor) and tensor.nbytes > tensor.untyped_storage().nbytes():
            raise _error(
                path,
                f"has {shown(name)} of {tensor.nbytes} bytes, made of "
                f"{tensor.untyped_storage().nbytes()}: save it with contiguous()",
            )
    _check_total(content, path)
    return content


def keep_tensors(
    tensors: Mapping[Any, Any],
    path: str,
    name: str,
    metadata: dict[str, str] | None = None,
) -> PrivateCopy:
    """Writes tensors to a safetensors file of this process's own.

    Args:
        tensors: By name; of any device, strides and shared memory. Copied.
        path: Names them in errors.
        name: Of the new file.
        metadata: Put into its header.

    Returns:
        The new file, for as long as the caller keeps the object.

    Raises:
        AdapterReadError: The system will not write it.
        AdapterFormatError: Something is no tensor with values, or has no name.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    own = own_tensors(tensors, path)
    try:
        copy = PrivateCopy(name)
        save_file(own, copy.path, metadata)
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        raise AdapterReadError(
            f"the tensors of {quoted(path)} cannot be kept in a temporary file: {error}",
            path=path,
            errno=getattr(error, "errno", None) or errno.EIO,
        ) from error
    except (KeyError, ValueError, RuntimeError) as error:
        raise _error(path, f"has what no safetensors file can have: {error!s:.{_SHOWN}}") from None
    return copy


def own_tensors(tensors: object, path: str) -> dict[str, torch.Tensor]:
    """The same on the CPU, each in memory of its own, as safetensors needs them.

    Raises:
        AdapterFormatError: Something is no tensor with values, or has no name; or all are too much.
    """
    import torch

    if not isinstance(tensors, Mapping):
        raise _error(path, f"is a {type(tensors).__name__}: tensors by name are needed")
    try:
        given = dict(tensors.items())  # what changes meanwhile was checked as it is copied
    except RuntimeError as error:
        raise _error(path, f"changed while they were read: {error!s:.{_SHOWN}}") from None
    for name, tensor in given.items():
        if not isinstance(name, str) or name == _METADATA or not is_dense(tensor):
            raise _error(
                path,
                f"has {shown(name)}, a {type(tensor).__name__}: dense tensors with their values in "
                "memory are needed",
            )
    _check_total(given, path)
    try:
        return {
            name: tensor.detach()
            .as_subclass(torch.Tensor)
            .cpu()
            .clone(memory_format=torch.contiguous_format)
            for name, tensor in given.items()
        }
    except (RuntimeError, MemoryError) as error:  # torch has no error of its own
        raise _error(path, f"cannot be copied: {error!s:.{_SHOWN}}") from None


def is_dense(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor whose values lie in memory as its shape and strides say."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    # Wrappers of other tensors (distributed, masked, fake, packed) have no memory of their own.
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not (is_wrapper or tensor.is_meta or torch.nn.parameter.is_lazy(tensor))


def _unpickle(file: IO[bytes], path: str) -> object:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load has no error of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _error(path, f"is not a pickle of tensors alone: {reason:.{_SHOWN}}") from None


def _check_unpacked(file: IO[bytes], size_bytes: int, path: str) -> None:
    """Refuses what `torch.save` never writes and bombs are made of.

    That is, records that are compressed or overlap, and tuples that hold others many times over.
    """
    try:
        if file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC:
            with zipfile.ZipFile(file) as archive:
                _check_archive(archive, size_bytes, path)
        else:
            file.seek(0)
            for _ in range(_LEGACY_PICKLES):
                _check_tuples(file, path)
    except AdapterFormatError:
        raise
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise _error(path, f"is not a pickle of tensors alone: {error!s:.{_SHOWN}}") from None
    file.seek(0)


def _check_archive(archive: zipfile.ZipFile, size_bytes: int, path: str) -> None:
    records = archive.infolist()
    unpacked = sum(record.file_size for record in records)
    if unpacked > size_bytes:
        raise _error(
            path,
            f"has {size_bytes} bytes, which unpack to {unpacked}: save it with torch.save(), "
            "which does not compress",
        )
    for record in records:
        if record.filename.rpartition("/")[2] == _PICKLE_RECORD:
            with archive.open(record) as file:
                _check_tuples(file, path)


def _check_tuples(file: IO[bytes], path: str) -> None:
    if largest_tuple(file) > MAX_ELEMENTS:
        raise _error(
            path,
            f"has a tuple of more than {MAX_ELEMENTS} elements, of others many times over: save "
            "tensors by name with torch.save()",
        )


def _check_total(tensors: Mapping[Any, Any], path: str) -> None:
    """Refuses views that are more together than the limit: each gets memory of its own."""
    total = sum(tensor.nbytes for tensor in tensors.values() if is_dense(tensor))
    if total > MAX_PICKLE_BYTES:
        raise _error(path, f"has tensors of {total} bytes, over the limit of {MAX_PICKLE_BYTES}")


def _error(path: str, problem: str) -> AdapterFormatError:
    return AdapterFormatError(f"{quoted(path)} {problem}", path=path, tensor="")
