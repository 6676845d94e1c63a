"""The tensors of an adapter as its file describes them."""

from __future__ import annotations

import math
from typing import NamedTuple

from pagedlora import _core
from pagedlora.errors import AdapterFormatError
from pagedlora.shown import quoted

DTYPES = {
    "F32": _core.Dtype.float32,
    "F16": _core.Dtype.float16,
    "BF16": _core.Dtype.bfloat16,
}
"""The possible types, as safetensors spells them."""
TORCH_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
"""The possible types of tensors in memory, and how safetensors spells them."""
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class StoredTensor(NamedTuple):
    """A tensor as its file describes it.

    Attributes:
        name: As in the file.
        dtype: As safetensors spells it: "F32", "BF16", ...
        shape: Sizes of its dimensions.
        offset: Bytes from the start of the source.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int


class MatrixPair(NamedTuple):
    """The tensors of one module: A [rank, in_features] and B [out_features, rank]."""

    a: StoredTensor
    b: StoredTensor

    @property
    def rank(self) -> int:
        """First dimension of A."""
        return self.a.shape[0]


class ModuleVectors(NamedTuple):
    """What a module may have beside A and B.

    Attributes:
        bias: Of B, [out_features].
        magnitude: Of DoRA, as trained, [out_features].
    """

    bias: StoredTensor | None = None
    magnitude: StoredTensor | None = None

    @property
    def there(self) -> tuple[StoredTensor, ...]:
        """Those that the module has."""
        return tuple(tensor for tensor in self if tensor is not None)


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a possible type, as safetensors spells it."""
    return _ELEMENT_BYTES[dtype]


def rows_of(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """Some neighbouring rows of a tensor that lies row by row."""
    row_bytes = math.prod(tensor.shape[1:]) * element_bytes(tensor.dtype)
    return tensor._replace(
        shape=[count, *tensor.shape[1:]], offset=tensor.offset + first * row_bytes
    )


def tensor_error(path: str, tensor: str, problem: str) -> AdapterFormatError:
    """What is wrong with a tensor of an adapter; `tensor` empty: with all of it."""
    subject = f"tensor {quoted(tensor)} of {quoted(path)}" if tensor else f"{quoted(path)}"
    return AdapterFormatError(f"{subject} {problem}", path=path, tensor=tensor)
