"""Tiny random decoders of many families, for tests: no files, no network, under 100 ms each.

Weights are drawn far wider than transformers' initialisers do, so that attention is peaked, logits
are well separated and greedy answers vary. The same family, seed and overrides always give the
same weights, whatever the global random state is, which is left as it was.
"""

from __future__ import annotations

import copy
import math
import zlib
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # a tied head answers the last token again and again
}
_HEAD_DIM = {"head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}

# family -> (transformers' model type, what it needs beside or instead of the common fields)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_rope_scaled": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", _HEAD_DIM),
    "mistral": ("mistral", {**_HEAD_DIM, "sliding_window": 6}),
    "mixtral": ("mixtral", {**_EXPERTS, "sliding_window": None}),
    "gemma2": (
        "gemma2",
        {
            **_HEAD_DIM,
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_HEAD_DIM,
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": 6}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "cohere2": (
        "cohere2",
        {
            **_HEAD_DIM,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_HEAD_DIM,
            **_EXPERTS,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    # Families that the engine must refuse.
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {}),
    "mpt": ("mpt", {"expansion_ratio": 2}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 6}),
    "mamba": ("mamba", {"state_size": 4}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_HEAD_DIM,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "llama4_chunked": (
        "llama4_text",
        {
            **_HEAD_DIM,
            **_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 6,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "phi3_longrope": ("phi3", {"rope_parameters": _LONGROPE, "sliding_window": None}),
    "llama_dynamic_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
}

TINY_FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a tiny model.

    Args:
        family: One of `TINY_FAMILIES`.
        **overrides: Fields that replace the family's own.

    Returns:
        A fresh configuration: 2 layers, hidden size 32, 4 heads over 2 key-value heads where the
        family has grouped heads, vocabulary 64, no special tokens.
    """
    model_type, fields = _FAMILIES[family]
    return AutoConfig.for_model(model_type, **copy.deepcopy({**_COMMON, **fields, **overrides}))


def build_tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A tiny random decoder in evaluation mode.

    Args:
        family: One of `TINY_FAMILIES`.
        seed: Chooses the weights, together with the family.
        dtype: Of the weights; they are drawn in float32 and rounded.
        **overrides: Fields of the configuration that replace the family's own.

    Returns:
        A model with its own configuration object, on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            tiny_config(family, **overrides), dtype=torch.float32
        )
    randomise_weights(model, seed=seed + zlib.crc32(family.encode()))
    return model.to(dtype).eval()


def randomise_weights(model: nn.Module, *, seed: int) -> None:
    """Draws all parameters anew, wide enough for peaked attention and separated logits.

    Args:
        model: Changed in place. Matrices get the variance that keeps activations at unit size,
            embeddings unit variance, biases and norms a spread around what they were.
        seed: Of a private generator.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * (1.5 / math.sqrt(min(parameter.shape[-2:]))))


def greedy_tokens(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What the model answers by itself: greedy, whole context each time, eager, no cache.

    Args:
        model: A causal language model on the CPU; its attention implementation is used as it is.
        prompt: Token ids.
        num_tokens: How many to generate.

    Returns:
        The generated token ids.
    """
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
