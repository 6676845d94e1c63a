"""From the tensors of an adapter to the rows of a load plan; every tensor is used or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pagedlora import _core
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.peft_config import PeftLoraConfig

_PEFT_PREFIX = "base_model.model."
_MATRIX_OF_SUFFIX = {"A.weight": "A", "B.weight": "B"}
_MATRIX_DIMS = 2
_SHOWN_TARGETS = 5
_DTYPES = {
    "F32": _core.Dtype.float32,
    "F16": _core.Dtype.float16,
    "BF16": _core.Dtype.bfloat16,
}
TORCH_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
"""The possible types of tensors in memory, and how safetensors spells them."""


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


def canonical_name(name: str) -> str:
    """A tensor's name without PEFT's prefix, which files have or have not."""
    return name.removeprefix(_PEFT_PREFIX)


def make_rows(
    adapter: AdapterTensors, table: ModuleTable, scale: float, path: str
) -> list[_core.PlannedRow]:
    """The rows of a load plan.

    Args:
        adapter: Checked pairs.
        table: The modules that can carry LoRA.
        scale: Of every row.
        path: Named in errors.

    Returns:
        One row per module of the adapter.

    Raises:
        AdapterFormatError: The model has no such module, or one of other sizes.
        UnsupportedAdapterError: The rank is over the maximum.
    """
    return [_make_row(module, pair, table, scale, path) for module, pair in adapter.modules.items()]


def check_rank(rank: int, max_lora_rank: int, path: str) -> None:
    """Refuses a rank that the model's configuration does not allow.

    Raises:
        UnsupportedAdapterError: The rank is over the maximum.
    """
    if rank > max_lora_rank:
        raise UnsupportedAdapterError(
            f"LoRA rank {rank} is greater than max_lora_rank {max_lora_rank}: "
            f"raise max_lora_rank to serve '{path}'",
            field="r",
        )


def _parse_name(tensor: StoredTensor, path: str) -> tuple[str, str]:
    """Module and matrix ("A" or "B") of a tensor."""
    module, _, suffix = canonical_name(tensor.name).rpartition(".lora_")
    matrix = _MATRIX_OF_SUFFIX.get(suffix)
    if matrix is None or not module:
        raise UnsupportedAdapterError(
            f"tensor '{tensor.name}' of '{path}' is neither lora_A.weight nor lora_B.weight of a "
            "module; leaving it out would change the answers, and only plain LoRA is supported",
            field=tensor.name,
        )
    return module, matrix


def _make_pair(
    module: str, matrices: dict[str, StoredTensor], config: PeftLoraConfig, path: str
) -> MatrixPair:
    a, b = matrices.get("A"), matrices.get("B")
    if a is None or b is None:
        there, missing = ("B", "A") if a is None else ("A", "B")
        raise _error(
            path, f"{module}.lora_{missing}.weight", f"is missing: there is only lora_{there}"
        )
    _check_matrix(a, path)
    _check_matrix(b, path)
    rank_a, rank_b = a.shape[0], b.shape[1]
    if rank_a != rank_b:
        raise _error(
            path,
            b.name,
            f"has rank {rank_b} (shape {b.shape}), but lora_A has rank {rank_a} (shape {a.shape})",
        )
    if rank_a != config.r:
        raise _error(path, a.name, f"has rank {rank_a}, but the configuration says r={config.r}")
    return MatrixPair(a, b)


def _check_targets(pairs: dict[str, MatrixPair], config: PeftLoraConfig, path: str) -> None:
    """Refuses tensors that PEFT would not use because no target names their module."""
    if isinstance(config.target_modules, str):
        return
    targets = frozenset(config.target_modules)
    for module, pair in pairs.items():
        if targets.isdisjoint(_dotted_suffixes(module)):
            raise _error(
                path,
                pair.a.name,
                "belongs to a module that the configuration's target_modules do not name: "
                f"{_first_targets(config.target_modules)}",
            )


def _dotted_suffixes(module: str) -> Iterator[str]:
    """Its last part, its last two, ..., all of it: PEFT takes a target for any of them."""
    dot = module.rfind(".")
    while dot >= 0:
        yield module[dot + 1 :]
        dot = module.rfind(".", 0, dot)
    yield module


def _first_targets(targets: tuple[str, ...]) -> str:
    shown = ", ".join(f"{target!r:.80}" for target in targets[:_SHOWN_TARGETS])
    more = len(targets) - _SHOWN_TARGETS
    return f"{shown} and {more} more" if more > 0 else shown


def _check_matrix(tensor: StoredTensor, path: str) -> None:
    if tensor.dtype not in _DTYPES:
        raise _error(path, tensor.name, f"has dtype {tensor.dtype}: F32, F16 and BF16 are possible")
    shape = tensor.shape
    if len(shape) != _MATRIX_DIMS or shape[0] < 1 or shape[1] < 1:
        raise _error(path, tensor.name, f"has shape {tensor.shape}: a matrix is needed")


def _make_row(
    module: str, pair: MatrixPair, table: ModuleTable, scale: float, path: str
) -> _core.PlannedRow:
    sizes = table.sizes.get(module)
    if sizes is None:
        raise _error(
            path,
            pair.a.name,
            f"belongs to module '{module}', which the model does not have or which is not among "
            "its LoRA target modules",
        )
    a, b = pair
    rank = pair.rank
    check_rank(rank, table.max_lora_rank, path)
    _check_shape(a, [rank, sizes.in_features], path)
    _check_shape(b, [sizes.out_features, rank], path)
    return _core.PlannedRow(
        sizes.module_index, rank, scale, a.offset, _DTYPES[a.dtype], b.offset, _DTYPES[b.dtype]
    )


def _check_shape(tensor: StoredTensor, needed: list[int], path: str) -> None:
    if tensor.shape != needed:
        raise _error(path, tensor.name, f"has shape {tensor.shape}; the model needs {needed}")


def _error(path: str, tensor: str, problem: str) -> AdapterFormatError:
    subject = f"tensor '{tensor}' of '{path}'" if tensor else f"'{path}'"
    return AdapterFormatError(f"{subject} {problem}", path=path, tensor=tensor)
