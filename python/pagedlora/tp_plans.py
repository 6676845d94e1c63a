"""From a plan in transformers' words ("colwise", "rowwise") to how each module is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedlora import _core
from pagedlora.arguments import check_mapping
from pagedlora.errors import InvalidArgumentError
from pagedlora.loaders.fused_modules import FusedModules, FusedNames, fused_modules_of
from pagedlora.sharding import How, ModuleSplit, SplitPart
from pagedlora.shown import quoted, shown

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

TpPlan = Mapping[str, "str | ModuleSplit"]
"""Name of a module, or the end of it, with * for any one part of it, to how it is cut."""

_STYLES: dict[str, How] = {
    "colwise": "output",
    "packed_colwise": "output",
    "colwise_gather_output": "output",
    "colwise_rep": "output",
    "rowwise": "input",
    "rowwise_split_input": "input",
    "rowwise_rep": "input",
    "embedding_rowwise": "input",
    "none": "none",
    "replicated": "none",
    "replicated_with_grad_allreduce": "none",
}
_CUT_AS_ONE = ("colwise_gather_output", "colwise_rep")
"""transformers cuts these weights in equal pieces, whatever is side by side in them."""
_KEY_VALUE = ("k_proj", "v_proj")
_WITH_HEADS = ("q_proj", *_KEY_VALUE, "o_proj")


class Shapes(NamedTuple):
    """What must not be cut through.

    Attributes:
        head_sizes: Features of a head, by the last part of a module's name: outputs, and inputs of
            o_proj. Those of other modules are not known.
        fused: Which modules have parts side by side.
    """

    head_sizes: Mapping[str, int] = MappingProxyType({})
    fused: FusedModules = MappingProxyType({})

    @classmethod
    def of(cls, head_size: int, fused: FusedModules | None) -> Shapes:
        """Where all heads are of one size; 1: it is not known.

        Raises:
            InvalidArgumentError: `fused` is no such map.
        """
        fused = {} if fused is None else fused
        FusedNames(fused)
        return cls(dict.fromkeys(_WITH_HEADS, head_size), fused)


def shapes_of(config: PreTrainedConfig | None, fused: FusedModules | None) -> Shapes:
    """As a transformers model's configuration has them; `fused` is used instead if given."""
    if fused is not None:
        FusedNames(fused)  # checks them
    if config is None:
        return Shapes(fused=fused or {})
    text = config.get_text_config(decoder=True)
    known_fused = fused_modules_of(config) if fused is None else fused
    latent = latent_head_sizes(text)
    if latent:
        return Shapes(latent, known_fused)
    heads, hidden = (getattr(text, n, None) for n in ("num_attention_heads", "hidden_size"))
    head_size = getattr(text, "head_dim", None) or (hidden // heads if heads and hidden else 1)
    return Shapes.of(head_size, known_fused)


def latent_head_sizes(text: PreTrainedConfig) -> dict[str, int]:
    """Head sizes of multi-head latent attention, as DeepSeek has it; empty for any other.

    Queries and keys of a head are wider than its values, and kv_b_proj has a head's keys (without
    their rotated part) and values side by side. What `head_dim` says there is neither's.
    """
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope, rope, value = (getattr(text, name, None) for name in names)
    if not (nope and rope and value):
        return {}
    query = nope + rope
    return {"q_proj": query, "q_b_proj": query, "kv_b_proj": nope + value, "o_proj": value}


def declared_plan(model: nn.Module) -> TpPlan:
    """The plan that a transformers model declares.

    Raises:
        InvalidArgumentError: It declares none.
    """
    plan: Any = getattr(model, "tp_plan", None)
    if not plan:
        plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not plan:
        raise InvalidArgumentError(
            f"{type(model).__name__} declares no tensor parallel plan: give tp_plan, such as "
            '{"q_proj": "colwise", "o_proj": "rowwise"}'
        )
    return dict(plan)


def plan_splits(
    modules: Iterable[_core.LoraModule], plan: TpPlan, shapes: Shapes
) -> dict[str, ModuleSplit]:
    """How each module is cut.

    Args:
        modules: Whole.
        plan: If several entries match a module, the longest counts.
        shapes: Heads stay whole, and the parts of fused modules are cut one by one, unless the
            plan says "colwise_gather_output": transformers cuts those as one.

    Returns:
        By name; modules that no entry matches are not cut.

    Raises:
        InvalidArgumentError: The plan has another word for a module than is known.
    """
    check_mapping(plan, "tp_plan", "give names of modules, each with a word for how it is cut")
    patterns = [
        (re.compile(r"(?:.*\.)?" + re.escape(key).replace(r"\*", r"[^.]+")), plan[key])
        for key in sorted(plan, key=len, reverse=True)
    ]
    splits: dict[str, ModuleSplit] = {}
    for module in modules:
        style = next((s for pattern, s in patterns if pattern.fullmatch(module.name)), "none")
        splits[module.name] = (
            style if isinstance(style, ModuleSplit) else _split(module, style, shapes)
        )
    return splits


def head_parts(last: str, length: int, shapes: Shapes) -> SplitPart:
    """One part of a module's outputs, by the last part of the module's name."""
    head_size = 1 if last == "o_proj" else shapes.head_sizes.get(last, 1)
    unit = head_size if length % head_size == 0 else 1
    return SplitPart(length, unit, unit > 1 and last in _KEY_VALUE)


def _split(module: _core.LoraModule, style: str, shapes: Shapes) -> ModuleSplit:
    try:
        how = _STYLES[style]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"tp_plan has {shown(style)} for module {quoted(module.name)}: {', '.join(_STYLES)} "
            "are possible"
        ) from None
    last = module.name.rsplit(".", 1)[-1]
    if how == "output":
        fused = {} if style in _CUT_AS_ONE else shapes.fused.get(last, {})
        parts = fused or {last: module.out_features}
        if style in _CUT_AS_ONE and last in shapes.fused:
            return ModuleSplit(how)
        return ModuleSplit(how, tuple(head_parts(n, size, shapes) for n, size in parts.items()))
    head_size = shapes.head_sizes.get(last, 1)
    if how == "input" and last == "o_proj" and module.in_features % head_size == 0:
        return ModuleSplit(how, (SplitPart(module.in_features, head_size),))
    return ModuleSplit(how)
