"""A probe forward: which attention layers does a model really run, and with which shapes?"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from pagedlora.engine.attention import AttentionCall, attention_step
from pagedlora.engine.live_model import LiveModelHold, turn_of
from pagedlora.engine.model_spec import LayerSpec, ModelSpec
from pagedlora.errors import UnsupportedModelError

_PROBE_TOKENS = 3


class _RecordingStep:
    """Notes every attention call and answers zeros."""

    def __init__(self) -> None:
        self.layers: list[LayerSpec] = []
        self.dtypes: set[torch.dtype] = set()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        _, num_heads, num_tokens, key_dim = call.query.shape
        num_kv_heads, value_dim = call.value.shape[1], call.value.shape[-1]
        self.dtypes.update((call.query.dtype, call.key.dtype, call.value.dtype))
        expected_key = (1, num_kv_heads, num_tokens, key_dim)
        if tuple(call.key.shape) != expected_key or num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"layer {call.layer_idx} attends with query {tuple(call.query.shape)}, key "
                f"{tuple(call.key.shape)} and value {tuple(call.value.shape)}: not one row of "
                "grouped-query attention"
            )
        self.layers.append(LayerSpec(call.layer_idx, num_heads, num_kv_heads, key_dim, value_dim))
        return call.value.new_zeros((1, num_tokens, num_heads, value_dim))


def probe(model: PreTrainedModel) -> ModelSpec:
    """Runs three tokens through the model with a recording attention function.

    Args:
        model: Given back as it was.

    Returns:
        The shapes of its attention layers.

    Raises:
        UnsupportedModelError: Our function did not run exactly once for each layer, an argument of
            it would not be honoured, or queries, keys and values differ in dtype.
    """
    step = _RecordingStep()
    device = next(model.parameters()).device
    hold = LiveModelHold(model)
    try:
        with turn_of(model), torch.inference_mode(), attention_step(step):
            model(
                input_ids=torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0),
                position_ids=torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor([_PROBE_TOKENS - 1], device=device),
            )
    finally:
        hold.release()
    name = type(model).__name__
    ran = sorted(layer.layer_idx for layer in step.layers)
    expected = list(range(model.config.num_hidden_layers))
    if ran != expected:
        raise UnsupportedModelError(
            f"{name} has {len(expected)} layers, but paged attention ran for layers {ran}: the "
            "others keep state that is not paged"
        )
    if len(step.dtypes) != 1:
        raise UnsupportedModelError(
            f"{name} attends with mixed dtypes: {sorted(map(str, step.dtypes))}"
        )
    layers = sorted(step.layers, key=lambda layer: layer.layer_idx)
    return ModelSpec(layers=tuple(layers), dtype=step.dtypes.pop())
