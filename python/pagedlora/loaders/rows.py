"""From the tensors of an adapter to its modules; every tensor is used or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedlora.errors import UnsupportedAdapterError
from pagedlora.loaders.module_rules import ModuleRules, ModuleScaling
from pagedlora.loaders.peft_config import PeftLoraConfig
from pagedlora.loaders.stored import (
    DTYPES,
    MatrixPair,
    ModuleVectors,
    StoredTensor,
    tensor_error,
)
from pagedlora.loaders.tensor_names import TensorKind, split_name, why_unsupported
from pagedlora.shown import quoted

_MATRIX_DIMS = 2
_SHOWN_TARGETS = 5
_MAX_NOTES = 20
_ZERO_3 = "training under DeepSpeed ZeRO-3 saves such files unless the weights are gathered first"


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

    @property
    def base_model(self) -> str:
        """What it was trained on, for errors; "" if it does not say."""
        return "" if self.rules is None else self.rules.base_model


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
            raise tensor_error(
                path,
                tensor.name,
                f"is there twice, the other time as {quoted(kinds[name.kind].name)}",
            )
        kinds[name.kind] = tensor
        adapter_names.add(name.adapter)
        num_tensors += 1
    if not found:
        raise tensor_error(
            path, "", f"has no tensors: it would answer like the base model; {_ZERO_3}"
        )
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


def whole_tensors(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Those that would replace weights of the base model."""
    kinds = (TensorKind.WHOLE, TensorKind.MODULE_BIAS)
    return [tensor for tensor in tensors if split_name(tensor.name).kind in kinds]


# ---- one tensor, one pair ----------------------------------------------------------------------


def _unsupported(tensors: Iterable[StoredTensor], path: str) -> UnsupportedAdapterError:
    """Names the tensor that says most about what the adapter is."""
    kinds = list(TensorKind)
    found = [(kinds.index(split_name(tensor.name).kind), tensor) for tensor in tensors]
    bad = [(kind, tensor) for kind, tensor in found if why_unsupported(kinds[kind]) is not None]
    kind, tensor = min(bad, key=lambda each: each[0])
    return UnsupportedAdapterError(
        f"tensor {quoted(tensor.name)} of {quoted(path)}, shape {tensor.shape}, cannot be used, "
        f"and leaving it out would change the answers: {why_unsupported(kinds[kind])}",
        field=tensor.name,
    )


def _one_name(names: set[str], path: str) -> str:
    """The name of the adapter in the tensors' names; "" if there is none."""
    if len(names) > 1:
        shown = ", ".join(f"{quoted(name)}" for name in sorted(names)[:_SHOWN_TARGETS])
        raise tensor_error(path, "", f"has the tensors of {len(names)} adapters, {shown}: save one")
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
        raise tensor_error(path, f"{module}.{missing.value}", f"is missing: there is only {only}")
    if not rules.is_target(module):
        raise tensor_error(
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
        raise tensor_error(
            path, name, f"is beside lora_embedding_A or _B of module {quoted(module)}"
        )
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
            raise tensor_error(
                path,
                f"{module}.{kind.value}",
                f"is missing, though the configuration says {field_name}=True",
            )
        if tensor is not None and not is_wanted:
            raise tensor_error(path, tensor.name, f"is there, but {field_name} is not true")
        if tensor is not None:
            _check_vector(tensor, b.shape[0], path)
    return ModuleVectors(*(kinds.get(kind) for kind in wanted))


def _check_vector(tensor: StoredTensor, length: int, path: str) -> None:
    _check_dtype(tensor, path)
    if tensor.shape != [length]:
        raise tensor_error(path, tensor.name, f"has shape {tensor.shape}: lora_B needs [{length}]")


def _take_base_copies(
    found: Mapping[str, dict[TensorKind, StoredTensor]], path: str
) -> dict[str, StoredTensor]:
    """Takes copies of base weights out; only modules with LoRA may have one."""
    copies: dict[str, StoredTensor] = {}
    for module, kinds in found.items():
        copy = kinds.pop(TensorKind.BASE_COPY, None)
        if copy is not None:
            if not kinds:
                raise tensor_error(
                    path,
                    copy.name,
                    "is a weight of the base model, for a module without LoRA: it is not used",
                )
            if copy.dtype not in DTYPES:
                raise tensor_error(
                    path, copy.name, f"has dtype {copy.dtype}, unlike any base weight"
                )
            copies[module] = copy
    return copies


def _check_ranks(a: StoredTensor, b: StoredTensor, scaling: ModuleScaling, path: str) -> None:
    rank_a, rank_b = a.shape[0], b.shape[1]
    if rank_a == rank_b == scaling.rank:
        return
    if a.shape[1] == b.shape[0] == scaling.rank:
        raise tensor_error(
            path,
            b.name,
            f"is transposed, shape {b.shape}, and so is lora_A, shape {a.shape}: A is "
            "[rank, in_features], B is [out_features, rank]",
        )
    if rank_a != rank_b:
        raise tensor_error(
            path,
            b.name,
            f"has rank {rank_b} (shape {b.shape}), but lora_A has rank {rank_a} (shape {a.shape})",
        )
    raise tensor_error(
        path, a.name, f"has rank {rank_a}, but the configuration says {scaling.rank_source}"
    )


def _check_dtype(tensor: StoredTensor, path: str) -> None:
    if tensor.dtype not in DTYPES:
        raise tensor_error(
            path, tensor.name, f"has dtype {tensor.dtype}: F32, F16 and BF16 are possible"
        )


def _check_matrix(tensor: StoredTensor, path: str) -> None:
    _check_dtype(tensor, path)
    shape = tensor.shape
    if 0 in shape:
        raise tensor_error(path, tensor.name, f"is empty, shape {shape}; {_ZERO_3}")
    if len(shape) != _MATRIX_DIMS:
        raise tensor_error(path, tensor.name, f"has shape {tensor.shape}: a matrix is needed")


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
