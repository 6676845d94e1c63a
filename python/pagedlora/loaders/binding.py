"""From an adapter's modules to a model's: which is which, what fits, and what to load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pagedlora import _core
from pagedlora.errors import UnsupportedAdapterError
from pagedlora.loaders.bound import BoundModule
from pagedlora.loaders.coverage import CoverageReport, counted
from pagedlora.loaders.fused_modules import Part, last_part, renamed
from pagedlora.loaders.misfits import MisfitError, missing_module
from pagedlora.loaders.module_table import ModuleSizes, ModuleTable
from pagedlora.loaders.rows import AdapterModule, AdapterTensors
from pagedlora.loaders.shards import local_modules
from pagedlora.loaders.stored import (
    DTYPES,
    MatrixPair,
    ModuleVectors,
    StoredTensor,
    rows_of,
    tensor_error,
)
from pagedlora.loaders.tensor_names import AmbiguousNameError, renamings
from pagedlora.sharding import Sharding
from pagedlora.shown import quoted

_OUTPUT_EMBEDDINGS = ("lm_head", "embed_out")
"""Last parts of their names."""
ZERO_BIAS = "(zeros)"
"""In offsets: the zeros that stand for biases which other ranks add; no module's label."""


@dataclass(frozen=True)
class BoundAdapter:
    """All modules of an adapter, as a model has them, in the order of the file.

    Attributes:
        modules: One for each module of the adapter, or for each part of a fused one that the model
            has split; whole.
        local: What this rank loads of them: the same, unless the model is sharded.
        report: What became of its tensors.
        base_copies: The model's name of a module to a tensor that must be its weight in the base
            model, of the same shape.
        sharding: What of the model is on this rank; None: all.
    """

    modules: tuple[BoundModule, ...]
    local: tuple[BoundModule, ...]
    report: CoverageReport
    base_copies: Mapping[str, StoredTensor] = field(default_factory=dict)
    sharding: Sharding | None = None

    @property
    def zero_bias_bytes(self) -> int:
        """Bytes of zeros that `rows` needs at `ZERO_BIAS`."""
        return max((4 * m.pair.b.shape[0] for m in self.local if m.has_zero_bias), default=0)

    def rows(self, offsets: Mapping[str, int] | None = None) -> list[_core.PlannedRow]:
        """As `make_rows`; not to be changed."""
        return make_rows(self.local, offsets) if offsets else self._plain_rows

    @cached_property
    def _plain_rows(self) -> list[_core.PlannedRow]:
        return make_rows(self.local)


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
        UnsupportedAdapterError: The rank is over the maximum, or the adapter is for more tokens
            than the model has.
    """
    modules: dict[str, BoundModule] = {}
    changes: list[str] = []
    base_copies: dict[str, StoredTensor] = {}
    for file_name, module in adapter.modules.items():
        try:
            parts = _bind_module(file_name, module, table, path, changes)
        except MisfitError as misfit:
            raise misfit.named(path, adapter.base_model) from None
        for bound in parts:
            if bound.label in modules:
                raise tensor_error(
                    path, module.pair.a.name, f"is a second one for module '{bound.label}'"
                )
            modules[bound.label] = bound
            if file_name in adapter.base_copies:
                base_copies[bound.name] = adapter.base_copies[file_name]
    _check_base_copies(base_copies, table, path)
    _check_overlaps(modules.values(), path)
    if adapter.adapter_name:
        changes.extend([f"adapter name '{adapter.adapter_name:.80}' taken away"] * len(modules))
    whole = tuple(modules.values())
    local = whole if table.sharding is None else local_modules(whole, table.sharding)
    report = CoverageReport(
        used=adapter.num_tensors,
        renamed=counted(changes),
        ignored=adapter.notes,
        missing=_count_missing(adapter, modules.values(), table, path),
        casts=_casts(modules.values(), table),
        verified=len(adapter.base_copies),
        elsewhere=_count_elsewhere(whole, table),
    )
    return BoundAdapter(whole, local, report, base_copies, table.sharding)


def make_rows(
    modules: Iterable[BoundModule], offsets: Mapping[str, int] | None = None
) -> list[_core.PlannedRow]:
    """The rows of a load plan, one for each module.

    Args:
        modules: Of an adapter that fits a model.
        offsets: Where something behind the adapter's own bytes lies in the source: label of a
            module to its DoRA scale, `ZERO_BIAS` to the zeros of biases that other ranks add.

    Raises:
        UnsupportedAdapterError: A module has a magnitude and no DoRA scale.
    """
    return [_make_row(module, offsets or {}) for module in modules]


def check_rank(rank: int, max_lora_rank: int, path: str) -> None:
    """Refuses a rank that the model's configuration does not allow.

    Raises:
        UnsupportedAdapterError: The rank is over the maximum.
    """
    if rank > max_lora_rank:
        raise UnsupportedAdapterError(
            f"LoRA rank {rank} is greater than max_lora_rank {max_lora_rank}: "
            f"raise max_lora_rank to serve {quoted(path)}",
            field="r",
        )


def _make_row(module: BoundModule, offsets: Mapping[str, int]) -> _core.PlannedRow:
    a, b = module.pair
    bias, magnitude = module.vectors
    if magnitude is not None and module.label not in offsets:
        raise dora_error(magnitude)
    bias_at = None if bias is None else (bias.offset, DTYPES[bias.dtype])
    if module.has_zero_bias:
        bias_at = (offsets[ZERO_BIAS], _core.Dtype.float32)
    return _core.PlannedRow(
        module.module_index,
        module.pair.rank,
        module.scale,
        a.offset,
        DTYPES[a.dtype],
        b.offset,
        DTYPES[b.dtype],
        out_slice=module.out_slice or (0, 0),
        a_row_stride=module.a_row_stride,
        bias=bias_at,
        dora_scale_offset=offsets.get(module.label),
    )


def dora_error(magnitude: StoredTensor) -> UnsupportedAdapterError:
    """Why weights with DoRA cannot be carried by a request."""
    return UnsupportedAdapterError(
        f"tensor {quoted(magnitude.name)} belongs to use_dora=True, which needs the norms of the "
        "base model's weights: give LoraManager base_weights, and register the adapter",
        field="use_dora",
    )


def _count_elsewhere(modules: Iterable[BoundModule], table: ModuleTable) -> int:
    """Modules of an adapter that are on other pipeline ranks."""
    if table.sharding is None:
        return 0
    shards = table.sharding.shards
    return sum(shards[module.module_index] is None for module in modules)


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
        raise tensor_error(
            path,
            f"{missing[0]}.lora_A.weight",
            f"is missing, though the configuration targets its module ({len(missing)} such): with "
            "its init_lora_weights PEFT would draw random weights",
        )
    return len(missing)


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
            raise tensor_error(
                path,
                module.pair.a.name,
                f"belongs to module {quoted(name)}, which could be {error} of the model",
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
    raise missing_module(file_name, module.raw, module.pair.a, table, path)


def _bind_whole(name: str, module: AdapterModule, table: ModuleTable, path: str) -> BoundModule:
    a = module.pair.a
    sizes = table.sizes[name]
    if sizes.is_embedding != module.is_embedding:
        has, needed = ("lora_embedding_A", "lora_A")[:: 1 if module.is_embedding else -1]
        raise tensor_error(
            path, a.name, f"is {has} for module {quoted(name)} of the model, which needs {needed}"
        )
    _check_vocabulary(name, module, sizes, path)
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
        raise tensor_error(
            path,
            module.pair.a.name,
            f"belongs to a part of module {quoted(name)}, which has {sizes.out_features} outputs, "
            f"and not the {part.total} of its parts in fused_modules",
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
        raise tensor_error(
            path,
            module.pair.a.name,
            f"belongs to fused module {quoted(file_name)}, and {missing} of its parts are not "
            "among the model's LoRA target modules",
        )
    outs = [table.sizes[name].out_features for name in names]
    bound: list[BoundModule] = []
    first = 0
    for name, out in zip(names, outs, strict=True):
        _check_pair(module.pair, table.sizes[name].in_features, sum(outs), table, path)
        pair = MatrixPair(module.pair.a, rows_of(module.pair.b, first, out))
        vectors = ModuleVectors(
            *(None if vector is None else rows_of(vector, first, out) for vector in module.vectors)
        )
        index = table.sizes[name].module_index
        bound.append(BoundModule(index, name, module.scale, pair, vectors))
        first += out
    return bound


def _check_pair(
    pair: MatrixPair, in_features: int, out_features: int, table: ModuleTable, path: str
) -> None:
    check_rank(pair.rank, table.max_lora_rank, path)
    _check_shape(pair.a, [pair.rank, in_features])
    _check_shape(pair.b, [out_features, pair.rank])


def _check_vocabulary(name: str, module: AdapterModule, sizes: ModuleSizes, path: str) -> None:
    """Refuses LoRA on an embedding, or an output embedding, of more tokens than the model has."""
    if module.is_embedding:
        tensor, theirs, ours = module.pair.a, module.pair.a.shape[1], sizes.in_features
    elif last_part(name) in _OUTPUT_EMBEDDINGS and not sizes.is_in_layer:
        tensor, theirs, ours = module.pair.b, module.pair.b.shape[0], sizes.out_features
    else:
        return
    if theirs > ours:
        raise UnsupportedAdapterError(
            f"tensor {quoted(tensor.name)} of {quoted(path)} is for {theirs} tokens, and module "
            f"{quoted(name)} of the model has {ours}: tokens were added before the adapter was "
            f"trained. Way out: serve the model that it was trained on, resized to {theirs} "
            "tokens (resize_token_embeddings), or train without new tokens",
            field=tensor.name,
        )


def _check_overlaps(modules: Iterable[BoundModule], path: str) -> None:
    """Refuses an adapter that has a fused module and parts of it."""
    whole = {module.name for module in modules if module.out_slice is None}
    for module in modules:
        if module.out_slice is not None and module.name in whole:
            raise tensor_error(
                path,
                module.pair.a.name,
                f"is for a part of module {quoted(module.name)}, for all of which there is "
                "one, too",
            )


def _check_base_copies(copies: Mapping[str, StoredTensor], table: ModuleTable, path: str) -> None:
    for name, copy in copies.items():
        sizes = table.sizes[name]
        needed = [sizes.out_features, sizes.in_features][:: -1 if sizes.is_embedding else 1]
        if copy.shape != needed:
            raise UnsupportedAdapterError(
                f"tensor {quoted(copy.name)} of {quoted(path)} replaces the weight of module "
                f"{quoted(name)}, {needed}, by one of shape {copy.shape}: tokens were added, "
                "which is not supported. Way out: train without new tokens",
                field=copy.name,
            )


def _check_shape(tensor: StoredTensor, needed: list[int]) -> None:
    if tensor.shape != needed:
        raise MisfitError(tensor, f"has shape {tensor.shape}; the model needs {needed}")


def _casts(modules: Iterable[BoundModule], table: ModuleTable) -> tuple[tuple[str, str, int], ...]:
    target = table.config.dtype
    stored = counted(matrix.dtype for module in modules for matrix in module.pair)
    return tuple((dtype, target.name, n) for dtype, n in stored if DTYPES[dtype] != target)
