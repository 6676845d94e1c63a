"""The shapes of a model's attention layers, as a probe forward saw them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer.

    Attributes:
        layer_idx: Its number in the model, from 0.
        num_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: Key and value heads.
        key_dim: Width of a key (and query) head.
        value_dim: Width of a value head; may differ from `key_dim`.
    """

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the KV cache needs to know about a model.

    Attributes:
        layers: One per attention layer; `layers[i].layer_idx == i`.
        dtype: Of queries, keys and values, hence of the KV cache.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
