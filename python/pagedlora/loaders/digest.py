"""The digest that tells one adapter's content from another: SHA-256, the same in every process.

Hashed are, in this order, all numbers little-endian and every text as its length in bytes (8) and
its UTF-8:

1. the text `pagedlora adapter 1`;
2. the number of modules (8 bytes);
3. for each module, sorted by name (without PEFT's prefix): its name; its rank (4 bytes); its
   scale, the factor of B A x, as the float32 that is computed with; its flags (4 bytes: the sum of
   1 with DoRA, 2 with a bias of B, 4 for an embedding); then for A and for B the dtype as
   safetensors spells it (a text) and the two dimensions (8 bytes each), and for the bias and the
   magnitude of DoRA, where there is one, the dtype and the length (8 bytes);
4. for each module in the same order the bytes of A, those of B, row by row as stored, and those of
   the bias and of the magnitude.

So neither the order of a file's tensors, nor PEFT's prefix, nor how a configuration spells the
scale counts, nor what it says beside that; a stored dtype does, as does every bit of the values.
Which modules are there says which targets are used and how names are mapped.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pagedlora.loaders.bound import BoundModule, row_label
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.stored import MatrixPair, ModuleVectors, StoredTensor, element_bytes
from pagedlora.loaders.values import ValueCheck

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FORMAT = "pagedlora adapter 1"
_DORA, _BIAS, _EMBEDDING = 1, 2, 4
_DTYPES = ("F32", "F16", "BF16")

ReadPieces = Callable[[int, int], Iterable["Buffer"]]
"""Offset and size in bytes to the bytes between, in pieces."""


class ModuleContent(NamedTuple):
    """One module of an adapter: its name, the factor of B A x, and where its tensors lie."""

    name: str
    scale: float
    pair: MatrixPair
    vectors: ModuleVectors = ModuleVectors()
    is_embedding: bool = False

    @property
    def flags(self) -> int:
        """What tells its kind."""
        bias, magnitude = self.vectors
        return (
            (magnitude is not None) * _DORA
            + (bias is not None) * _BIAS
            + self.is_embedding * _EMBEDDING
        )

    @property
    def tensors(self) -> Iterator[tuple[str, StoredTensor, bool]]:
        """Names of its parts, the tensors, and whether they are vectors."""
        prefix = "lora_embedding_" if self.is_embedding else "lora_"
        yield f"{self.name}.{prefix}A.weight", self.pair.a, False
        yield f"{self.name}.{prefix}B.weight", self.pair.b, False
        if self.vectors.bias is not None:
            yield f"{self.name}.lora_B.bias", self.vectors.bias, True
        if self.vectors.magnitude is not None:
            yield f"{self.name}.lora_magnitude_vector", self.vectors.magnitude, True


class RowTable:
    """Where an adapter's matrices lie in its file, in 30 bytes a module; immutable.

    Rows are in the order of the model's modules, so that files of equal layout have equal tables.
    """

    __slots__ = ("_dtypes", "_offsets", "_slices", "_vectors", "modules", "ranks", "scales")

    def __init__(self, modules: Sequence[BoundModule]) -> None:
        """Takes what is needed of an adapter that fits a model."""
        self.modules, self.ranks, self.scales = array("I"), array("I"), array("f")
        self._offsets, self._dtypes = array("Q"), array("B")
        self._slices: dict[int, tuple[int, int]] = {}  # by row; only those of parts
        self._vectors: dict[int, tuple[tuple[int, str] | None, ...]] = {}
        for row, module in enumerate(sorted(modules, key=_position)):
            self.modules.append(module.module_index)
            self.ranks.append(module.pair.rank)
            self.scales.append(module.scale)
            for matrix in module.pair:
                self._offsets.append(matrix.offset)
                self._dtypes.append(_DTYPES.index(matrix.dtype))
            if module.out_slice is not None:
                self._slices[row] = module.out_slice
            if module.vectors.there:
                self._vectors[row] = tuple(v and (v.offset, v.dtype) for v in module.vectors)

    def labels(self, table: ModuleTable) -> list[str]:
        """What the rows are for: `BoundModule.label` of each."""
        names = (table.names[index] for index in self.modules)
        return [row_label(name, self._slices.get(row)) for row, name in enumerate(names)]

    def is_laid_out_as(self, other: RowTable) -> bool:
        """Whether the same plan reads both files."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def contents(self, table: ModuleTable) -> Iterator[ModuleContent]:
        """The modules, with the shapes that the model gives them."""
        for row, label in enumerate(self.labels(table)):
            rank, sizes = self.ranks[row], table.sizes[table.names[self.modules[row]]]
            out = self._slices[row][1] if row in self._slices else sizes.out_features
            shapes = ([rank, sizes.in_features], [out, rank])
            a, b = (
                StoredTensor(label, _DTYPES[self._dtypes[i]], shape, self._offsets[i])
                for i, shape in zip((2 * row, 2 * row + 1), shapes, strict=True)
            )
            vectors = ModuleVectors(
                *(v and StoredTensor(label, v[1], [out], v[0]) for v in self._vectors.get(row, ()))
            )
            pair = MatrixPair(a, b)
            yield ModuleContent(label, self.scales[row], pair, vectors, sizes.is_embedding)


def _position(module: BoundModule) -> tuple[int, int]:
    return module.module_index, module.out_slice[0] if module.out_slice else 0


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
        digest.update(struct.pack("<IfI", module.pair.rank, module.scale, module.flags))
        for _, tensor, _ in module.tensors:
            sizes = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
            digest.update(_text(tensor.dtype) + sizes)
    for module in ordered:
        for name, tensor, is_vector in module.tensors:
            pieces = read(tensor.offset, math.prod(tensor.shape) * element_bytes(tensor.dtype))
            if check is not None:
                pieces = check.pass_on(name, tensor.dtype, pieces, is_vector=is_vector)
            for piece in pieces:
                digest.update(piece)
    return digest.hexdigest()


def length_prefixed(value: bytes) -> bytes:
    """Its length in 8 bytes, then the value: joined, different sequences stay different."""
    return struct.pack("<Q", len(value)) + value


def _text(value: str) -> bytes:
    return length_prefixed(value.encode())
