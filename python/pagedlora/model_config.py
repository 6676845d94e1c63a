"""What a model offers to LoRA: its modules, found in a live model or built from its configuration.

Any linear-like module and any embedding can carry LoRA; there is no list of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pagedlora import _core
from pagedlora.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig
    from typing_extensions import Self

ALL_LINEAR: Literal["all-linear"] = "all-linear"

# TensorRT-LLM's ids of the kinds of modules, by the names that Hugging Face models give them.
_TRTLLM_MODULE_IDS = {
    "qkv_proj": 0,
    "q_proj": 1,
    "k_proj": 2,
    "v_proj": 3,
    "o_proj": 4,
    "gate_proj": 5,
    "down_proj": 6,
    "up_proj": 7,
    "gate_up_proj": 18,
}
_NO_ID = -1


class LoraModelConfig(_core.LoraModelConfig):
    """The modules that can carry LoRA, with their sizes, the dtype in the cache and the top rank.

    Immutable. Modules are in model order; a module's index in `modules` is its module index.
    """

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        target_modules: Literal["all-linear"] | Sequence[str] = ALL_LINEAR,
        *,
        dtype: torch.dtype | None = None,
        max_lora_rank: int = 64,
    ) -> Self:
        """Finds the modules of a live model.

        Args:
            model: Any module; its weights are not read, so it may be on the meta device.
            target_modules: "all-linear" (every linear module but the output embedding, as in
                PEFT; transformers' Conv1D counts), or names: a module is meant by its full name or
                by the end of it, as in PEFT. Embeddings and the output embedding are taken when
                they are named; "all-linear" may stand among names.
            dtype: Of adapters in the cache; None: that of the model's floating-point weights.
            max_lora_rank: Largest rank of any module of any adapter.

        Returns:
            The configuration; names are those of `model.named_modules()`.

        Raises:
            InvalidArgumentError: A name matches no linear module or embedding, there is nothing to
                target, or a rank or dtype is out of range.
        """
        found = dict(_lora_modules(model))
        modules = [found[name] for name in _select(model, found, target_modules)]
        return cls(modules, _cache_dtype(model, dtype), max_lora_rank)

    @classmethod
    def from_hf_config(
        cls,
        config: PreTrainedConfig,
        target_modules: Literal["all-linear"] | Sequence[str] = ALL_LINEAR,
        *,
        dtype: torch.dtype | None = None,
        max_lora_rank: int = 64,
    ) -> Self:
        """Finds the modules of the causal language model that a configuration describes.

        Args:
            config: Of a transformers model; not changed. No weights are allocated.
            target_modules: As in `from_module`.
            dtype: As in `from_module`; None: the configuration's, or float32 if it names none.
            max_lora_rank: As in `from_module`.

        Returns:
            The same as `from_module` for the model itself.

        Raises:
            InvalidArgumentError: As in `from_module`.
        """
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return cls.from_module(
            model,
            target_modules,
            dtype=dtype or config.dtype or torch.float32,
            max_lora_rank=max_lora_rank,
        )


def describe_module(name: str, module: nn.Module) -> _core.LoraModule | None:
    """What a module offers to LoRA.

    Args:
        name: Its name in `model.named_modules()`.
        module: Any; its weights are not read.

    Returns:
        Its sizes and kind; an embedding's in_features are its vocabulary. None if it is nothing
        that PEFT would call linear or an embedding.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Embedding):
        sizes = (module.num_embeddings, module.embedding_dim)
        return _describe(name, sizes, _core.ModuleKind.embedding)
    if isinstance(module, Conv1D):  # its weight is [in_features, out_features]
        return _describe(name, (module.nx, module.nf), _core.ModuleKind.linear)
    if isinstance(module, nn.Linear):
        return _describe(name, (module.in_features, module.out_features), _core.ModuleKind.linear)
    return None


def _lora_modules(model: nn.Module) -> Iterator[tuple[str, _core.LoraModule]]:
    """Everything that can carry LoRA, by name, in model order."""
    for name, module in model.named_modules():
        described = describe_module(name, module)
        if described is not None:
            yield name, described


def _select(
    model: nn.Module,
    found: dict[str, _core.LoraModule],
    target_modules: Literal["all-linear"] | Sequence[str],
) -> list[str]:
    """The names meant by `target_modules`, in model order."""
    if isinstance(target_modules, str):
        if target_modules != ALL_LINEAR:
            raise InvalidArgumentError(
                f"target_modules must be {ALL_LINEAR!r} or a list of names, not "
                f"{target_modules!r}: for one module give [{target_modules!r}]"
            )
        names = _all_linear(model, found)
        if not names:
            raise InvalidArgumentError(f"{type(model).__name__} has no linear modules")
        return names
    if not target_modules:
        raise InvalidArgumentError("target_modules is empty: name at least one module")
    matches = {
        target: _all_linear(model, found)
        if target == ALL_LINEAR
        else [name for name in found if name == target or name.endswith(f".{target}")]
        for target in target_modules
    }
    missing = sorted(target for target, names in matches.items() if not names)
    if missing:
        raise InvalidArgumentError(
            f"target_modules {missing} match no linear module or embedding of "
            f"{type(model).__name__}"
        )
    wanted = {name for names in matches.values() for name in names}
    return [name for name in found if name in wanted]


def _all_linear(model: nn.Module, found: dict[str, _core.LoraModule]) -> list[str]:
    """The linear modules but the output embedding."""
    heads = _output_embeddings(model)
    return [
        name
        for name, module in found.items()
        if module.kind == _core.ModuleKind.linear and model.get_submodule(name) not in heads
    ]


def _output_embeddings(model: nn.Module) -> list[nn.Module]:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return [] if head is None else [head]


def _describe(name: str, sizes: tuple[int, int], kind: _core.ModuleKind) -> _core.LoraModule:
    path = name.split(".")
    return _core.LoraModule(
        name=name,
        layer_id=next((int(part) for part in path if part.isdecimal()), _NO_ID),
        module_id=_TRTLLM_MODULE_IDS.get(path[-1], _NO_ID),
        in_features=sizes[0],
        out_features=sizes[1],
        kind=kind,
    )


def _cache_dtype(model: nn.Module, dtype: torch.dtype | None) -> _core.Dtype:
    from pagedlora.engine.dtypes import to_core_dtype

    if dtype is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if dtype is None:
            raise InvalidArgumentError(
                f"{type(model).__name__} has no floating-point weights: give dtype"
            )
    return to_core_dtype(dtype)
