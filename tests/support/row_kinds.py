"""Adapters that PEFT makes of everything a LoRA row can be beyond plain A and B.

One table per family of tiny models: DoRA, biases of B, embeddings, output embeddings, Conv1D and
fused projections.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from tests.support.peft_oracle import quiet_peft
from tests.support.peft_saving import save_with_peft
from tests.support.tiny_models import build_tiny_model

_STRENGTH = 0.7
"""Size of an adapter's output beside its module's input."""
Fields = Mapping[str, Any]

KINDS: dict[str, dict[str, Fields]] = {
    "llama": {
        "dora": {"use_dora": True, "target_modules": "all-linear", "r": 5},
        "dora rslora": {"use_dora": True, "use_rslora": True, "target_modules": ["v_proj"], "r": 9},
        "plain": {"target_modules": ["q_proj", "v_proj"], "r": 4},
        "head": {"target_modules": ["lm_head"], "r": 3},
        "head and dora": {"use_dora": True, "target_modules": ["lm_head", "o_proj"], "r": 2},
        "embedding": {"target_modules": ["embed_tokens"], "r": 6},
        "embedding, dora": {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]},
        "everything": {"target_modules": ["embed_tokens", "lm_head", "up_proj"], "r": 11},
    },
    "qwen2": {  # has biases of its own in q, k and v
        "dora": {"use_dora": True, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"], "r": 3},
        "bias rslora": {"lora_bias": True, "use_rslora": True, "target_modules": ["k_proj"]},
        "plain": {"target_modules": "all-linear", "r": 2},
    },
    "gpt2": {
        "plain": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
        "dora": {"use_dora": True, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
        "bias": {"lora_bias": True, "target_modules": ["c_attn"], "fan_in_fan_out": True},
        "embeddings": {"target_modules": ["wte", "wpe"], "r": 3},
        "head": {"target_modules": ["lm_head", "c_fc"], "fan_in_fan_out": False, "r": 2},
    },
    "phi3": {
        "fused": {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 7},
        "fused dora": {"use_dora": True, "target_modules": ["qkv_proj", "gate_up_proj"]},
        "all-linear": {"target_modules": "all-linear", "r": 2},
    },
    "gemma3": {  # scales what it looks up
        "embedding": {"target_modules": ["embed_tokens"], "r": 5},
        "embedding, dora": {"use_dora": True, "target_modules": ["embed_tokens"], "r": 3},
        "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"], "r": 3},
    },
    "llama_tied": {
        "embedding": {"target_modules": ["embed_tokens"], "r": 4},
        "head": {"target_modules": ["lm_head"], "r": 4},
        "both": {"target_modules": ["embed_tokens", "lm_head"], "r": 2},
    },
}
"""Family to adapters by name: fields of PEFT's `LoraConfig`."""

EXTRA_TARGETS = {
    "llama": ("embed_tokens", "lm_head"),
    "qwen2": (),
    "gpt2": ("wte", "wpe", "lm_head"),
    "phi3": (),
    "gemma3": ("embed_tokens",),
    "llama_tied": ("embed_tokens", "lm_head"),
}
"""Family to the modules beside all linear ones that must be named to carry LoRA."""


def save_kinds(root: Path, family: str) -> dict[str, Path]:
    """Lets PEFT make a family's adapters; name to directory."""
    return {
        name: save_kind(root / f"{number:02d}", family, fields, seed=number)
        for number, (name, fields) in enumerate(KINDS[family].items())
    }


def save_kind(directory: Path, family: str, fields: Fields, *, seed: int) -> Path:
    """Makes one adapter of a family's tiny model, all of it random, and saves it with PEFT.

    Returns:
        The directory.
    """
    config = peft.LoraConfig(**{"r": 6, "lora_alpha": 12, "task_type": "CAUSAL_LM", **fields})
    generator = torch.Generator().manual_seed(seed)
    with silent_peft(), torch.random.fork_rng(devices=[]), torch.no_grad():
        model = peft.get_peft_model(build_tiny_model(family), config)
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                randomise_layer(module, generator)
        save_with_peft(model, directory, save_embedding_layers=False)
    return directory


@contextmanager
def silent_peft() -> Iterator[None]:
    """PEFT warns of much that is meant here."""
    with quiet_peft(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def randomise_layer(layer: Any, generator: torch.Generator) -> None:
    """Draws everything so that what the layer adds is visible and not too large."""

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    scale, rank = abs(layer.scaling["default"]), layer.r["default"]
    if layer.lora_embedding_A:
        a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
        a.copy_(noise(a))
    else:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        a.copy_(noise(a) / a.shape[1] ** 0.5)
        bias = getattr(layer.lora_B["default"], "bias", None)  # block-diagonal ones have none
        if bias is not None:
            bias.copy_(noise(bias) * _STRENGTH / scale)
    b.copy_(noise(b) * _STRENGTH / (scale * rank**0.5))
    if layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.mul_(1.0 + 0.3 * noise(magnitude))
