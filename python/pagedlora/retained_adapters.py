"""Adapters that stay on a device for good, listed by pointer: TensorRT-LLM's mode without a cache.

Its `LoraManager` keeps every adapter's tensors on the GPU when it has no PEFT cache manager, and
hands engines one rank and three pointers per module, layer and sequence (`input_buffers`). This is
for engines that were built for that, and for comparing with them: memory grows with every adapter
that is loaded. Everything else in this package serves from paged tiers, by `LoraManager`.

Adapters are found, parsed, named and checked as there. The lists have no place for a scale, so B is
multiplied by it, in float32, before it is rounded to the model's type; nor for biases, DoRA and
parts of modules with ranks of their own, which are refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagedlora import _core
from pagedlora.arguments import check_type
from pagedlora.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    InvalidArgumentError,
    UnsupportedAdapterError,
)
from pagedlora.loaders.bound import BoundModule
from pagedlora.loaders.fused_modules import FusedModules
from pagedlora.loaders.given_tensors import PeftTensors
from pagedlora.loaders.hf import PeftDirectory
from pagedlora.loaders.load_options import LoadOptions
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.open_adapter import open_adapter, warn_of
from pagedlora.loaders.stored import DTYPES, StoredTensor, element_bytes
from pagedlora.loaders.values import ValueCheck
from pagedlora.registry.names import check_name
from pagedlora.registry.sources import Sources
from pagedlora.shown import quoted, shown
from pagedlora.trtllm_modules import module_names

if TYPE_CHECKING:
    import torch

_Read: TypeAlias = Callable[[int, int], Iterator[memoryview]]


class RetainedRow(NamedTuple):
    """One module of one adapter.

    Attributes:
        module: TensorRT-LLM's name, such as "attn_q".
        layer: Of the whole model.
        a: [rank, in_features], as trained.
        b: [out_features, rank], multiplied by the scale.
    """

    module: str
    layer: int
    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """First dimension of A."""
        return self.a.shape[0]


class _Retained(NamedTuple):
    real_path: str
    rows: dict[tuple[str, int], RetainedRow]


class RetainedAdapters:
    """Adapters by name, whose tensors stay where they are until `unload`. Thread-safe."""

    def __init__(
        self,
        model_config: _core.LoraModelConfig,
        device: str = "cpu",
        *,
        adapter_root: str | os.PathLike[str] | None = None,
        fused_modules: FusedModules | None = None,
        strict: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        """Starts without adapters.

        Args:
            model_config: Its modules have TensorRT-LLM's ids (`from_dims`, `from_hf_config`), its
                dtype is that of the tensors. That of one rank of several: the rank's part.
            device: Where the tensors are kept, as torch names it.
            adapter_root: As in `LoraManager`.
            fused_modules: As in `LoraManager`.
            strict: As in `LoraManager`.
            allow_pickle: As in `LoraManager`.

        Raises:
            InvalidArgumentError: There is no such device, or it keeps no values.
        """
        check_type(model_config, _core.LoraModelConfig, "model_config")
        _check_device(device)
        self._table = ModuleTable(model_config, fused_modules)
        self._modules = list(model_config.modules)
        names = module_names()
        self._keys = [(names.get(m.module_id, ""), m.layer_id) for m in self._modules]
        self._options = LoadOptions(strict, allow_pickle)
        self._sources = Sources(adapter_root, None)
        self._device = device
        self._lock = threading.Lock()
        self._adapters: dict[str, _Retained] = {}

    def load(self, name: str, source: str | os.PathLike[str] | PeftTensors) -> None:
        """Reads an adapter and keeps its tensors on the device; nothing if it is loaded already.

        Args:
            name: How `input_buffers` is asked for it.
            source: As in `LoraManager.register`.

        Raises:
            InvalidArgumentError: The name is impossible, or stands for another source.
            UnsupportedAdapterError: As `LoraManager.register`, or it has what the lists cannot say.
            AdapterFormatError: As there; values are not finite, or over the type's range, also
                after B was multiplied by the scale.
            PagedLoraError: As `LoraManager.register`. Nothing was loaded.
        """
        check_name(name)
        place = self._sources.place(source, f"adapter {quoted(name)}")
        real_path = place.real_path()
        with self._lock:
            if self._is_loaded(name, real_path):
                return
        adapter = open_adapter(place, self._options)
        rows = {(row.module, row.layer): row for row in self._read(adapter)}
        warn_of(adapter.tensors.notes, place)
        with self._lock:
            if not self._is_loaded(name, real_path):
                self._adapters[name] = _Retained(real_path, rows)

    def unload(self, name: str) -> None:
        """Forgets an adapter. Pointers in lists that were made before lead nowhere then.

        Raises:
            AdapterNotFoundError: It is not loaded.
        """
        with self._lock:
            self._find(name)
            del self._adapters[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The loaded adapters, in the order of loading."""
        with self._lock:
            return tuple(self._adapters)

    def rows(self, name: str) -> tuple[RetainedRow, ...]:
        """The tensors of an adapter.

        Raises:
            AdapterNotFoundError: It is not loaded.
        """
        with self._lock:
            return tuple(self._find(name).rows.values())

    def input_buffers(self, names: Sequence[str | None]) -> dict[str, torch.Tensor]:
        """What TensorRT-LLM's engines take beside their other inputs.

        Args:
            names: The adapter of each sequence; None: the base model.

        Returns:
            For each module and layer of the model configuration `MODULE_lora_ranks_LAYER`, int32
            [sequences], and `MODULE_lora_weights_pointers_LAYER`, int64 [sequences, 3]: the
            addresses of A and of B, and 0, where DoRA would have its magnitudes. Rank and addresses
            are 0 where a sequence has no LoRA. On the CPU.

        Raises:
            AdapterNotFoundError: One of them is not loaded.
            InvalidArgumentError: `names` is one string.
        """
        import torch

        if isinstance(names, str):
            raise InvalidArgumentError(
                f"names is {shown(names)}: it must be a list, one a sequence"
            )
        with self._lock:
            adapters = [None if name is None else self._find(name).rows for name in names]
        buffers: dict[str, torch.Tensor] = {}
        for module, layer in self._keys:
            if not module:
                continue
            rows = [None if each is None else each.get((module, layer)) for each in adapters]
            ranks = [0 if row is None else row.rank for row in rows]
            pointers = [
                (0, 0, 0) if row is None else (row.a.data_ptr(), row.b.data_ptr(), 0)
                for row in rows
            ]
            buffers[f"{module}_lora_ranks_{layer}"] = torch.tensor(ranks, dtype=torch.int32)
            buffers[f"{module}_lora_weights_pointers_{layer}"] = torch.tensor(
                pointers, dtype=torch.int64
            ).reshape(len(rows), 3)
        return buffers

    def _is_loaded(self, name: str, real_path: str) -> bool:
        known = self._adapters.get(name)
        if known is not None and known.real_path != real_path:
            raise InvalidArgumentError(
                f"adapter {quoted(name)} is loaded from {quoted(known.real_path)}, not from "
                f"{quoted(real_path)}: unload it, or give the other one another name"
            )
        return known is not None

    def _find(self, name: str) -> _Retained:
        if name not in self._adapters:
            raise AdapterNotFoundError(f"no adapter {quoted(name)} is loaded", name=name)
        return self._adapters[name]

    def _read(self, adapter: PeftDirectory) -> list[RetainedRow]:
        bound = adapter.bind(self._table)
        for module in bound.modules:  # on every rank alike
            _check(module)
        for copy in bound.base_copies.values():
            raise _unsupported(copy.name, "a copy of the base model's weight")
        parts: dict[int, list[BoundModule]] = {}
        for module in bound.local:
            parts.setdefault(module.module_index, []).append(module)
        check = ValueCheck(adapter.weights_path, self._table.config.dtype)
        with adapter.file.open() as read:
            return [
                self._make_row(index, modules, read, check, adapter.weights_path)
                for index, modules in parts.items()
            ]

    def _make_row(
        self, index: int, parts: list[BoundModule], read: _Read, check: ValueCheck, path: str
    ) -> RetainedRow:
        """A row from the parts of a module's outputs that this rank has, which share A."""
        import torch

        first, (module, layer) = parts[0], self._keys[index]
        if not module or self._keys.count((module, layer)) > 1:
            raise _unsupported(
                first.pair.a.name,
                f"module {quoted(first.name)}, which has no TensorRT-LLM id of its own in its "
                "layer",
            )
        dtype: torch.dtype = getattr(torch, self._table.config.dtype.name)
        a = _read_tensor(first.pair.a, first.a_row_stride, read, check)
        ordered = sorted(parts, key=lambda part: part.out_slice or (0, 0))
        b = torch.cat([_read_tensor(part.pair.b, 0, read, check) for part in ordered])
        folded = (b.float() * first.scale).to(dtype)
        if not bool(folded.isfinite().all()):
            raise AdapterFormatError(
                f"tensor {quoted(first.pair.b.name)} of {quoted(path)} has values over the range "
                f"of {dtype} after it is multiplied by the scale {first.scale:g}",
                path=path,
                tensor=first.pair.b.name,
            )
        return RetainedRow(module, layer, a.to(self._device, dtype), folded.to(self._device))


def _check_device(device: str) -> None:
    import torch

    try:
        keeps_values = not torch.empty(0, device=device).is_meta
    except (RuntimeError, AssertionError, TypeError) as error:  # torch has no error of its own
        raise InvalidArgumentError(
            f"device {shown(device)} cannot be used: {error!s:.200}"
        ) from None
    if not keeps_values:
        raise InvalidArgumentError(f"device {shown(device)} keeps no values: pointers lead nowhere")


def _check(module: BoundModule) -> None:
    """Refuses what one rank and two matrices cannot say."""
    bias, magnitude = module.vectors
    if magnitude is not None:
        raise _unsupported(magnitude.name, "DoRA")
    if bias is not None:
        raise _unsupported(bias.name, "a bias of B")
    if module.is_embedding:
        raise _unsupported(module.pair.a.name, "LoRA for an embedding")
    if module.out_slice is not None:
        raise _unsupported(module.pair.a.name, f"a part of the fused module {quoted(module.name)}")


def _unsupported(tensor: str, what: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(
        f"tensor {quoted(tensor)} is for {what}, which TensorRT-LLM's lists of pointers have no "
        "place for. Way out: serve it with LoraManager",
        field=tensor,
    )


def _read_tensor(
    tensor: StoredTensor, row_stride: int, read: _Read, check: ValueCheck
) -> torch.Tensor:
    """A matrix of the source, with `row_stride` elements from row to row; 0: back to back."""
    import torch

    rows, columns = tensor.shape
    stride = row_stride or columns
    size = ((rows - 1) * stride + columns) * element_bytes(tensor.dtype)
    data = bytearray()
    for piece in check.pass_on(tensor.name, tensor.dtype, read(tensor.offset, size)):
        data += piece
    dtype: torch.dtype = getattr(torch, DTYPES[tensor.dtype].name)
    return torch.frombuffer(data, dtype=dtype).as_strided((rows, columns), (stride, 1)).clone()
