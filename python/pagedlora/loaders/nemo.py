"""NeMo's adapters: .nemo files with LoRA on the fused q, k and v of attention.

The tensors `...layers.N.self_attention.adapter_layer.lora_kqv_adapter.linear_in.weight` and
`...linear_out.weight` are A and B of the module `attn_qkv` of layer N. B's rows are put from NeMo's
order (see `nemo_config.py`) into that of models here: all of q, then all of k, then all of v. The
result is kept as a private safetensors file, as a pickle's is, and is from there on an adapter
like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagedlora import _core
from pagedlora.errors import AdapterFormatError, AdapterNotFoundError, UnsupportedAdapterError
from pagedlora.loaders.binding import BoundAdapter, bind
from pagedlora.loaders.fused_modules import renamed
from pagedlora.loaders.hf import WEIGHTS_NAME, PeftDirectory
from pagedlora.loaders.load_options import DEFAULT_OPTIONS, LoadOptions
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.nemo_archive import CONFIG_MEMBER, WEIGHTS_MEMBER, read_archive
from pagedlora.loaders.nemo_config import NemoConfig, parse_nemo_config
from pagedlora.loaders.packed import ModulesById, modules_by_id
from pagedlora.loaders.peft_config import PeftLoraConfig
from pagedlora.loaders.pickled import is_dense, keep_tensors, load_pickle
from pagedlora.loaders.source_file import SourceFile
from pagedlora.loaders.stored import tensor_error
from pagedlora.paths import is_possible_path
from pagedlora.shown import quoted

if TYPE_CHECKING:
    import torch

NEMO_SUFFIX = ".nemo"
_MODULE = "attn_qkv"
_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>[0-9]{1,6})\.self_attention\.adapter_layer\.lora_kqv_adapter\."
    r"(?P<side>linear_in|linear_out)\.weight"
)
_NOTHING = "._extra_state"
"""What Megatron's layers save beside weights; it is None."""
_QKV_ID, _Q_ID = 0, 1
"""TensorRT-LLM's."""
_MATRIX_DIMS = 2


@dataclass(frozen=True)
class NemoAdapter(PeftDirectory):
    """The same as a PEFT directory, but for the names of its modules: layers have no others.

    Attributes:
        parts: Outputs of q, of k and of v.
    """

    parts: tuple[int, int, int] = (0, 0, 0)

    def bind(self, table: ModuleTable) -> BoundAdapter:
        """Its modules as a model has them: one with TensorRT-LLM's id of attn_qkv, or its parts.

        Raises:
            AdapterFormatError: The model has no such module, or one of other sizes.
            UnsupportedAdapterError: The rank is over the maximum.
        """
        by_id = modules_by_id(table.config)
        modules = {}
        for name, module in self.tensors.modules.items():
            layer = int(name.split(".")[1])
            target = _target(layer, by_id, table, self.weights_path)
            self._check_parts(target, table)
            modules[target] = module._replace(raw=target)
        return bind(replace(self.tensors, modules=modules), table, self.weights_path)

    def _check_parts(self, target: str, table: ModuleTable) -> None:
        """Whether the model has as many heads and groups; of a fused module if that is known."""
        names = [renamed(target, last) for last in table.fused.parts(target)]
        if target in table.sizes:
            sizes = [part.length for name in names if (part := table.fused.part(name)) is not None]
        else:
            sizes = [table.sizes[name].out_features for name in names if name in table.sizes]
        if len(sizes) == len(self.parts) and tuple(sizes) != self.parts:
            raise tensor_error(
                self.weights_path,
                "",
                f"is for q, k and v of {self.parts} outputs, and {quoted(target)} of the model has "
                f"{tuple(sizes)}",
            )


def open_nemo(
    path: str,
    options: LoadOptions = DEFAULT_OPTIONS,
    root: _core.AdapterRoot | None = None,
) -> NemoAdapter:
    """Reads a .nemo file, and keeps its tensors in a file of this process's own.

    Args:
        path: The file.
        options: What is allowed; its weights are a pickle.
        root: Where it must lie; None: anywhere.

    Raises:
        AdapterNotFoundError: There is no such file.
        AdapterPathError: It does not lie in the root.
        AdapterReadError: The system will not read it, or take the private file.
        AdapterFormatError: It is not what it should be.
        UnsupportedAdapterError: Pickles are not allowed, or it has something that is not supported.
    """
    if not is_possible_path(path):
        raise AdapterNotFoundError(f"no file can be at {path!r}", name=path)
    with open(_core.open_file(path, root), "rb") as file:
        if not options.allow_pickle:
            raise UnsupportedAdapterError(
                f"{quoted(path)} has its weights in {WEIGHTS_MEMBER}, a pickle: if you trust the "
                "file, allow_pickle=True",
                field=WEIGHTS_MEMBER,
            )
        members = read_archive(file, path)
    with members.weights as weights:
        config = parse_nemo_config(members.config, f"{path}/{CONFIG_MEMBER}")
        content = load_pickle(weights, f"{path}/{WEIGHTS_MEMBER}")
    tensors, rank = _to_peft(content, config, path)
    shape = {"q, k, v": str(config.parts)}  # equal headers then have equal parts, too
    copy = keep_tensors(tensors, path, WEIGHTS_NAME, shape)
    peft = PeftLoraConfig(rank, config.alpha or rank, use_rslora=False, target_modules=(_MODULE,))
    source, kept = _core.open_file_source(copy.path), SourceFile.of(copy.path)
    return NemoAdapter(path, peft, options, source, kept, path, copy, config.parts)


def _to_peft(
    content: Mapping[Any, Any], config: NemoConfig, path: str
) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors under names as PEFT's, q, k and v in the order of models here, and their rank."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in content.items():
        if str(name).endswith(_NOTHING) and tensor is None:
            continue
        match = _NAME.fullmatch(str(name))
        if match is None:
            raise _unknown(str(name), path)
        sides = layers.setdefault(int(match["layer"]), {})
        if match["side"] in sides:
            raise tensor_error(path, name, f"is a second one for layer {int(match['layer'])}")
        sides[match["side"]] = _checked(name, tensor, path)
    if not layers:
        raise tensor_error(path, "", "has no tensors: it would answer like the base model")
    tensors: dict[str, torch.Tensor] = {}
    for layer, sides in sorted(layers.items()):
        for side in ("linear_in", "linear_out"):
            if side not in sides:
                missing = f"layers.{layer}.self_attention...lora_kqv_adapter.{side}.weight"
                raise tensor_error(path, missing, "is missing, and the other one is there")
        a, b = sides["linear_in"], sides["linear_out"]
        _check_pair(layer, a, b, config, path)
        tensors[f"layers.{layer}.{_MODULE}.lora_A.weight"] = a
        tensors[f"layers.{layer}.{_MODULE}.lora_B.weight"] = _by_part(b, config)
    first = next(iter(layers.values()))
    return tensors, config.rank or first["linear_in"].shape[0]


def _by_part(b: torch.Tensor, config: NemoConfig) -> torch.Tensor:
    """B with its rows in the order of parts instead of groups.

    Args:
        b: [groups * (heads / groups + 2) * head_size, rank].
        config: Says how many there are.
    """
    import torch

    per_group = config.heads // config.groups
    grouped = b.detach().reshape(config.groups, per_group + 2, config.head_size, b.shape[1])
    parts = torch.split(grouped, [per_group, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, b.shape[1]) for part in parts])


def _checked(name: str, tensor: object, path: str) -> torch.Tensor:
    if not is_dense(tensor):
        raise tensor_error(path, name, f"is a {type(tensor).__name__}: a dense tensor is needed")
    if tensor.dim() != _MATRIX_DIMS:
        raise tensor_error(path, name, f"has shape {list(tensor.shape)}: a matrix is needed")
    return tensor


def _check_pair(
    layer: int, a: torch.Tensor, b: torch.Tensor, config: NemoConfig, path: str
) -> None:
    rank, rows = config.rank or a.shape[0], sum(config.parts)
    name = f"layers.{layer}.self_attention...lora_kqv_adapter"
    if a.shape[0] != rank:
        raise tensor_error(
            path, f"{name}.linear_in.weight", f"has rank {a.shape[0]}, the configuration {rank}"
        )
    if list(b.shape) != [rows, rank]:
        raise tensor_error(
            path,
            f"{name}.linear_out.weight",
            f"has shape {list(b.shape)}: {config.heads} heads and {config.groups} query groups of "
            f"{config.head_size} features need {[rows, rank]}",
        )


def _unknown(name: str, path: str) -> UnsupportedAdapterError:
    return UnsupportedAdapterError(
        f"tensor {quoted(name)} of {quoted(path)} cannot be used, and leaving it out would change "
        "the answers: of NeMo's adapters lora_kqv_adapter in layers of self_attention is "
        "supported. Way out: train with target_modules [attention_qkv], or convert the adapter "
        "to PEFT's form",
        field=name,
    )


def _target(layer: int, by_id: ModulesById, table: ModuleTable, path: str) -> str:
    """The model's fused module of a layer, or the name that it would have beside its parts."""
    fused, q = by_id.get((_QKV_ID, layer), []), by_id.get((_Q_ID, layer), [])
    if len(fused) == 1:
        return fused[0].name
    if not fused and len(q) == 1:
        part = table.fused.part(q[0].name)
        if part is not None:
            return renamed(q[0].name, part.fused)
    raise AdapterFormatError(
        f"{quoted(path)} has LoRA for q, k and v of layer {layer}, and the model has "
        f"{len(fused) or 'no'} LoRA target modules of TensorRT-LLM's id {_QKV_ID} (attn_qkv) "
        f"there, and {len(q) or 'no'} of id {_Q_ID} (attn_q), with its k and v in fused_modules",
        path=path,
        tensor="",
    )
