"""From the tensors of an adapter to the rows of a load plan; every tensor is used or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagedlora import _core
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.coverage import CoverageReport, counted
from pagedlora.loaders.module_rules import ModuleRules, ModuleScaling
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.peft_config import PeftLoraConfig
from pagedlora.loaders.tensor_names import (
    AmbiguousNameError,
    TensorKind,
    renamings,
    split_name,
    why_unsupported,
)

_MATRIX_DIMS = 2
_SHOWN_TARGETS = 5
_MAX_NOTES = 20
_DTYPES = {
    "F32": _core.Dtype.float32,
    "F16": _core.Dtype.float16,
    "BF16": _core.Dtype.bfloat16,
}
TORCH_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
"""The possible types of tensors in memory, and how safetensors spells them."""
_ZERO_3 = "training under DeepSpeed ZeRO-3 saves such files unless the weights are gathered first"


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


class AdapterModule(NamedTuple):
    """One module of an adapter, without a model.

    Attributes:
        raw: Its name in the file, without PEFT's prefix.
        pair: Its tensors.
        scale: The factor of B A x.
    """

    raw: str
    pair: MatrixPair
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """All modules of an adapter.

    Attributes:
        modules: Module name (without what savers put around it) to the module, in the order of
            the file.
        num_tensors: Tensors used; all of the file's.
        adapter_name: That in the tensors' names; "" if there is none.
        rules: What the configuration says about modules; None where there is no configuration.
        starts_at_zero: As in `PeftLoraConfig`.
        notes: What was ignored, and why.
    """

    modules: dict[str, AdapterModule]
    num_tensors: int
    adapter_name: str = ""
    rules: ModuleRules | None = None
    starts_at_zero: bool = True
    notes: tuple[str, ...] = ()


class BoundModule(NamedTuple):
    """One module of an adapter, as a model has it.

    Attributes:
        module_index: Of the model's module.
        name: The model's.
        scale: The factor of B A x.
        pair: Its tensors, which fit.
    """

    module_index: int
    name: str
    scale: float
    pair: MatrixPair


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """All modules of an adapter, as a model has them, in the order of the file.

    Attributes:
        modules: One for each module of the adapter.
        report: What became of its tensors.
    """

    modules: tuple[BoundModule, ...]
    report: CoverageReport


def pair_tensors(
    tensors: Sequence[StoredTensor], config: PeftLoraConfig, path: str, *, strict: bool = True
) -> AdapterTensors:
    """Pairs the tensors of an adapter and checks them against its configuration.

    Args:
        tensors: All of the file.
        config: Says which modules are meant, their ranks and scales.
        path: Named in errors.
        strict: Whether keys of patterns that no module needs are refused, or noted.

    Returns:
        The modules.

    Raises:
        AdapterFormatError: There are no tensors, one is no LoRA matrix, half a pair, or of a
            shape or type that cannot be; a rank is not the configuration's.
        UnsupportedAdapterError: A tensor belongs to something that is not supported.
    """
    found: dict[str, dict[TensorKind, StoredTensor]] = {}
    adapter_names: set[str] = set()
    num_tensors = 0
    for tensor in tensors:
        name = split_name(tensor.name)
        if why_unsupported(name.kind) is not None:
            raise _unsupported(tensors, path)
        kinds = found.setdefault(name.module, {})
        if name.kind in kinds:
            raise _error(
                path, tensor.name, f"is there twice, the other time as '{kinds[name.kind].name}'"
            )
        kinds[name.kind] = tensor
        adapter_names.add(name.adapter)
        num_tensors += 1
    if not found:
        raise _error(path, "", f"has no tensors: it would answer like the base model; {_ZERO_3}")
    rules = ModuleRules(config, path)
    modules = {
        module: _make_module(module, kinds, rules, config, path) for module, kinds in found.items()
    }
    notes = (*config.notes, *_check_unused_keys(rules, strict))
    adapter_name = _one_name(adapter_names - {""}, path)
    return AdapterTensors(modules, num_tensors, adapter_name, rules, config.starts_at_zero, notes)


def bind(adapter: AdapterTensors, table: ModuleTable, path: str) -> BoundAdapter:
    """Finds the model's modules for those of an adapter.

    Args:
        adapter: Checked modules.
        table: The modules that can carry LoRA.
        path: Named in errors.

    Returns:
        The same with the model's names.

    Raises:
        AdapterFormatError: The model has no such module, several, or one of other sizes; or PEFT
            would draw weights for modules that the configuration targets and the file lacks.
        UnsupportedAdapterError: The rank is over the maximum.
    """
    modules: dict[str, BoundModule] = {}
    changes: list[str] = []
    for file_name, module in adapter.modules.items():
        bound = _bind_module(file_name, module, table, path)
        if bound.name in modules:
            raise _error(path, module.pair.a.name, f"is a second one for module '{bound.name}'")
        modules[bound.name] = bound
        changes.extend(renamings(module.raw, bound.name))
    if adapter.adapter_name:
        changes.extend([f"adapter name '{adapter.adapter_name:.80}' taken away"] * len(modules))
    report = CoverageReport(
        used=adapter.num_tensors,
        renamed=counted(changes),
        ignored=adapter.notes,
        missing=_count_missing(adapter, modules, table, path),
        casts=_casts(modules.values(), table),
    )
    return BoundAdapter(tuple(modules.values()), report)


def make_rows(modules: Iterable[BoundModule]) -> list[_core.PlannedRow]:
    """The rows of a load plan, one for each module."""
    return [
        _core.PlannedRow(
            module.module_index,
            module.pair.rank,
            module.scale,
            module.pair.a.offset,
            _DTYPES[module.pair.a.dtype],
            module.pair.b.offset,
            _DTYPES[module.pair.b.dtype],
        )
        for module in modules
    ]


def whole_tensors(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Those that would replace weights of the base model."""
    kinds = (TensorKind.WHOLE, TensorKind.MODULE_BIAS)
    return [tensor for tensor in tensors if split_name(tensor.name).kind in kinds]


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


# ---- one tensor, one pair ----------------------------------------------------------------------


def _unsupported(tensors: Iterable[StoredTensor], path: str) -> UnsupportedAdapterError:
    """Names the tensor that says most about what the adapter is."""
    kinds = list(TensorKind)
    found = [(kinds.index(split_name(tensor.name).kind), tensor) for tensor in tensors]
    bad = [(kind, tensor) for kind, tensor in found if why_unsupported(kinds[kind]) is not None]
    kind, tensor = min(bad, key=lambda each: each[0])
    return UnsupportedAdapterError(
        f"tensor '{tensor.name:.200}' of '{path}', shape {tensor.shape}, cannot be used, and "
        f"leaving it out would change the answers: {why_unsupported(kinds[kind])}",
        field=tensor.name,
    )


def _one_name(names: set[str], path: str) -> str:
    """The name of the adapter in the tensors' names; "" if there is none."""
    if len(names) > 1:
        shown = ", ".join(f"'{name:.80}'" for name in sorted(names)[:_SHOWN_TARGETS])
        raise _error(path, "", f"has the tensors of {len(names)} adapters, {shown}: save one")
    return next(iter(names), "")


def _make_module(
    module: str,
    kinds: Mapping[TensorKind, StoredTensor],
    rules: ModuleRules,
    config: PeftLoraConfig,
    path: str,
) -> AdapterModule:
    a, b = kinds.get(TensorKind.A), kinds.get(TensorKind.B)
    if a is None or b is None:
        there, missing = ("B", "A") if a is None else ("A", "B")
        raise _error(
            path, f"{module}.lora_{missing}.weight", f"is missing: there is only lora_{there}"
        )
    if not rules.is_target(module):
        raise _error(
            path,
            a.name,
            f"belongs to a module that the configuration does not target: {_targets(config)}",
        )
    _check_matrix(a, path)
    _check_matrix(b, path)
    scaling = rules.scaling(module)
    _check_ranks(a, b, scaling, path)
    return AdapterModule(split_name(a.name).raw, MatrixPair(a, b), scaling.scale)


def _check_ranks(a: StoredTensor, b: StoredTensor, scaling: ModuleScaling, path: str) -> None:
    rank_a, rank_b = a.shape[0], b.shape[1]
    if rank_a == rank_b == scaling.rank:
        return
    if a.shape[1] == b.shape[0] == scaling.rank:
        raise _error(
            path,
            b.name,
            f"is transposed, shape {b.shape}, and so is lora_A, shape {a.shape}: A is "
            "[rank, in_features], B is [out_features, rank]",
        )
    if rank_a != rank_b:
        raise _error(
            path,
            b.name,
            f"has rank {rank_b} (shape {b.shape}), but lora_A has rank {rank_a} (shape {a.shape})",
        )
    raise _error(
        path, a.name, f"has rank {rank_a}, but the configuration says {scaling.rank_source}"
    )


def _check_matrix(tensor: StoredTensor, path: str) -> None:
    if tensor.dtype not in _DTYPES:
        raise _error(path, tensor.name, f"has dtype {tensor.dtype}: F32, F16 and BF16 are possible")
    shape = tensor.shape
    if 0 in shape:
        raise _error(path, tensor.name, f"is empty, shape {shape}; {_ZERO_3}")
    if len(shape) != _MATRIX_DIMS:
        raise _error(path, tensor.name, f"has shape {tensor.shape}: a matrix is needed")


# ---- against the configuration -----------------------------------------------------------------


def _check_unused_keys(rules: ModuleRules, strict: bool) -> list[str]:
    notes: list[str] = []
    for field, key in rules.unused_keys():
        problem = f"{field}[{key!r:.80}], which matches no module of the adapter"
        if strict:
            raise UnsupportedAdapterError(
                f"the adapter's configuration has {problem}: the scale that was meant for some "
                "module may be missing. Way out: correct it, or ignore such keys with strict=False",
                field=field,
            )
        if len(notes) < _MAX_NOTES:
            notes.append(f"ignored {problem}")
    return notes


def _targets(config: PeftLoraConfig) -> str:
    parts = [f"target_modules {_first_names(config.target_modules)}"]
    if config.exclude_modules:
        parts.append(f"exclude_modules {_first_names(config.exclude_modules)}")
    if config.layers_to_transform:
        parts.append(f"layers_to_transform {list(config.layers_to_transform)!r:.80}")
    return ", ".join(parts)


def _first_names(names: Sequence[str] | str) -> str:
    if isinstance(names, str):
        return f"{names!r:.80}"
    shown = ", ".join(f"{name!r:.80}" for name in names[:_SHOWN_TARGETS])
    more = len(names) - _SHOWN_TARGETS
    return f"{shown} and {more} more" if more > 0 else shown


def _count_missing(
    adapter: AdapterTensors, there: Mapping[str, BoundModule], table: ModuleTable, path: str
) -> int:
    """Modules of the model that the configuration targets and the file has no tensors for."""
    rules = adapter.rules
    if rules is None or len(there) == len(table.names):
        return 0
    missing = [name for name in table.names if name not in there and rules.is_target(name)]
    if missing and not adapter.starts_at_zero:
        raise _error(
            path,
            f"{missing[0]}.lora_A.weight",
            f"is missing, though the configuration targets its module ({len(missing)} such): with "
            "its init_lora_weights PEFT would draw random weights",
        )
    return len(missing)


# ---- against a model ---------------------------------------------------------------------------


def _bind_module(
    file_name: str, module: AdapterModule, table: ModuleTable, path: str
) -> BoundModule:
    a, b = module.pair
    try:
        name = table.matcher.find(module.raw, file_name)
    except AmbiguousNameError as error:
        raise _error(
            path, a.name, f"belongs to module '{file_name}', which could be {error} of the model"
        ) from None
    if name is None:
        raise _error(
            path,
            a.name,
            f"belongs to module '{file_name}', which the model does not have or which is not "
            "among its LoRA target modules",
        )
    sizes = table.sizes[name]
    rank = module.pair.rank
    check_rank(rank, table.max_lora_rank, path)
    _check_shape(a, [rank, sizes.in_features], path)
    _check_shape(b, [sizes.out_features, rank], path)
    return BoundModule(sizes.module_index, name, module.scale, module.pair)


def _check_shape(tensor: StoredTensor, needed: list[int], path: str) -> None:
    if tensor.shape == needed:
        return
    transposed = ": it is transposed" if tensor.shape == needed[::-1] else ""
    raise _error(
        path, tensor.name, f"has shape {tensor.shape}; the model needs {needed}{transposed}"
    )


def _casts(modules: Iterable[BoundModule], table: ModuleTable) -> tuple[tuple[str, str, int], ...]:
    target = table.config.dtype
    stored = counted(matrix.dtype for module in modules for matrix in module.pair)
    return tuple((dtype, target.name, n) for dtype, n in stored if _DTYPES[dtype] != target)


def _error(path: str, tensor: str, problem: str) -> AdapterFormatError:
    subject = f"tensor '{tensor:.200}' of '{path}'" if tensor else f"'{path}'"
    return AdapterFormatError(f"{subject} {problem}", path=path, tensor=tensor)
