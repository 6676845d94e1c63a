"""The digest that tells one adapter's content from another: SHA-256, the same in every process.

Hashed are, in this order, all numbers little-endian and every text as its length in bytes (8) and
its UTF-8:

1. the text `pagedlora adapter 1`;
2. the number of modules (8 bytes);
3. for each module, sorted by name (without PEFT's prefix): its name; its rank (4 bytes); its
   scale, the factor of B A x, as the float32 that is computed with; its flags (4 bytes; 0, as only
   plain LoRA is supported); then for A and for B the dtype as safetensors spells it (a text) and
   the two dimensions (8 bytes each);
4. for each module in the same order the bytes of A, then those of B, row by row as stored.

So neither the order of a file's tensors, nor PEFT's prefix, nor how a configuration spells the
scale counts, nor what it says beside that; a stored dtype does, as does every bit of the values.
Which modules are there says which targets are used and how names are mapped.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.rows import BoundModule, MatrixPair, StoredTensor
from pagedlora.loaders.values import ValueCheck

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FORMAT = "pagedlora adapter 1"
_PLAIN_LORA = 0
_DTYPES = ("F32", "F16", "BF16")
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

ReadPieces = Callable[[int, int], Iterable["Buffer"]]
"""Offset and size in bytes to the bytes between, in pieces."""


class ModuleContent(NamedTuple):
    """One module of an adapter: its name, the factor of B A x, and where its matrices lie."""

    name: str
    scale: float
    pair: MatrixPair


class RowTable:
    """Where an adapter's matrices lie in its file, in 30 bytes a module; immutable.

    Rows are in the order of the model's modules, so that files of equal layout have equal tables.
    """

    __slots__ = ("_dtypes", "_offsets", "modules", "ranks", "scales")

    def __init__(self, modules: Iterable[BoundModule]) -> None:
        """Takes what is needed of an adapter that fits a model."""
        self.modules, self.ranks, self.scales = array("I"), array("I"), array("f")
        self._offsets, self._dtypes = array("Q"), array("B")
        for module in sorted(modules, key=lambda module: module.module_index):
            self.modules.append(module.module_index)
            self.ranks.append(module.pair.rank)
            self.scales.append(module.scale)
            for matrix in module.pair:
                self._offsets.append(matrix.offset)
                self._dtypes.append(_DTYPES.index(matrix.dtype))

    def is_laid_out_as(self, other: RowTable) -> bool:
        """Whether the same plan reads both files."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def contents(self, table: ModuleTable) -> Iterator[ModuleContent]:
        """The modules, with the shapes that the model gives them."""
        for row, (module, rank) in enumerate(zip(self.modules, self.ranks, strict=True)):
            name = table.names[module]
            sizes = table.sizes[name]
            shapes = ([rank, sizes.in_features], [sizes.out_features, rank])
            a, b = (
                StoredTensor(name, _DTYPES[self._dtypes[i]], shape, self._offsets[i])
                for i, shape in zip((2 * row, 2 * row + 1), shapes, strict=True)
            )
            yield ModuleContent(name, self.scales[row], MatrixPair(a, b))


def content_digest(
    modules: Iterable[ModuleContent], read: ReadPieces, check: ValueCheck | None = None
) -> str:
    """The digest of an adapter, in hexadecimal; see the module for what is hashed.

    Args:
        modules: All of the adapter, in any order.
        read: Gives the bytes of the matrices.
        check: Looks at them, too; None: nobody does.

    Raises:
        PagedLoraError: What `read` or `check` raises.
    """
    ordered = sorted(modules, key=lambda module: module.name)
    digest = hashlib.sha256(_text(_FORMAT) + struct.pack("<Q", len(ordered)))
    for module in ordered:
        digest.update(_text(module.name))
        digest.update(struct.pack("<IfI", module.pair.rank, module.scale, _PLAIN_LORA))
        for matrix in module.pair:
            digest.update(_text(matrix.dtype) + struct.pack("<QQ", *matrix.shape))
    for module in ordered:
        for letter, matrix in zip("AB", module.pair, strict=True):
            rows, columns = matrix.shape
            pieces = read(matrix.offset, rows * columns * _ELEMENT_BYTES[matrix.dtype])
            if check is not None:
                tensor = f"{module.name}.lora_{letter}.weight"
                pieces = check.pass_on(tensor, matrix.dtype, pieces)
            for piece in pieces:
                digest.update(piece)
    return digest.hexdigest()


def length_prefixed(value: bytes) -> bytes:
    """Its length in 8 bytes, then the value: joined, different sequences stay different."""
    return struct.pack("<Q", len(value)) + value


def _text(value: str) -> bytes:
    return length_prefixed(value.encode())
