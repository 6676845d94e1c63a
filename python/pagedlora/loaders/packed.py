"""Adapters in TensorRT-LLM's packed form: one tensor of flattened rows, one that describes them.

A row of the weights is one module's A [rank, in_features] followed by its B [out_features, rank],
flattened, with zeros up to the length of the longest row. The row of the same number in the
configuration says which module it is, by TensorRT-LLM's id and layer, and its rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagedlora import _core
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.binding import check_rank
from pagedlora.loaders.stored import TORCH_DTYPES
from pagedlora.sharding import whole_modules
from pagedlora.shown import counted, quoted

if TYPE_CHECKING:
    import torch

_ROW_FIELDS = (3, 4)
_SHOWN_IDS = 30
_MATRIX_DIMS = 2


class _Row(NamedTuple):
    """A row of the configuration, and its number."""

    position: int
    module_id: int
    layer_id: int
    rank: int
    is_dora: int = 0


ModulesById: TypeAlias = dict[tuple[int, int], list[_core.LoraModule]]


def unpack(
    weights: torch.Tensor, config: torch.Tensor, model_config: _core.LoraModelConfig, path: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices in the rows, by module.

    Args:
        weights: [1, rows, W] or [rows, W], as in `AdapterWeights.from_packed`.
        config: int32 [1, rows, 3 or 4] or [rows, 3 or 4].
        model_config: Says which module has which id, layer and sizes.
        path: Named in errors.

    Returns:
        Module name to (A [rank, in_features], B [out_features, rank]): views of `weights`, one
        pair per row.

    Raises:
        AdapterFormatError: A tensor is of an impossible type or shape, a row fits no module of
            the model or holds fewer or more values than its matrices.
        UnsupportedAdapterError: A row is DoRA, or its rank is over the maximum.
    """
    values = _rows_of(weights, "weights", path)
    if str(values.dtype) not in TORCH_DTYPES:
        raise _error(
            path,
            "weights",
            f"have dtype {values.dtype}, shape {list(weights.shape)}: float32, float16 and "
            "bfloat16 are possible",
        )
    rows = _read_config(config, path)
    if len(rows) != values.shape[0]:
        raise _error(
            path,
            "config",
            f"has {counted(len(rows), 'row')} (shape {list(config.shape)}), but the weights have "
            f"{values.shape[0]} (shape {list(weights.shape)}): each row needs its description",
        )
    if not rows:
        raise _error(path, "weights", "have no rows: they would answer like the base model")
    return _pairs(values, rows, model_config, path)


def _rows_of(tensor: object, name: str, path: str) -> torch.Tensor:
    """The tensor without its leading dimension of 1, if it has one."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise _error(path, name, f"came as a {type(tensor).__name__}: a torch tensor is needed")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise _error(
            path,
            name,
            f"came on {tensor.device}, {tensor.layout}: a dense tensor on the CPU is needed",
        )
    shape = list(tensor.shape)
    if tensor.dim() == _MATRIX_DIMS + 1 and shape[0] == 1:
        return tensor.detach()[0]
    if tensor.dim() != _MATRIX_DIMS:
        columns = "W" if name == "weights" else "3 or 4"
        raise _error(
            path,
            name,
            f"came with shape {shape}: [1, rows, {columns}] or [rows, {columns}] is needed",
        )
    return tensor.detach()


def _read_config(config: torch.Tensor, path: str) -> list[_Row]:
    fields = _rows_of(config, "config", path)
    if str(fields.dtype) != "torch.int32":
        raise _error(
            path,
            "config",
            f"has dtype {fields.dtype}, shape {list(config.shape)}: int32 is needed",
        )
    if fields.shape[1] not in _ROW_FIELDS:
        raise _error(
            path,
            "config",
            f"has shape {list(config.shape)}: a row is module id, layer and rank, with or without "
            "a fourth number for DoRA",
        )
    return [_Row(position, *row) for position, row in enumerate(fields.tolist())]


def _pairs(
    values: torch.Tensor, rows: list[_Row], model_config: _core.LoraModelConfig, path: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    modules = modules_by_id(model_config)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    positions: dict[str, int] = {}
    for row in rows:
        module = _find_module(row, modules, path)
        if module.name in positions:
            raise _row_error(
                path,
                row,
                f"is for module {quoted(module.name)} (id {row.module_id} of layer "
                f"{row.layer_id}), and so is row {positions[module.name]}: a module has one row",
            )
        positions[module.name] = row.position
        _check_dora(row, module, path)
        _check_rank(row, module, model_config.max_lora_rank, path)
        pairs[module.name] = _split(values[row.position], row, module, path)
    return pairs


def modules_by_id(model_config: _core.LoraModelConfig) -> ModulesById:
    """TensorRT-LLM's module id and layer to the modules that have both; usually one."""
    modules: ModulesById = {}
    for module in whole_modules(model_config):
        if module.module_id >= 0 and module.layer_id >= 0:
            modules.setdefault((module.module_id, module.layer_id), []).append(module)
    return modules


def _find_module(row: _Row, modules: ModulesById, path: str) -> _core.LoraModule:
    for name, value in (("module id", row.module_id), ("layer", row.layer_id)):
        if value < 0:
            raise _row_error(path, row, f"has {name} {value}: it must be 0 or more")
    matches = modules.get((row.module_id, row.layer_id), [])
    if len(matches) != 1:
        raise _row_error(path, row, _why_no_module(row, modules))
    return matches[0]


def _why_no_module(row: _Row, modules: ModulesById) -> str:
    if not modules:
        return (
            f"names module id {row.module_id}, but the model configuration has no module with a "
            "TensorRT-LLM module id and a layer: packed weights cannot be matched to it"
        )
    ids = sorted({module_id for module_id, _ in modules})
    if row.module_id not in ids:
        shown = ", ".join(map(str, ids[:_SHOWN_IDS]))
        return (
            f"has module id {row.module_id}, which no LoRA target module of the model has; "
            f"those have {shown}"
        )
    layers = sorted(layer for module_id, layer in modules if module_id == row.module_id)
    if row.layer_id not in layers:
        return (
            f"has layer {row.layer_id}, where the model has no LoRA target module of id "
            f"{row.module_id}; it has them in {counted(len(layers), 'layer')}, {layers[0]} to "
            f"{layers[-1]}"
        )
    names = ", ".join(
        f"{quoted(m.name)}" for m in modules[row.module_id, row.layer_id][:_SHOWN_IDS]
    )
    return (
        f"is for module id {row.module_id} of layer {row.layer_id}, but several modules of the "
        f"model have these: {names}"
    )


def _check_dora(row: _Row, module: _core.LoraModule, path: str) -> None:
    if row.is_dora not in (0, 1):
        raise _row_error(path, row, f"has {row.is_dora} where 1 means DoRA and 0 plain LoRA")
    if row.is_dora:
        raise UnsupportedAdapterError(
            f"row {row.position} of the packed config of {quoted(path)} is DoRA, for module "
            f"{quoted(module.name)} (id {row.module_id}) of layer {row.layer_id}: only plain LoRA "
            "is supported",
            field="is_dora",
        )


def _check_rank(row: _Row, module: _core.LoraModule, max_lora_rank: int, path: str) -> None:
    if row.rank < 1:
        raise _row_error(
            path, row, f"has rank {row.rank} for module {quoted(module.name)}: 1 is least"
        )
    check_rank(row.rank, max_lora_rank, path)


def _split(
    values: torch.Tensor, row: _Row, module: _core.LoraModule, path: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a row."""
    a_shape, b_shape = (row.rank, module.in_features), (module.out_features, row.rank)
    num_a = row.rank * module.in_features
    needed = num_a + module.out_features * row.rank
    matrices = f"A {list(a_shape)} and B {list(b_shape)} of module {quoted(module.name)}"
    if values.numel() < needed:
        raise _row_error(
            path,
            row,
            f"needs {needed} values, for {matrices}, but the rows of the weights have too few "
            f"values: {values.numel()}",
        )
    if bool(values[needed:].any()):
        raise _row_error(
            path,
            row,
            f"needs {needed} values, for {matrices}, but in the weights more of its row is not "
            "zero: the rank or the sizes are not those that it was packed with",
        )
    return values[:num_a].reshape(a_shape), values[num_a:needed].reshape(b_shape)


def _row_error(path: str, row: _Row, problem: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"row {row.position} of the packed config of {quoted(path)} {problem}",
        path=path,
        tensor="config",
    )


def _error(path: str, tensor: str, problem: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"packed {tensor} of {quoted(path)} {problem}", path=path, tensor=tensor
    )
