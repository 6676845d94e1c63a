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
from pagedlora.loaders.binding import BoundAdapter, BoundModule
from pagedlora.loaders.source_file import SourceFile
from pagedlora.loaders.stored import StoredTensor

if TYPE_CHECKING:
    import torch

_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

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
        self, adapter: BoundAdapter, file: SourceFile, source: _core.TensorSource
    ) -> tuple[_core.TensorSource, dict[str, int]]:
        """Does for an adapter what needs the base model's weights; reads its file if that is so.

        Args:
            adapter: As the model has it.
            file: Its weights.
            source: The same, as the core reads it.

        Returns:
            The source with the scales of DoRA behind it, and label of a module to where its scale
            lies.

        Raises:
            UnsupportedAdapterError: It is DoRA or repeats weights of the base model, and there are
                no base weights, or others.
            AdapterFormatError: A scale of DoRA is not finite.
            PagedLoraError: The file cannot be read, or the scratch file not be written.
        """
        with_dora = [module for module in adapter.modules if module.vectors.magnitude is not None]
        if not with_dora and not adapter.base_copies:
            return source, {}
        if isinstance(self._weights, SizesOnly):
            scales = [bytes(4 * module.pair.b.shape[0]) for module in with_dora]
            return self._behind(source, with_dora, scales)
        with file.open() as read:
            for module in adapter.modules:
                if module.name in adapter.base_copies:
                    self._compare(module, adapter.base_copies[module.name], read, file.path)
            scales = [self._dora_scale(module, read, file.path) for module in with_dora]
        return self._behind(source, with_dora, scales)

    def _behind(
        self, source: _core.TensorSource, modules: list[BoundModule], scales: list[bytes]
    ) -> tuple[_core.TensorSource, dict[str, int]]:
        """The scales of these modules behind a source, as `prepare` returns them."""
        if not scales:
            return source, {}
        offsets: dict[str, int] = {}
        end = source.size_bytes
        for module, scale in zip(modules, scales, strict=True):
            offsets[module.label] = end
            end += len(scale)
        piece = self._scratch_file().append(b"".join(scales))
        return _core.source_with_tail(source, piece), offsets

    def _dora_scale(self, module: BoundModule, read: Read, path: str) -> bytes:
        magnitude = module.vectors.magnitude
        assert magnitude is not None
        if self._weights is None:
            raise UnsupportedAdapterError(
                f"'{path}' has use_dora=True, which needs the norms of the base model's weights: "
                "give LoraManager base_weights (an LLM does)",
                field="use_dora",
            )
        a, b = (_read_tensor(tensor, read).float() for tensor in module.pair)
        weight = self._weights(module.name)
        if module.out_slice is not None:
            weight = weight.narrow(0, *module.out_slice)
        norms = squared_row_norms(weight, a, b, module.scale)
        scale = dora_scale(_read_tensor(magnitude, read), norms, module.label, path)
        return scale.numpy().tobytes()

    def _compare(self, module: BoundModule, copy: StoredTensor, read: Read, path: str) -> None:
        """Refuses a copy of a weight that is not the base model's."""
        problem = "and there are no base weights to compare it with: give LoraManager base_weights"
        if self._weights is not None:
            weight = self._weights(module.name)
            ours = weight.T if module.is_embedding else weight
            theirs = _read_tensor(copy, read)
            if bool((ours.to("cpu", theirs.dtype) == theirs).all()):
                return
            problem = "which differs from the one that is served"
        raise UnsupportedAdapterError(
            f"tensor '{copy.name:.200}' of '{path}' is a weight of the base model, {problem}. Way "
            "out: save the adapter with save_embedding_layers=False",
            field=copy.name,
        )

    def _scratch_file(self) -> _core.ScratchFile:
        with self._lock:
            if self._scratch is None:
                self._scratch = _core.ScratchFile(tempfile.gettempdir())
            return self._scratch


def _read_tensor(tensor: StoredTensor, read: Read) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[tensor.dtype])
    data = bytearray()
    for piece in read(tensor.offset, math.prod(tensor.shape) * dtype.itemsize):
        data += piece
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
