"""From the tensors of an adapter to the rows of a load plan; every tensor is used or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pagedlora import _core
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.peft_config import PeftLoraConfig

_PEFT_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPES = {
    "F32": _core.Dtype.float32,
    "F16": _core.Dtype.float16,
    "BF16": _core.Dtype.bfloat16,
}


class StoredTensor(Protocol):
    """A tensor as its file describes it."""

    @property
    def name(self) -> str:
        """As in the file."""

    @property
    def dtype(self) -> str:
        """As safetensors spells it: "F32", "BF16", ..."""

    @property
    def shape(self) -> list[int]:
        """Sizes of its dimensions."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the source."""


@dataclass(slots=True)
class ModuleTensors:
    """The pair of one module."""

    a: StoredTensor | None = None
    b: StoredTensor | None = None

    @property
    def rank(self) -> int:
        """First dimension of A."""
        assert self.a is not None
        return self.a.shape[0]


@dataclass(slots=True)
class AdapterTensors:
    """All pairs of an adapter by module name, in the order of the file.

    Attributes:
        modules: Module name (PEFT's prefix removed) to its pair; both members are there.
        num_tensors: Tensors used; all of the file's.
    """

    modules: dict[str, ModuleTensors] = field(default_factory=dict)
    num_tensors: int = 0


def pair_tensors(
    tensors: Iterable[StoredTensor], config: PeftLoraConfig, path: str
) -> AdapterTensors:
    """Pairs the tensors of an adapter and checks them against its configuration.

    Args:
        tensors: All of the file.
        config: Says the rank.
        path: Named in errors.

    Returns:
        The pairs.

    Raises:
        AdapterFormatError: There are no tensors, one is no LoRA matrix, half a pair, or of a
            shape or type that cannot be.
        UnsupportedAdapterError: A tensor belongs to something that is not plain LoRA.
    """
    adapter = AdapterTensors()
    for tensor in tensors:
        module, matrix = _parse_name(tensor, path)
        pair = adapter.modules.setdefault(module, ModuleTensors())
        if getattr(pair, matrix) is not None:
            raise _error(path, tensor.name, "is there twice, with and without PEFT's prefix")
        setattr(pair, matrix, tensor)
        adapter.num_tensors += 1
    if not adapter.modules:
        raise _error(path, "", "has no tensors: it would answer like the base model")
    for module, pair in adapter.modules.items():
        _check_pair(module, pair, config, path)
    return adapter


def make_rows(
    adapter: AdapterTensors, model_config: _core.LoraModelConfig, scale: float, path: str
) -> list[_core.PlannedRow]:
    """The rows of a load plan.

    Args:
        adapter: Checked pairs.
        model_config: The modules that can carry LoRA.
        scale: Of every row.
        path: Named in errors.

    Returns:
        One row per module of the adapter.

    Raises:
        AdapterFormatError: The model has no such module, or one of other sizes.
        UnsupportedAdapterError: The rank is over the maximum.
    """
    return [
        _make_row(module, pair, model_config, scale, path)
        for module, pair in adapter.modules.items()
    ]


def _parse_name(tensor: StoredTensor, path: str) -> tuple[str, str]:
    name = tensor.name.removeprefix(_PEFT_PREFIX)
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        raise UnsupportedAdapterError(
            f"tensor '{tensor.name}' of '{path}' is neither lora_A.weight nor lora_B.weight of a "
            "module; leaving it out would change the answers, and only plain LoRA is supported",
            field=tensor.name,
        )
    return match["module"], match["matrix"].lower()


def _check_pair(module: str, pair: ModuleTensors, config: PeftLoraConfig, path: str) -> None:
    if pair.a is None or pair.b is None:
        there, missing = ("lora_A", "lora_B") if pair.b is None else ("lora_B", "lora_A")
        raise _error(path, f"{module}.{missing}.weight", f"is missing: there is only {there}")
    for tensor in (pair.a, pair.b):
        if tensor.dtype not in _DTYPES:
            raise _error(
                path, tensor.name, f"has dtype {tensor.dtype}: F32, F16 and BF16 are possible"
            )
        if len(tensor.shape) != 2 or min(tensor.shape) < 1:
            raise _error(path, tensor.name, f"has shape {tensor.shape}: a matrix is needed")
    rank_a, rank_b = pair.a.shape[0], pair.b.shape[1]
    if rank_a != rank_b:
        raise _error(
            path,
            pair.b.name,
            f"has rank {rank_b} (shape {pair.b.shape}), but lora_A has rank {rank_a} "
            f"(shape {pair.a.shape})",
        )
    if rank_a != config.r:
        raise _error(
            path, pair.a.name, f"has rank {rank_a}, but the configuration says r={config.r}"
        )


def _make_row(
    module: str,
    pair: ModuleTensors,
    model_config: _core.LoraModelConfig,
    scale: float,
    path: str,
) -> _core.PlannedRow:
    assert pair.a is not None and pair.b is not None
    index = model_config.find(module)
    if index is None:
        raise _error(
            path,
            pair.a.name,
            f"belongs to module '{module}', which the model does not have or which is not among "
            "its LoRA target modules",
        )
    if pair.rank > model_config.max_lora_rank:
        raise UnsupportedAdapterError(
            f"LoRA rank {pair.rank} is greater than max_lora_rank {model_config.max_lora_rank}: "
            f"raise max_lora_rank to serve '{path}'",
            field="r",
        )
    sizes = model_config.modules[index]
    for tensor, expected in (
        (pair.a, [pair.rank, sizes.in_features]),
        (pair.b, [sizes.out_features, pair.rank]),
    ):
        if list(tensor.shape) != expected:
            raise _error(
                path, tensor.name, f"has shape {list(tensor.shape)}; the model needs {expected}"
            )
    return _core.PlannedRow(
        index,
        pair.rank,
        scale,
        pair.a.offset,
        _DTYPES[pair.a.dtype],
        pair.b.offset,
        _DTYPES[pair.b.dtype],
    )


def _error(path: str, tensor: str, problem: str) -> AdapterFormatError:
    subject = f"tensor '{tensor}' of '{path}'" if tensor else f"'{path}'"
    return AdapterFormatError(f"{subject} {problem}", path=path, tensor=tensor)
