"""What a model offers to LoRA: its modules, found in a live model or built from its configuration.

Any linear-like module can carry LoRA; there is no list of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pagedlora import _core
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError

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
                PEFT), or names: a module is meant by its full name or by the end of it, as in
                PEFT.
            dtype: Of adapters in the cache; None: that of the model's floating-point weights.
            max_lora_rank: Largest rank of any module of any adapter.

        Returns:
            The configuration; names are those of `model.named_modules()`.

        Raises:
            InvalidArgumentError: A name matches no linear module, there is nothing to target, or
                a rank or dtype is out of range.
            UnsupportedModelError: The targets include transformers' Conv1D (GPT-2), whose weights
                are stored the other way round.
        """
        found = dict(_linear_modules(model))
        names = _select(model, found, target_modules)
        for name in names:
            if type(found[name]).__name__ == "Conv1D":
                raise UnsupportedModelError(
                    f"module '{name}' of {type(model).__name__} is a Conv1D, which cannot carry "
                    "LoRA yet: only nn.Linear and its subclasses can"
                )
        modules = [_describe(name, found[name]) for name in names]
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
            UnsupportedModelError: As in `from_module`.
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


def _linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of everything that PEFT would call linear, in model order."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            yield name, module


def _select(
    model: nn.Module,
    found: dict[str, nn.Module],
    target_modules: Literal["all-linear"] | Sequence[str],
) -> list[str]:
    """The names meant by `target_modules`, in model order."""
    if isinstance(target_modules, str):
        if target_modules != ALL_LINEAR:
            raise InvalidArgumentError(
                f"target_modules must be {ALL_LINEAR!r} or a list of names, not "
                f"{target_modules!r}: for one module give [{target_modules!r}]"
            )
        heads = _output_embeddings(model)
        names = [name for name, module in found.items() if module not in heads]
        if not names:
            raise InvalidArgumentError(f"{type(model).__name__} has no linear modules")
        return names
    if not target_modules:
        raise InvalidArgumentError("target_modules is empty: name at least one module")
    matches = {
        target: [name for name in found if name == target or name.endswith(f".{target}")]
        for target in target_modules
    }
    missing = sorted(target for target, names in matches.items() if not names)
    if missing:
        raise InvalidArgumentError(
            f"target_modules {missing} match no linear module of {type(model).__name__}"
        )
    wanted = {name for names in matches.values() for name in names}
    return [name for name in found if name in wanted]


def _output_embeddings(model: nn.Module) -> list[nn.Module]:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return [] if head is None else [head]


def _describe(name: str, linear: Any) -> _core.LoraModule:
    path = name.split(".")
    return _core.LoraModule(
        name=name,
        layer_id=next((int(part) for part in path if part.isdecimal()), _NO_ID),
        module_id=_TRTLLM_MODULE_IDS.get(path[-1], _NO_ID),
        in_features=linear.in_features,
        out_features=linear.out_features,
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
