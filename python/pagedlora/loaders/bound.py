"""A module of an adapter, as a model has it."""

from __future__ import annotations

from typing import NamedTuple

from pagedlora.loaders.stored import MatrixPair, ModuleVectors, StoredTensor


def row_label(name: str, out_slice: tuple[int, int] | None) -> str:
    """A module's name, with its outputs [first:end] if not all are meant."""
    return name if out_slice is None else f"{name}[{out_slice[0]}:{sum(out_slice)}]"


class BoundModule(NamedTuple):
    """One module of an adapter, as a model has it.

    Attributes:
        module_index: Of the model's module.
        name: The model's.
        scale: The factor of B A x.
        pair: Its matrices, which fit.
        vectors: Its other tensors, which fit.
        is_embedding: As in `AdapterModule`.
        out_slice: First and number of the outputs that it is for; None: all.
        whole_a: A of all ranks, where `pair` has only this rank's columns of it.
        a_row_stride: Elements between the rows of A in the source; 0: they lie back to back.
        has_zero_bias: Whether the bias is zeros here, because another rank adds it.
    """

    module_index: int
    name: str
    scale: float
    pair: MatrixPair
    vectors: ModuleVectors = ModuleVectors()
    is_embedding: bool = False
    out_slice: tuple[int, int] | None = None
    whole_a: StoredTensor | None = None
    a_row_stride: int = 0
    has_zero_bias: bool = False

    @property
    def label(self) -> str:
        """The name, and which of its outputs, if not all: no two modules have the same."""
        return row_label(self.name, self.out_slice)
