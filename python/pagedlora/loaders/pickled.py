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
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from pagedlora.errors import AdapterFormatError, AdapterReadError

if TYPE_CHECKING:
    import torch

PICKLE_NAME = "adapter_model.bin"
MAX_PICKLE_BYTES = 8 << 30
"""A larger file is refused: all of it is in memory while it is converted."""
_METADATA = "__metadata__"
"""What safetensors files have beside tensors."""
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
        self._remove = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)


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
    """What a pickle of tensors has by name, as far as it is known; see `convert_pickle`."""
    try:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > MAX_PICKLE_BYTES:
            raise _error(path, f"has {size_bytes} bytes, over the limit of {MAX_PICKLE_BYTES}")
        content = _unpickle(file, path)
    except AdapterFormatError:
        raise
    except OSError as error:
        raise AdapterReadError(
            f"'{path}' cannot be read: {error.strerror}", path=path, errno=error.errno
        ) from error
    if not isinstance(content, dict):
        raise _error(path, f"has a {type(content).__name__} instead of tensors by name")
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

    own = _own_tensors(tensors, path)
    try:
        copy = PrivateCopy(name)
        save_file(own, copy.path, metadata)
    except (OSError, SafetensorError) as error:  # the latter where the disk is full
        raise AdapterReadError(
            f"the tensors of '{path}' cannot be kept in a temporary file: {error}",
            path=path,
            errno=getattr(error, "errno", None) or errno.EIO,
        ) from error
    except (KeyError, ValueError) as error:
        raise _error(path, f"has what no safetensors file can have: {error!s:.{_SHOWN}}") from None
    return copy


def _unpickle(file: IO[bytes], path: str) -> object:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load has no error of its own
        reason = str(error).strip().partition("\n")[0]
        raise _error(path, f"is not a pickle of tensors alone: {reason:.{_SHOWN}}") from None


def _own_tensors(tensors: Mapping[Any, Any], path: str) -> dict[str, torch.Tensor]:
    """The same on the CPU, each in memory of its own, as safetensors needs them."""
    import torch

    for name, tensor in tensors.items():
        is_tensor = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or name == _METADATA or not is_tensor or tensor.is_meta:
            raise _error(path, f"has {name!r:.80}, a {type(tensor).__name__}: dense tensors needed")
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _error(path: str, problem: str) -> AdapterFormatError:
    return AdapterFormatError(f"'{path}' {problem}", path=path, tensor="")
