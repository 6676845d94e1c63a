"""Which models the engine runs: those that provably give the same answers, and no others.

Many families would run and silently be wrong: they ignore the attention function, keep recurrent
state, let one request's length change another's rope, or need a mask that nobody applies. So
a model is admitted only if nothing in its class and configuration speaks against it, a small
instance of it agrees with eager attention, and a probe sees our function in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pagedlora.engine.model_spec import ModelSpec
from pagedlora.engine.probe import probe
from pagedlora.engine.self_check import self_check
from pagedlora.errors import UnsupportedModelError

_HONOURED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# These choose their frequencies by the largest position of the whole row, hence by the neighbours.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def admit(model: nn.Module) -> ModelSpec:
    """Admits a live model, or refuses it by name.

    Takes well under five seconds plus one forward of three tokens.

    Args:
        model: A causal language model, all of it on one device; given back as it was.

    Returns:
        The shapes of its attention layers.

    Raises:
        UnsupportedModelError: Says which property of the model is the reason.
    """
    reason = _refusal_of_class(model) or _refusal_of_config(model) or _refusal_of_rope(model)
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")
    self_check(model)
    return probe(model)


def _refusal_of_class(model: nn.Module) -> str | None:
    if not isinstance(model, PreTrainedModel):
        return "it is not a transformers model (for a PEFT model, pass its base model)"
    if model._is_stateful:
        return "its layers keep recurrent state, which is not paged"
    if not (model._supports_attention_backend and model._can_set_attn_implementation()):
        return "its class keeps its own attention and does not take another (attention backends)"
    if model.get_output_embeddings() is None:
        return "it has no language-model head"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        return (
            f"its weights are on {', '.join(sorted(map(str, devices)))}; the engine computes on "
            "the CPU or on one GPU"
        )
    return None


def _refusal_of_config(model: PreTrainedModel) -> str | None:
    config = model.config
    if config.get_text_config(decoder=True) is not config:
        return "it is made of several models; load its text model alone"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        return "its attention is not causal"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in layer_types:
        return "layers of type 'chunked_attention' need a mask that paged attention does not have"
    others = sorted(layer_types - _HONOURED_LAYER_TYPES)
    if others:
        return f"layers of type {', '.join(map(repr, others))} keep state that is not paged"
    return None


def _rope_types(value: Any) -> Iterator[str]:
    """All rope types in a rope field: a type, one per layer type, or parameters with types."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("rope_type", "type") or isinstance(inner, dict):
                yield from _rope_types(inner)


def _rope_fields(config: PreTrainedConfig) -> Iterator[Any]:
    for name in ("rope_parameters", "rope_scaling"):
        yield getattr(config, name, None)


def _refusal_of_rope(model: PreTrainedModel) -> str | None:
    found = {kind for field in _rope_fields(model.config) for kind in _rope_types(field)}
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        found.update(kind for kind in kinds if isinstance(kind, str))
    for kind in sorted(found):
        if any(word in kind for word in _BATCH_DEPENDENT_ROPE):
            return (
                f"its rope type '{kind}' depends on the longest request of a batch, so one "
                "request would change another's answers"
            )
    return None
