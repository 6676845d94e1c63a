"""From the tensors of an adapter to the rows of a load plan; every tensor is used or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pagedlora import _core
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.peft_config import PeftLoraConfig

_PEFT_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_MATRIX_DIMS = 2
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


class MatrixPair(NamedTuple):
    """The tensors of one module: A [rank, in_features] and B [out_features, rank]."""

    a: StoredTensor
    b: StoredTensor

    @property
    def rank(self) -> int:
        """First dimension of A."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """All pairs of an adapter.

    Attributes:
        modules: Module name (PEFT's prefix removed) to its pair, in the order of the file.
        num_tensors: Tensors used; all of the file's.
    """

    modules: dict[str, MatrixPair]
    num_tensors: int


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
    found: dict[str, dict[str, StoredTensor]] = {}
    num_tensors = 0
    for tensor in tensors:
        module, matrix = _parse_name(tensor, path)
        matrices = found.setdefault(module, {})
        if matrix in matrices:
            raise _error(path, tensor.name, "is there twice, with and without PEFT's prefix")
        matrices[matrix] = tensor
        num_tensors += 1
    if not found:
        raise _error(path, "", "has no tensors: it would answer like the base model")
    pairs = {
        module: _make_pair(module, matrices, config, path) for module, matrices in found.items()
    }
    _check_targets(pairs, config, path)
    return AdapterTensors(pairs, num_tensors)


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
    modules = model_config.modules  # a copy: taken once, not per row
    return [
        _make_row(module, pair, model_config, modules, scale=scale, path=path)
        for module, pair in adapter.modules.items()
    ]


def _parse_name(tensor: StoredTensor, path: str) -> tuple[str, str]:
    """Module and matrix ("A" or "B") of a tensor."""
    name = tensor.name.removeprefix(_PEFT_PREFIX)
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        raise UnsupportedAdapterError(
            f"tensor '{tensor.name}' of '{path}' is neither lora_A.weight nor lora_B.weight of a "
            "module; leaving it out would change the answers, and only plain LoRA is supported",
            field=tensor.name,
        )
    return match["module"], match["matrix"]


def _make_pair(
    module: str, matrices: dict[str, StoredTensor], config: PeftLoraConfig, path: str
) -> MatrixPair:
    for there, missing in (("A", "B"), ("B", "A")):
        if missing not in matrices:
            raise _error(
                path, f"{module}.lora_{missing}.weight", f"is missing: there is only lora_{there}"
            )
    pair = MatrixPair(matrices["A"], matrices["B"])
    for tensor in pair:
        _check_matrix(tensor, path)
    rank_b = pair.b.shape[1]
    if pair.rank != rank_b:
        raise _error(
            path,
            pair.b.name,
            f"has rank {rank_b} (shape {pair.b.shape}), but lora_A has rank {pair.rank} "
            f"(shape {pair.a.shape})",
        )
    if pair.rank != config.r:
        raise _error(
            path, pair.a.name, f"has rank {pair.rank}, but the configuration says r={config.r}"
        )
    return pair


def _check_targets(pairs: dict[str, MatrixPair], config: PeftLoraConfig, path: str) -> None:
    """Refuses tensors that PEFT would not use because no target names their module."""
    targets = config.target_modules
    if isinstance(targets, str):
        return
    for module, pair in pairs.items():
        if not any(module == target or module.endswith(f".{target}") for target in targets):
            raise _error(
                path,
                pair.a.name,
                f"belongs to a module that the configuration's target_modules {list(targets)} do "
                "not name",
            )


def _check_matrix(tensor: StoredTensor, path: str) -> None:
    if tensor.dtype not in _DTYPES:
        raise _error(path, tensor.name, f"has dtype {tensor.dtype}: F32, F16 and BF16 are possible")
    if len(tensor.shape) != _MATRIX_DIMS or min(tensor.shape) < 1:
        raise _error(path, tensor.name, f"has shape {tensor.shape}: a matrix is needed")


def _make_row(
    module: str,
    pair: MatrixPair,
    model_config: _core.LoraModelConfig,
    modules: list[_core.LoraModule],
    *,
    scale: float,
    path: str,
) -> _core.PlannedRow:
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
    sizes = modules[index]
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
