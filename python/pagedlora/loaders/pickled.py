"""Weights in `adapter_model.bin`, a pickle: read once, and kept as a safetensors file.

So the cache reads them again after an eviction as it reads all others: in pieces, without Python,
and without a pickle. Only where the caller allows it, and with `weights_only=True`, which builds
tensors and plain containers and calls nothing else.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pagedlora.errors import AdapterFormatError, AdapterNotFoundError, AdapterReadError

if TYPE_CHECKING:
    import torch

PICKLE_NAME = "adapter_model.bin"
MAX_PICKLE_BYTES = 8 << 30
"""A larger file is refused: all of it is in memory while it is converted."""
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


def convert_pickle(path: Path, name: str) -> PrivateCopy:
    """Reads a pickle of tensors and writes them to a safetensors file.

    Args:
        path: The pickle.
        name: Of the new file.

    Returns:
        The new file, for as long as the caller keeps the object.

    Raises:
        AdapterNotFoundError: There is no such file.
        AdapterReadError: The system will not read it, or write the new one.
        AdapterFormatError: It is not a regular file, too large, or not a pickle of named tensors.
    """
    from safetensors.torch import save_file

    try:
        tensors = _named_tensors(_load(path), path)
        copy = PrivateCopy(name)
        save_file(tensors, copy.path)
    except FileNotFoundError:
        raise AdapterNotFoundError(f"there is no file '{path}'", name=str(path)) from None
    except (AdapterFormatError, AdapterReadError):
        raise
    except OSError as error:
        raise AdapterReadError(
            f"'{path}' cannot be read, or not be copied: {error.strerror}",
            path=str(path),
            errno=error.errno,
        ) from error
    return copy


def _load(path: Path) -> object:
    # Non-blocking: a FIFO would otherwise wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _error(path, "is not a regular file")
        if status.st_size > MAX_PICKLE_BYTES:
            raise _error(path, f"has {status.st_size} bytes, over the limit of {MAX_PICKLE_BYTES}")
        with open(descriptor, "rb", closefd=False) as file:
            return _unpickle(file, path)
    finally:
        os.close(descriptor)


def _unpickle(file: IO[bytes], path: Path) -> object:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load has no error of its own
        reason = str(error).strip().partition("\n")[0]
        raise _error(path, f"is not a pickle of tensors alone: {reason:.{_SHOWN}}") from None


def _named_tensors(content: object, path: Path) -> dict[str, torch.Tensor]:
    """Tensors of their own memory, as safetensors needs them."""
    import torch

    if not isinstance(content, dict):
        raise _error(path, f"has a {type(content).__name__} instead of tensors by name")
    for name, tensor in content.items():
        is_tensor = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not is_tensor:
            raise _error(path, f"has {name!r:.80}, a {type(tensor).__name__}: dense tensors needed")
    return {name: tensor.detach().contiguous().clone() for name, tensor in content.items()}


def _error(path: Path, problem: str) -> AdapterFormatError:
    return AdapterFormatError(f"'{path}' {problem}", path=str(path), tensor="")
