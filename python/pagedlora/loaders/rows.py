"""From the tensors of an adapter to the rows of a load plan; every tensor is used or refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedlora import _core
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.coverage import CoverageReport, counted
from pagedlora.loaders.fused_modules import Part, renamed
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


_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a possible type, as safetensors spells it."""
    return _ELEMENT_BYTES[dtype]


def row_label(name: str, out_slice: tuple[int, int] | None) -> str:
    """A module's name, with its outputs [first:end] if not all are meant."""
    return name if out_slice is None else f"{name}[{out_slice[0]}:{sum(out_slice)}]"


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


class ModuleVectors(NamedTuple):
    """What a module may have beside A and B.

    Attributes:
        bias: Of B, [out_features].
        magnitude: Of DoRA, as trained, [out_features].
    """

    bias: StoredTensor | None = None
    magnitude: StoredTensor | None = None

    @property
    def there(self) -> tuple[StoredTensor, ...]:
        """Those that the module has."""
        return tuple(tensor for tensor in self if tensor is not None)


class AdapterModule(NamedTuple):
    """One module of an adapter, without a model.

    Attributes:
        raw: Its name in the file, without PEFT's prefix.
        pair: Its matrices.
        scale: The factor of B A x.
        vectors: Its other tensors.
        is_embedding: Whether A is [rank, vocabulary], of which tokens take columns.
    """

    raw: str
    pair: MatrixPair
    scale: float
    vectors: ModuleVectors = ModuleVectors()
    is_embedding: bool = False

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All of its tensors."""
        return (*self.pair, *self.vectors.there)


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
        base_copies: Module name to a copy of its weight in the base model, which PEFT saves with
            an adapter for an embedding.
    """

    modules: dict[str, AdapterModule]
    num_tensors: int
    adapter_name: str = ""
    rules: ModuleRules | None = None
    starts_at_zero: bool = True
    notes: tuple[str, ...] = ()
    base_copies: Mapping[str, StoredTensor] = field(default_factory=dict)


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
    """

    module_index: int
    name: str
    scale: float
    pair: MatrixPair
    vectors: ModuleVectors = ModuleVectors()
    is_embedding: bool = False
    out_slice: tuple[int, int] | None = None

    @property
    def label(self) -> str:
        """The name, and which of its outputs, if not all: no two modules have the same."""
        return row_label(self.name, self.out_slice)


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """All modules of an adapter, as a model has them, in the order of the file.

    Attributes:
        modules: One for each module of the adapter, or for each part of a fused one that the model
            has split.
        report: What became of its tensors.
        base_copies: The model's name of a module to a tensor that must be its weight in the base
            model, of the same shape.
    """

    modules: tuple[BoundModule, ...]
    report: CoverageReport
    base_copies: Mapping[str, StoredTensor] = field(default_factory=dict)


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
    base_copies = _take_base_copies(found, path)
    modules = {
        module: _make_module(module, kinds, rules, config, path) for module, kinds in found.items()
    }
    notes = (*config.notes, *_check_unused_keys(rules, strict))
    adapter_name = _one_name(adapter_names - {""}, path)
    return AdapterTensors(
        modules, num_tensors, adapter_name, rules, config.starts_at_zero, notes, base_copies
    )


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
    base_copies: dict[str, StoredTensor] = {}
    for file_name, module in adapter.modules.items():
        for bound in _bind_module(file_name, module, table, path, changes):
            if bound.label in modules:
                raise _error(
                    path, module.pair.a.name, f"is a second one for module '{bound.label}'"
                )
            modules[bound.label] = bound
            if file_name in adapter.base_copies:
                base_copies[bound.name] = adapter.base_copies[file_name]
    _check_base_copies(base_copies, table, path)
    _check_overlaps(modules.values(), path)
    if adapter.adapter_name:
        changes.extend([f"adapter name '{adapter.adapter_name:.80}' taken away"] * len(modules))
    report = CoverageReport(
        used=adapter.num_tensors,
        renamed=counted(changes),
        ignored=adapter.notes,
        missing=_count_missing(adapter, modules.values(), table, path),
        casts=_casts(modules.values(), table),
        verified=len(adapter.base_copies),
    )
    return BoundAdapter(tuple(modules.values()), report, base_copies)


def make_rows(
    modules: Iterable[BoundModule], dora_offsets: Mapping[str, int] | None = None
) -> list[_core.PlannedRow]:
    """The rows of a load plan, one for each module.

    Args:
        modules: Of an adapter that fits a model.
        dora_offsets: Label of a module to where its DoRA scale lies in the source.

    Raises:
        UnsupportedAdapterError: A module has a magnitude and no DoRA scale.
    """
    return [_make_row(module, dora_offsets or {}) for module in modules]


def _make_row(module: BoundModule, dora_offsets: Mapping[str, int]) -> _core.PlannedRow:
    a, b = module.pair
    bias, magnitude = module.vectors
    if magnitude is not None and module.label not in dora_offsets:
        raise UnsupportedAdapterError(
            f"tensor '{magnitude.name:.200}' belongs to use_dora=True, which needs the norms of "
            "the base model's weights: give LoraManager base_weights, and register the adapter",
            field="use_dora",
        )
    return _core.PlannedRow(
        module.module_index,
        module.pair.rank,
        module.scale,
        a.offset,
        _DTYPES[a.dtype],
        b.offset,
        _DTYPES[b.dtype],
        out_slice=module.out_slice or (0, 0),
        bias=None if bias is None else (bias.offset, _DTYPES[bias.dtype]),
        dora_scale_offset=dora_offsets.get(module.label),
    )


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
    kind_a, kind_b = _matrix_kinds(module, kinds, path)
    a, b = kinds.get(kind_a), kinds.get(kind_b)
    if a is None or b is None:
        there, missing = (kind_b, kind_a) if a is None else (kind_a, kind_b)
        only = there.value.removesuffix(".weight")
        raise _error(path, f"{module}.{missing.value}", f"is missing: there is only {only}")
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
    vectors = _make_vectors(module, kinds, b, config, path)
    is_embedding = kind_a is TensorKind.EMBEDDING_A
    raw = split_name(a.name).raw
    return AdapterModule(raw, MatrixPair(a, b), scaling.scale, vectors, is_embedding)


def _matrix_kinds(
    module: str, kinds: Mapping[TensorKind, StoredTensor], path: str
) -> tuple[TensorKind, TensorKind]:
    """Which tensors are A and B: those of linear modules, or of embeddings."""
    linear = (TensorKind.A, TensorKind.B)
    embedding = (TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B)
    if kinds.keys().isdisjoint(embedding):
        return linear
    others = kinds.keys() & {*linear, TensorKind.BIAS}
    if others:
        name = kinds[min(others, key=lambda kind: kind.value)].name
        raise _error(path, name, f"is beside lora_embedding_A or _B of module '{module}'")
    return embedding


def _make_vectors(
    module: str,
    kinds: Mapping[TensorKind, StoredTensor],
    b: StoredTensor,
    config: PeftLoraConfig,
    path: str,
) -> ModuleVectors:
    wanted = {
        TensorKind.BIAS: ("lora_bias", config.lora_bias),
        TensorKind.MAGNITUDE: ("use_dora", config.use_dora),
    }
    for kind, (field_name, is_wanted) in wanted.items():
        tensor = kinds.get(kind)
        if tensor is None and is_wanted:
            raise _error(
                path,
                f"{module}.{kind.value}",
                f"is missing, though the configuration says {field_name}=True",
            )
        if tensor is not None and not is_wanted:
            raise _error(path, tensor.name, f"is there, but {field_name} is not true")
        if tensor is not None:
            _check_vector(tensor, b.shape[0], path)
    return ModuleVectors(*(kinds.get(kind) for kind in wanted))


def _check_vector(tensor: StoredTensor, length: int, path: str) -> None:
    if tensor.dtype not in _DTYPES:
        raise _error(path, tensor.name, f"has dtype {tensor.dtype}: F32, F16 and BF16 are possible")
    if tensor.shape != [length]:
        raise _error(path, tensor.name, f"has shape {tensor.shape}: lora_B needs [{length}]")


def _take_base_copies(
    found: Mapping[str, dict[TensorKind, StoredTensor]], path: str
) -> dict[str, StoredTensor]:
    """Takes copies of base weights out; only modules with LoRA may have one."""
    copies: dict[str, StoredTensor] = {}
    for module, kinds in found.items():
        copy = kinds.pop(TensorKind.BASE_COPY, None)
        if copy is not None:
            if not kinds:
                raise _error(
                    path,
                    copy.name,
                    "is a weight of the base model, for a module without LoRA: it is not used",
                )
            if copy.dtype not in _DTYPES:
                raise _error(path, copy.name, f"has dtype {copy.dtype}, unlike any base weight")
            copies[module] = copy
    return copies


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
    for name, key in rules.unused_keys():
        problem = f"{name}[{key!r:.80}], which matches no module of the adapter"
        if strict:
            raise UnsupportedAdapterError(
                f"the adapter's configuration has {problem}: the scale that was meant for some "
                "module may be missing. Way out: correct it, or ignore such keys with strict=False",
                field=name,
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
    adapter: AdapterTensors, there: Iterable[BoundModule], table: ModuleTable, path: str
) -> int:
    """Modules of the model that the configuration targets and the file has no tensors for."""
    rules = adapter.rules
    names = {module.name for module in there}
    if rules is None or len(names) == len(table.names):
        return 0
    missing = [
        name
        for name in table.names
        if name not in names
        and rules.is_target(name)
        # "all-linear" means neither embeddings nor the output embedding.
        and (table.sizes[name].is_in_layer or not rules.targets_all_linear)
    ]
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
    file_name: str, module: AdapterModule, table: ModuleTable, path: str, changes: list[str]
) -> list[BoundModule]:
    """The model's module for one of an adapter, its part of a fused one, or its parts.

    Args:
        file_name: The module's name in the file, without what savers put around it.
        module: The adapter's.
        table: The model's modules.
        path: Named in errors.
        changes: Gets what was changed in the name.
    """

    def find(last: str | None = None) -> str | None:
        """The model's module of that name, or of one with another last part."""
        raw, name = module.raw, file_name
        if last is not None:
            raw, name = renamed(raw, last), renamed(name, last)
        try:
            return table.matcher.find(raw, name)
        except AmbiguousNameError as error:
            raise _error(
                path,
                module.pair.a.name,
                f"belongs to module '{name}', which could be {error} of the model",
            ) from None

    name = find()
    if name is not None:
        changes.extend(renamings(module.raw, name))
        return [_bind_whole(name, module, table, path)]
    part = table.fused.part(file_name)
    if part is not None and (name := find(part.fused)) is not None:
        changes.append(f"part of {part.fused}")
        return [_bind_part(name, part, module, table, path)]
    parts = {last: find(last) for last in table.fused.parts(file_name)}
    if any(parts.values()):
        changes.append(f"cut into {', '.join(parts)}")
        return _bind_cut(file_name, parts, module, table, path)
    raise _error(
        path,
        module.pair.a.name,
        f"belongs to module '{file_name}', which the model does not have or which is not "
        "among its LoRA target modules",
    )


def _bind_whole(name: str, module: AdapterModule, table: ModuleTable, path: str) -> BoundModule:
    a = module.pair.a
    sizes = table.sizes[name]
    if sizes.is_embedding != module.is_embedding:
        has, needed = ("lora_embedding_A", "lora_A")[:: 1 if module.is_embedding else -1]
        raise _error(
            path, a.name, f"is {has} for module '{name}' of the model, which needs {needed}"
        )
    _check_pair(module.pair, sizes.in_features, sizes.out_features, table, path)
    return BoundModule(
        sizes.module_index, name, module.scale, module.pair, module.vectors, module.is_embedding
    )


def _bind_part(
    name: str, part: Part, module: AdapterModule, table: ModuleTable, path: str
) -> BoundModule:
    """Of a fused module of the model."""
    sizes = table.sizes[name]
    if sizes.out_features != part.total:
        raise _error(
            path,
            module.pair.a.name,
            f"belongs to a part of module '{name}', which has {sizes.out_features} outputs, and "
            f"not the {part.total} of its parts in fused_modules",
        )
    _check_pair(module.pair, sizes.in_features, part.length, table, path)
    return BoundModule(
        sizes.module_index,
        name,
        module.scale,
        module.pair,
        module.vectors,
        out_slice=(part.first, part.length),
    )


def _bind_cut(
    file_name: str,
    parts: Mapping[str, str | None],
    module: AdapterModule,
    table: ModuleTable,
    path: str,
) -> list[BoundModule]:
    """A fused module of the adapter, for the parts that the model has instead."""
    names = [name for name in parts.values() if name is not None]
    if len(names) != len(parts):
        missing = ", ".join(last for last, name in parts.items() if name is None)
        raise _error(
            path,
            module.pair.a.name,
            f"belongs to fused module '{file_name}', and {missing} of its parts are not among the "
            "model's LoRA target modules",
        )
    outs = [table.sizes[name].out_features for name in names]
    bound: list[BoundModule] = []
    first = 0
    for name, out in zip(names, outs, strict=True):
        _check_pair(module.pair, table.sizes[name].in_features, sum(outs), table, path)
        pair = MatrixPair(module.pair.a, _rows_of(module.pair.b, first, out))
        vectors = ModuleVectors(
            *(None if vector is None else _rows_of(vector, first, out) for vector in module.vectors)
        )
        index = table.sizes[name].module_index
        bound.append(BoundModule(index, name, module.scale, pair, vectors))
        first += out
    return bound


def _rows_of(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    row_bytes = math.prod(tensor.shape[1:]) * element_bytes(tensor.dtype)
    return tensor._replace(
        shape=[count, *tensor.shape[1:]], offset=tensor.offset + first * row_bytes
    )


def _check_pair(
    pair: MatrixPair, in_features: int, out_features: int, table: ModuleTable, path: str
) -> None:
    check_rank(pair.rank, table.max_lora_rank, path)
    _check_shape(pair.a, [pair.rank, in_features], path)
    _check_shape(pair.b, [out_features, pair.rank], path)


def _check_overlaps(modules: Iterable[BoundModule], path: str) -> None:
    """Refuses an adapter that has a fused module and parts of it."""
    whole = {module.name for module in modules if module.out_slice is None}
    for module in modules:
        if module.out_slice is not None and module.name in whole:
            raise _error(
                path,
                module.pair.a.name,
                f"is for a part of module '{module.name}', for all of which there is one, too",
            )


def _check_base_copies(copies: Mapping[str, StoredTensor], table: ModuleTable, path: str) -> None:
    for name, copy in copies.items():
        sizes = table.sizes[name]
        needed = [sizes.out_features, sizes.in_features][:: -1 if sizes.is_embedding else 1]
        if copy.shape != needed:
            raise UnsupportedAdapterError(
                f"tensor '{copy.name:.200}' of '{path}' replaces the weight of module '{name}', "
                f"{needed}, by one of shape {copy.shape}: tokens were added, which is not "
                "supported. Way out: train without new tokens",
                field=copy.name,
            )


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
