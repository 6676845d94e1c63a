"""What a model offers to LoRA: its modules, found in a live model or built from its configuration.

Any linear-like module and any embedding can carry LoRA; there is no list of families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pagedlora import _core
from pagedlora.arguments import check_type, to_integer, to_names
from pagedlora.errors import InvalidArgumentError
from pagedlora.loaders.fused_modules import FusedModules
from pagedlora.sharding import ModuleSplit, Parallel, Sharding
from pagedlora.shown import shown
from pagedlora.tp_plans import Shapes, TpPlan, declared_plan, plan_splits, shapes_of
from pagedlora.trtllm_modules import Dims, trtllm_modules

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
_MAX_LAYERS = 100_000


class LoraModelConfig(_core.LoraModelConfig):
    """The modules that can carry LoRA, with their sizes, the dtype in the cache and the top rank.

    Immutable. Modules are in model order; a module's index in `modules` is its module index. With
    `tp_size` or `pp_size` over 1 they are those of one rank, with their sizes there; adapters are
    whole nevertheless, and each rank loads its part of them.
    """

    _sharding: Sharding | None = None

    @property
    def sharding(self) -> Sharding | None:
        """The whole model and what of it is on this rank; None: all."""
        return self._sharding

    @property
    def splits(self) -> dict[str, ModuleSplit]:
        """Name of each module to how tensor parallelism cuts it."""
        cut = {} if self._sharding is None else self._sharding.splits
        return {module.name: cut.get(module.name, ModuleSplit()) for module in self.modules}

    def shard(
        self,
        tp_plan: TpPlan,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        num_layers: int | None = None,
        head_size: int = 1,
        fused_modules: FusedModules | None = None,
    ) -> Self:
        """What one rank of a tensor and pipeline parallel group has of this model.

        Args:
            tp_plan: Name of a module, or the end of it, with * for any one part, to "colwise" (cut
                by outputs), "rowwise" (by inputs; an embedding by its vocabulary), "replicated", or
                a `ModuleSplit`. Modules that are not there are whole on every rank.
            tp_size: Ranks that cut modules.
            tp_rank: Which of them this is.
            pp_size: Ranks that share the layers; the first ones have one more if they are not even.
            pp_rank: Which of them this is. Embeddings outside of layers are on rank 0, the output
                embedding is on the last.
            num_layers: Of the model; None: up to the last layer that has a module.
            head_size: Outputs of q_proj, k_proj and v_proj and inputs of o_proj that stay together.
                Where there are fewer heads of keys and values than ranks, several have the same.
            fused_modules: As in `LoraManager`: their parts are cut one by one.

        Returns:
            The configuration of the rank.

        Raises:
            InvalidArgumentError: A module cannot be cut so, a rank would have no module, or this is
                the configuration of a rank already. The same on every rank.
        """
        if self._sharding is not None:
            raise InvalidArgumentError("the configuration is that of a rank already")
        shapes = Shapes.of(to_integer(head_size, "head_size", 1), fused_modules)
        parallel = Parallel(tp_size, tp_rank, pp_size, pp_rank)
        return self._of_rank(plan_splits(self.modules, tp_plan, shapes), parallel, num_layers)

    def _of_rank(
        self, splits: Mapping[str, ModuleSplit], parallel: Parallel, num_layers: int | None
    ) -> Self:
        sharding = Sharding(self.modules, splits, parallel, num_layers)
        config = type(self)(list(sharding.local_modules), self.dtype, self.max_lora_rank)
        config._sharding = sharding
        return config

    @classmethod
    def from_module(
        cls,
        model: nn.Module,
        target_modules: Literal["all-linear"] | Sequence[str] = ALL_LINEAR,
        *,
        dtype: torch.dtype | None = None,
        max_lora_rank: int = 64,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        tp_plan: TpPlan | None = None,
        fused_modules: FusedModules | None = None,
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
            tp_size: As in `shard`; the model is whole.
            tp_rank: As in `shard`.
            pp_size: As in `shard`.
            pp_rank: As in `shard`.
            tp_plan: As in `shard`; None: the one that transformers declares for the model.
            fused_modules: As in `shard`; None: qkv_proj and gate_up_proj, where the model's
                configuration says what is in them.

        Returns:
            The configuration; names are those of `model.named_modules()`.

        Raises:
            InvalidArgumentError: A name matches no linear module or embedding, there is nothing to
                target, a rank or dtype is out of range, or as `shard`.
        """
        from torch import nn

        found = dict(_lora_modules(check_type(model, nn.Module, "model")))
        modules = [found[name] for name in _select(model, found, target_modules)]
        config = cls(modules, _cache_dtype(model, dtype), max_lora_rank)
        parallel = Parallel(tp_size, tp_rank, pp_size, pp_rank).checked()
        if (tp_size, pp_size) == (1, 1):
            return config
        plan: TpPlan = {}
        if tp_size > 1:
            plan = declared_plan(model) if tp_plan is None else tp_plan
        shapes = shapes_of(getattr(model, "config", None), fused_modules)
        num_layers = max((m.layer_id for m in found.values()), default=_NO_ID) + 1
        return config._of_rank(plan_splits(modules, plan, shapes), parallel, num_layers)

    @classmethod
    def from_hf_config(
        cls,
        config: PreTrainedConfig,
        target_modules: Literal["all-linear"] | Sequence[str] = ALL_LINEAR,
        *,
        dtype: torch.dtype | None = None,
        max_lora_rank: int = 64,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        tp_plan: TpPlan | None = None,
        fused_modules: FusedModules | None = None,
    ) -> Self:
        """Finds the modules of the causal language model that a configuration describes.

        Args:
            config: Of a transformers model; not changed. No weights are allocated.
            target_modules: As in `from_module`.
            dtype: As in `from_module`; None: the configuration's, or float32 if it names none.
            max_lora_rank: As in `from_module`.
            tp_size: As in `shard`.
            tp_rank: As in `shard`.
            pp_size: As in `shard`.
            pp_rank: As in `shard`.
            tp_plan: As in `from_module`.
            fused_modules: As in `from_module`.

        Returns:
            The same as `from_module` for the model itself.

        Raises:
            InvalidArgumentError: As in `from_module`.
            UnsupportedModelError: transformers has no causal language model of that kind.
        """
        import torch

        from pagedlora.engine.pretrained import skeleton_of

        model = skeleton_of(config)
        return cls.from_module(
            model,
            target_modules,
            dtype=dtype or config.dtype or torch.float32,
            max_lora_rank=max_lora_rank,
            tp_size=tp_size,
            tp_rank=tp_rank,
            pp_size=pp_size,
            pp_rank=pp_rank,
            tp_plan=tp_plan,
            fused_modules=fused_modules,
        )

    @classmethod
    def from_dims(  # noqa: PLR0917 - sizes in the order in which TensorRT-LLM has them
        cls,
        num_layers: int,
        hidden_size: int,
        mlp_hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        *,
        modules: Sequence[str] = ("attn_q", "attn_k", "attn_v"),
        dtype: torch.dtype | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        max_lora_rank: int = 64,
        sizes: Mapping[str, tuple[int, int]] | None = None,
    ) -> Self:
        """Builds TensorRT-LLM's modules, ids 0 to 25, from the sizes of the whole model.

        Modules have the names of Hugging Face's models, `model.layers.3.self_attn.q_proj`. As in
        TensorRT-LLM, mlp_h_to_4h is gate_proj and mlp_gate is up_proj. attn_dense takes
        `num_heads * head_size` features, not `hidden_size`.

        Args:
            num_layers: Of the model.
            hidden_size: Features between layers.
            mlp_hidden_size: Features inside the MLP.
            num_heads: Heads of queries.
            num_kv_heads: Heads of keys and of values; None: `num_heads`.
            head_size: Features of a head; None: `hidden_size / num_heads`.
            modules: TensorRT-LLM's names.
            dtype: Of adapters in the cache; None: float32.
            tp_size: As in `shard`.
            tp_rank: As in `shard`.
            pp_size: As in `shard`.
            pp_rank: As in `shard`.
            max_lora_rank: Largest rank of any module of any adapter.
            sizes: In and out features, whole, of routers, shared experts, Mamba and latent modules.

        Returns:
            The configuration of the rank.

        Raises:
            InvalidArgumentError: A name is unknown or not supported (moe_h_to_4h, moe_4h_to_h,
                moe_gate: adapters for experts), a size is impossible or missing, or as `shard`.
        """
        import torch

        from pagedlora.engine.dtypes import to_core_dtype

        to_integer(num_layers, "num_layers", 0, _MAX_LAYERS)
        numbers = [num_layers, hidden_size, mlp_hidden_size, num_heads]
        numbers += [n for n in (num_kv_heads, head_size) if n is not None]
        numbers = [to_integer(number, "a size", 0, 2**30) for number in numbers]
        if min(numbers) < 1 or (head_size is None and hidden_size % num_heads):
            raise InvalidArgumentError(
                f"sizes {numbers} describe no model: each is 1 or more, and without head_size "
                "hidden_size is a multiple of num_heads"
            )
        dims = Dims(
            hidden_size,
            mlp_hidden_size,
            num_heads,
            num_kv_heads or num_heads,
            head_size or hidden_size // num_heads,
        )
        parallel = Parallel(tp_size, tp_rank, pp_size, pp_rank).checked()
        whole, splits = trtllm_modules(num_layers, dims, modules, sizes, tp_size)
        config = cls(whole, to_core_dtype(torch.float32 if dtype is None else dtype), max_lora_rank)
        if (tp_size, pp_size) == (1, 1):
            return config
        return config._of_rank(splits, parallel, num_layers)


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
                f"{shown(target_modules)}: for one module give [{shown(target_modules)}]"
            )
        names = _all_linear(model, found)
        if not names:
            raise InvalidArgumentError(f"{type(model).__name__} has no linear modules")
        return names
    target_modules = to_names(target_modules, "target_modules")
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
