"""Adapters that PEFT itself makes, one for each way to fill in its `LoraConfig`.

`LOADED` are those that must answer as PEFT does, `REFUSED` those that must be refused by the name
of a field or tensor. Families whose modules need more than linear layers (fused projections,
Conv1D, classifiers) have corpora of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from tests.support.peft_oracle import quiet_peft
from tests.support.tiny_models import build_tiny_model

FAMILIES = ("llama", "qwen2", "gemma2")
"""Families of decoders with separate linear projections."""
_QV = ("q_proj", "v_proj")
_STRENGTH = 0.7
"""Size of an adapter's output beside its module's input."""


@dataclass(frozen=True)
class Entry:
    """One adapter.

    Attributes:
        fields: Of its `LoraConfig`.
        refused: The field or the end of the tensor's name that a refusal names; "" if it loads.
    """

    fields: Mapping[str, Any]
    refused: str = field(default="")


def _entry(refused: str = "", **fields: Any) -> Entry:
    fields = {"r": 6, "lora_alpha": 12, "target_modules": list(_QV), **fields}
    return Entry(fields, refused)


LOADED: dict[str, Entry] = {
    "plain": _entry(),
    "rank pattern": _entry(rank_pattern={"q_proj": 3}),
    "alpha pattern": _entry(alpha_pattern={"v_proj": 40}),
    "both patterns, other keys": _entry(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 30}),
    "patterns and rsLoRA": _entry(
        use_rslora=True, lora_alpha=5, rank_pattern={"q_proj": 9}, alpha_pattern={"q_proj": 2.5}
    ),
    "first key wins": _entry(rank_pattern={"0.self_attn.q_proj": 2, "q_proj": 5}),
    "first alpha wins": _entry(alpha_pattern={"1.self_attn.(q|v)_proj": 40, "q_proj": 25}),
    "a later key is longer": _entry(rank_pattern={"q_proj": 5, "1.self_attn.v_proj": 2}),
    "anchored key": _entry(
        rank_pattern={"^model.layers.1.self_attn.q_proj": 4},
        alpha_pattern={r"^model\.layers\.0\..*v_proj": 50},
    ),
    "full path": _entry(alpha_pattern={"model.layers.1.self_attn.v_proj": 60}),
    "expression as key": _entry(
        alpha_pattern={r"layers\.[01]\.self_attn\.(q|k)_proj": 33}, rank_pattern={".*[v]_proj": 1}
    ),
    "targets as expression": _entry(target_modules=r".*\.(gate|up)_proj"),
    "targets of one layer": _entry(target_modules=r"model\.layers\.1\..*_proj", r=2),
    "all-linear": _entry(target_modules="all-linear", r=3),
    "ALL-LINEAR": _entry(target_modules="ALL-LINEAR", r=2, lora_alpha=7),
    "targets by path": _entry(target_modules=["layers.0.mlp.down_proj", "1.self_attn.o_proj"]),
    "exclude list": _entry(target_modules="all-linear", exclude_modules=["down_proj", "q_proj"]),
    "exclude expression": _entry(exclude_modules=r".*layers\.0.*q_proj"),
    "layers": _entry(layers_to_transform=[1]),
    "one layer": _entry(layers_to_transform=0, target_modules=["o_proj"]),
    "layers by pattern": _entry(
        layers_to_transform=[0], layers_pattern="layers", target_modules=["v_proj", "up_proj"]
    ),
    "gaussian": _entry(init_lora_weights="gaussian", r=5),
    "not initialised": _entry(init_lora_weights=False, r=7),
    "orthogonal": _entry(init_lora_weights="orthogonal", r=8),
    "mica": _entry(init_lora_weights="mica", r=3, target_modules=["down_proj"]),
    "eva": _entry(init_lora_weights="eva", r=2, target_modules=["o_proj", "k_proj"]),
    "harmless fields": _entry(
        fan_in_fan_out=True,
        lora_dropout=0.3,
        qalora_group_size=8,
        revision="main",
        task_type="CAUSAL_LM",
        loftq_config={"loftq_bits": 4},
        r=1,
    ),
}

REFUSED: dict[str, Entry] = {
    "all biases": _entry("bias", bias="all"),
    "biases of LoRA's modules": _entry("bias", bias="lora_only"),
    "saved head": _entry("modules_to_save", modules_to_save=["lm_head"]),
    "PiSSA": _entry("init_lora_weights", init_lora_weights="pissa"),
    "fast PiSSA": _entry("init_lora_weights", init_lora_weights="pissa_niter_2"),
    "OLoRA": _entry("init_lora_weights", init_lora_weights="olora"),
    "LoRA-GA": _entry("init_lora_weights", init_lora_weights="lora_ga"),
    "replicated layers": _entry("layer_replication", layer_replication=[[0, 2], [1, 2]]),
    "trained tokens": _entry("trainable_token_indices", trainable_token_indices=[1, 2]),
    "aLoRA": _entry("alora_invocation_tokens", alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
    "BD-LoRA": _entry(
        "use_bdlora",
        use_bdlora={"target_modules_bd_b": list(_QV), "nblocks": 2},
        r=4,
    ),
    "KaSA": _entry("kasa_config", kasa_config={"beta": 1e-4}),
    "VeLoRA": _entry("velora_config", velora_config={"num_groups": 4}),
    "parameters": _entry(
        "target_parameters", target_parameters=["self_attn.q_proj.weight"], target_modules=[]
    ),
}


def save_corpus(root: Path, family: str, entries: Mapping[str, Entry]) -> dict[str, Path]:
    """Lets PEFT make the adapters of a family; name to directory."""
    return {
        name: save_entry(root / f"{number:02d}", family, entry, seed=number)
        for number, (name, entry) in enumerate(entries.items())
    }


def save_entry(directory: Path, family: str, entry: Entry, *, seed: int) -> Path:
    """Makes one adapter of a family's tiny model with random A and B, and saves it with PEFT."""
    generator = torch.Generator().manual_seed(seed)
    with silent_peft(), torch.random.fork_rng(devices=[]), torch.no_grad():
        model = peft.get_peft_model(build_tiny_model(family), peft.LoraConfig(**entry.fields))
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                _randomise(module, generator)
        model.save_pretrained(directory)
    return directory


@contextmanager
def silent_peft() -> Iterator[None]:
    """PEFT warns of much that is meant here."""
    with quiet_peft(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _randomise(layer: Any, generator: torch.Generator) -> None:
    """Draws A and B so that scale * B A x is about as large as x, whatever rank and scale."""
    if "default" not in layer.lora_A:
        return  # LoRA on an embedding: those are refused whatever they hold
    scale, rank = layer.scaling["default"], layer.r["default"]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.copy_(torch.randn(a.shape, generator=generator) / a.shape[1] ** 0.5)
    b.copy_(torch.randn(b.shape, generator=generator) * _STRENGTH / (abs(scale) * rank**0.5))
