"""A small configuration of the same model class: same kinds of layers, fewer and narrower.

Kept: what decides how attention computes (head widths, grouping, rope, soft cap, sinks, kinds of
layers, norms). Shrunk: what only decides how much (number of layers and experts, hidden and
feed-forward widths, vocabulary), and windows, so that a short prompt is longer than a window.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

WINDOW = 8
VOCAB_SIZE = 128

_LAYERS_PER_KIND = 2
_MAX_LAYERS = 8
_HIDDEN_SIZE = 64
_MAX_HIDDEN_SIZE = 2048  # where the hidden size is heads x head width
_FEED_FORWARD_SIZE = 64
_UPPER_BOUNDS = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "ffn_dim": _FEED_FORWARD_SIZE,
    "ffn_hidden_size": _FEED_FORWARD_SIZE,
    "n_inner": _FEED_FORWARD_SIZE,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
}
# Fields that hold indices of layers rather than one entry per layer.
_LAYER_INDEX_LISTS = ("mlp_only_layers", "moe_layers")


def _per_layer_lists(config: PreTrainedConfig) -> dict[str, list[Any]]:
    num_layers = config.num_hidden_layers
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list)
        and len(value) == num_layers
        and name not in ("architectures", "eos_token_id", *_LAYER_INDEX_LISTS)
    }


def kept_layers(config: PreTrainedConfig) -> list[int]:
    """The first two layers of each kind, at most eight layers.

    Args:
        config: Of the full model. A layer's kind is its entry in all fields with one entry per
            layer, and whether it is dense where others have experts.

    Returns:
        Layer numbers, ascending.
    """
    lists = _per_layer_lists(config)
    index_lists = [getattr(config, name, None) or [] for name in _LAYER_INDEX_LISTS]
    num_dense = getattr(config, "first_k_dense_replace", None) or 0
    kinds: dict[str, list[int]] = {}
    for layer in range(config.num_hidden_layers):
        kind = repr(
            (
                [values[layer] for values in lists.values()],
                [layer in indices for indices in index_lists],
                layer < num_dense,
            )
        )
        kinds.setdefault(kind, []).append(layer)
    kept = sorted(layer for layers in kinds.values() for layer in layers[:_LAYERS_PER_KIND])
    return kept[:_MAX_LAYERS]


def _shrink_layers(config: PreTrainedConfig) -> None:
    kept = kept_layers(config)
    for name, values in _per_layer_lists(config).items():
        setattr(config, name, [values[layer] for layer in kept])
    for name in _LAYER_INDEX_LISTS:
        indices = getattr(config, name, None)
        if indices:
            setattr(config, name, [new for new, old in enumerate(kept) if old in indices])
    num_dense = getattr(config, "first_k_dense_replace", None)
    if num_dense is not None:
        config.first_k_dense_replace = sum(layer < num_dense for layer in kept)
    config.num_hidden_layers = len(kept)


def _shrink_heads(config: PreTrainedConfig) -> None:
    """At most two key-value heads, and as many query heads for each as there were."""
    old_hidden_size = config.hidden_size
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or old_hidden_size // num_heads
    # Where the two agree, modules may rely on it; elsewhere the hidden size is free.
    is_product = old_hidden_size == num_heads * head_dim
    new_kv_heads = min(num_kv_heads, 2)
    group = max(num_heads // num_kv_heads, 1)
    while is_product and group > 1 and new_kv_heads * group * head_dim > _MAX_HIDDEN_SIZE:
        group //= 2
    config.num_attention_heads = new_kv_heads * group
    if getattr(config, "num_key_value_heads", None) is not None:
        config.num_key_value_heads = new_kv_heads
    config.hidden_size = new_kv_heads * group * head_dim if is_product else _HIDDEN_SIZE
    for name in ("word_embed_proj_dim", "embedding_size"):
        size = getattr(config, name, None)
        if size is not None:
            same = size == old_hidden_size
            setattr(config, name, config.hidden_size if same else config.hidden_size // 2)


def shrunk_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration whose model has a few million parameters at most, as a rule.

    Args:
        config: Of a decoder; not changed.

    Returns:
        A fresh configuration for float32 without quantisation.
    """
    small = copy.deepcopy(config)
    _shrink_layers(small)
    _shrink_heads(small)
    for name in [*_UPPER_BOUNDS, *(n for n in vars(small) if "intermediate_size" in n)]:
        bound = _UPPER_BOUNDS.get(name, _FEED_FORWARD_SIZE)
        value = getattr(small, name, None)
        if isinstance(value, list):
            setattr(small, name, [min(entry, bound) for entry in value])
        elif value is not None:
            setattr(small, name, min(value, bound))
    for name in [n for n in vars(small) if n.endswith("_token_id")]:
        value = getattr(small, name)
        if isinstance(value, list) or (isinstance(value, int) and value >= VOCAB_SIZE):
            setattr(small, name, None)
    if getattr(small, "quantization_config", None) is not None:
        del small.quantization_config
    small.dtype = torch.float32
    return small
