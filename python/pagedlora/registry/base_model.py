"""What an adapter needs of the base model's weights, once: the scales of DoRA, and a comparison."""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pagedlora import _core
from pagedlora.base_weights import BaseWeights, SizesOnly
from pagedlora.dora import dora_scale, squared_row_norms
from pagedlora.errors import UnsupportedAdapterError
from pagedlora.loaders.binding import ZERO_BIAS, BoundAdapter
from pagedlora.loaders.bound import BoundModule
from pagedlora.loaders.source_file import SourceFile
from pagedlora.loaders.stored import DTYPES, StoredTensor
from pagedlora.shown import quoted

if TYPE_CHECKING:
    import torch


Read = Callable[[int, int], Iterator[memoryview]]


class BaseModel:
    """The base model's weights, if anybody gives them, and a file for what follows from them.

    The scales of DoRA must be read again with an evicted adapter, without Python: they are kept in
    a nameless scratch file and lie, to the core, behind the adapter's own bytes. Thread-safe.
    """

    def __init__(self, weights: BaseWeights | None) -> None:
        """Reads nothing and makes no file until an adapter needs one.

        Args:
            weights: None: adapters that need them are refused.
        """
        self._weights = weights
        self._lock = threading.Lock()
        self._scratch: _core.ScratchFile | None = None

    def prepare(
        self, adapter: BoundAdapter, file: SourceFile, source: _core.TensorSource, path: str
    ) -> tuple[_core.TensorSource, dict[str, int]]:
        """Does for an adapter what needs the base model's weights; reads its file if that is so.

        Args:
            adapter: As the model has it.
            file: Its weights.
            source: The same, as the core reads it.
            path: Names it in errors.

        Returns:
            The source with the scales of DoRA and zeros for biases behind it, and where they lie,
            as `make_rows` takes it.

        Raises:
            UnsupportedAdapterError: It is DoRA or repeats weights of the base model, and there are
                no base weights, or others.
            AdapterFormatError: A scale of DoRA is not finite.
            PagedLoraError: The file cannot be read, or the scratch file not be written.
        """
        self._check_dora(adapter, path)
        with_dora = [module for module in adapter.local if module.vectors.magnitude is not None]
        behind = (
            [] if not adapter.zero_bias_bytes else [(ZERO_BIAS, bytes(adapter.zero_bias_bytes))]
        )
        if isinstance(self._weights, SizesOnly):
            behind += [(m.label, bytes(4 * m.pair.b.shape[0])) for m in with_dora]
        elif with_dora or adapter.base_copies:
            with file.open() as read:
                # Without weights it is refused on every rank, whichever has the module.
                for module in adapter.modules if self._weights is None else adapter.local:
                    if module.name in adapter.base_copies:
                        self._compare(module, adapter, read, path)
                behind += [(m.label, self._dora_scale(m, adapter, read, path)) for m in with_dora]
        return self._behind(source, behind)

    def _behind(
        self, source: _core.TensorSource, vectors: list[tuple[str, bytes]]
    ) -> tuple[_core.TensorSource, dict[str, int]]:
        """These vectors of float32 behind a source, as `prepare` returns them."""
        if not vectors:
            return source, {}
        offsets: dict[str, int] = {}
        end = source.size_bytes
        for label, vector in vectors:
            offsets[label] = end
            end += len(vector)
        piece = self._scratch_file().append(b"".join(vector for _, vector in vectors))
        return _core.source_with_tail(source, piece), offsets

    def _check_dora(self, adapter: BoundAdapter, path: str) -> None:
        """Refuses DoRA without base weights: on every rank, whichever has the modules."""
        uses_dora = any(module.vectors.magnitude is not None for module in adapter.modules)
        if uses_dora and self._weights is None:
            raise UnsupportedAdapterError(
                f"{quoted(path)} has use_dora=True, which needs the norms of the base model's "
                "weights: give LoraManager base_weights (an LLM does)",
                field="use_dora",
            )

    def _dora_scale(
        self, module: BoundModule, adapter: BoundAdapter, read: Read, path: str
    ) -> bytes:
        magnitude = module.vectors.magnitude
        assert magnitude is not None
        assert self._weights is not None
        weight = self._weights(module.name)
        if module.whole_a is not None:
            _check_whole(weight, module, path)
        elif adapter.sharding is not None:
            weight = adapter.sharding.weight_here(module.name, weight)
        if module.out_slice is not None:
            weight = weight.narrow(0, *module.out_slice)
        a = _read_tensor(module.whole_a or module.pair.a, read).float()
        b = _read_tensor(module.pair.b, read).float()
        norms = squared_row_norms(weight, a, b, module.scale)
        scale = dora_scale(_read_tensor(magnitude, read), norms, module.label, path)
        return scale.numpy().tobytes()

    def _compare(self, module: BoundModule, adapter: BoundAdapter, read: Read, path: str) -> None:
        """Refuses a copy of a weight that is not the base model's; compares what is given of it."""
        copy = adapter.base_copies[module.name]
        problem = "and there are no base weights to compare it with: give LoraManager base_weights"
        if self._weights is not None:
            weight = self._weights(module.name)
            theirs = _read_tensor(copy, read)
            theirs = theirs.T if module.is_embedding else theirs
            if adapter.sharding is not None and weight.shape != theirs.shape:
                theirs = adapter.sharding.weight_here(module.name, theirs)
            if bool((weight.to("cpu", theirs.dtype) == theirs).all()):
                return
            problem = "which differs from the one that is served"
        raise UnsupportedAdapterError(
            f"tensor {quoted(copy.name)} of {quoted(path)} is a weight of the base model, "
            f"{problem}. Way out: save the adapter with save_embedding_layers=False",
            field=copy.name,
        )

    def _scratch_file(self) -> _core.ScratchFile:
        with self._lock:
            if self._scratch is None:
                self._scratch = _core.ScratchFile(tempfile.gettempdir())
            return self._scratch


def _check_whole(weight: torch.Tensor, module: BoundModule, path: str) -> None:
    """The norms need all columns; a rank of a module that is cut by input has some of them."""
    assert module.whole_a is not None
    needed = (module.pair.b.shape[0], module.whole_a.shape[1])
    if tuple(weight.shape) != needed:
        raise UnsupportedAdapterError(
            f"{quoted(path)} has use_dora=True for module {quoted(module.name)}, which is split "
            f"by its inputs: its norms need the whole weight {list(needed)}, and base_weights "
            f"gives {list(weight.shape)}. Way out: give base_weights that reads whole weights, "
            "from the checkpoint",
            field="use_dora",
        )


def _read_tensor(tensor: StoredTensor, read: Read) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[tensor.dtype].name)
    data = bytearray()
    for piece in read(tensor.offset, math.prod(tensor.shape) * dtype.itemsize):
        data += piece
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
