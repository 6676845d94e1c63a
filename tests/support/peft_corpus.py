"""Adapters that PEFT itself makes, one for each way to fill in its `LoraConfig`.

`loaded` are those that must answer as PEFT does, `refused` those that must be refused by the name
of a field or tensor. Together they meet every field of `pagedlora.loaders.peft_fields`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from tests.support.adapters import CONFIG_FILE
from tests.support.encoders import build_classifier
from tests.support.peft_saving import save_with_peft
from tests.support.row_kinds import randomise_layer, silent_peft
from tests.support.tiny_models import build_tiny_model

DECODERS = ("llama", "qwen2", "gemma2", "phi3", "gpt2")
"""Families that the engine serves: separate and fused projections, linear layers and Conv1D."""
CLASSIFIER = "bert"
"""A classifier, to which adapters are attached."""


@dataclass(frozen=True)
class Names:
    """What a family calls its modules.

    Attributes:
        layers: Its list of layers.
        one: Path of a projection within a layer.
        other: Of another one.
        wide: Of what leads into the MLP.
        narrow: Of what leads out of it.
        embedding: Last part of the embedding's name.
        head: Last part of the output module's name.
    """

    layers: str = "model.layers"
    one: str = "self_attn.q_proj"
    other: str = "self_attn.v_proj"
    wide: str = "mlp.up_proj"
    narrow: str = "mlp.down_proj"
    embedding: str = "embed_tokens"
    head: str = "lm_head"

    @property
    def layer(self) -> str:
        """Last part of the name of the list of layers."""
        return last(self.layers)

    @property
    def extra_targets(self) -> list[str]:
        """Modules that carry LoRA only where they are named."""
        return [self.embedding, self.head]


NAMES = {
    "llama": Names(),
    "qwen2": Names(),
    "gemma2": Names(),
    "phi3": Names(one="self_attn.qkv_proj", other="self_attn.o_proj", wide="mlp.gate_up_proj"),
    "gpt2": Names("transformer.h", "attn.c_attn", "mlp.c_fc", "attn.c_proj", "mlp.c_proj", "wte"),
    CLASSIFIER: Names(
        "bert.encoder.layer",
        "attention.self.query",
        "attention.self.value",
        "intermediate.dense",
        "output.dense",
        "word_embeddings",
        "classifier",
    ),
}


@dataclass(frozen=True)
class Entry:
    """One adapter.

    Attributes:
        fields: Of its `LoraConfig`.
        refused: The field or the end of the tensor's name that a refusal names; "" if it loads.
        edits: Fields that are written into the saved configuration because PEFT cannot make such
            an adapter here: it needs packages, data or hardware that are not there.
        config: Another configuration than `LoraConfig`.
    """

    fields: Mapping[str, Any]
    refused: str = ""
    edits: Mapping[str, Any] = field(default_factory=dict)
    config: type[peft.PeftConfig] = peft.LoraConfig


def last(path: str) -> str:
    """The last part of a name."""
    return path.rpartition(".")[2]


def build(family: str) -> Any:
    """The family's tiny model."""
    return build_classifier() if family == CLASSIFIER else build_tiny_model(family)


def loaded(family: str) -> dict[str, Entry]:
    """What must answer as PEFT does; name to entry."""
    names = NAMES[family]
    both = [last(names.one), last(names.other)]
    tables = (_patterns(names), _targets(names), _inits_and_harmless(names), _kinds(names))
    return {
        name: Entry({"r": 6, "lora_alpha": 12, "target_modules": both, **fields})
        for table in tables
        for name, fields in table.items()
    }


def _patterns(n: Names) -> dict[str, dict[str, Any]]:
    one, other = last(n.one), last(n.other)
    layers = re.escape(n.layers)
    return {
        "plain": {},
        "rank pattern": {"rank_pattern": {one: 3}},
        "alpha pattern": {"alpha_pattern": {other: 40}},
        "both patterns, other keys": {"rank_pattern": {one: 2}, "alpha_pattern": {other: 30}},
        "patterns and rsLoRA": {
            "use_rslora": True,
            "lora_alpha": 5,
            "rank_pattern": {one: 9},
            "alpha_pattern": {one: 2.5},
        },
        "first key wins": {"rank_pattern": {f"0.{n.one}": 2, one: 5}},
        "first alpha wins": {"alpha_pattern": {f"1.({n.one}|{n.other})": 40, one: 25}},
        "a later key is longer": {"rank_pattern": {one: 5, f"1.{n.other}": 2}},
        "anchored key": {
            "rank_pattern": {f"^{n.layers}.1.{n.one}": 4},
            "alpha_pattern": {rf"^{layers}\.0\..*{other}": 50},
        },
        "full path": {"alpha_pattern": {f"{n.layers}.1.{n.other}": 60}},
        "expression as key": {
            "alpha_pattern": {rf"{n.layer}\.[01]\.({n.one}|{n.wide})": 33},
            "rank_pattern": {f".*[{other[0]}]{other[1:]}": 1},
        },
    }


def _targets(n: Names) -> dict[str, dict[str, Any]]:
    one, other = last(n.one), last(n.other)
    return {
        "targets as expression": {"target_modules": rf".*\.({n.wide}|{n.narrow})"},
        "targets of one layer": {
            "target_modules": rf"{re.escape(n.layers)}\.1\.({n.one}|{n.narrow})",
            "r": 2,
        },
        "all-linear": {"target_modules": "all-linear", "r": 3},
        "ALL-LINEAR": {"target_modules": "ALL-LINEAR", "r": 2, "lora_alpha": 7},
        "targets by path": {"target_modules": [f"{n.layer}.0.{n.narrow}", f"1.{n.other}"]},
        "exclude list": {
            "target_modules": "all-linear",
            "exclude_modules": [last(n.narrow), one],
        },
        "exclude expression": {"exclude_modules": rf".*{n.layer}\.0.*{one}"},
        "layers": {"layers_to_transform": [1]},
        "one layer": {"layers_to_transform": 0, "target_modules": [n.wide]},
        "layers by pattern": {
            "layers_to_transform": [0],
            "layers_pattern": n.layer,
            "target_modules": [other, n.wide],
        },
    }


def _inits_and_harmless(n: Names) -> dict[str, dict[str, Any]]:
    return {
        "gaussian": {"init_lora_weights": "gaussian", "r": 5},
        "not initialised": {"init_lora_weights": False, "r": 7},
        "orthogonal": {"init_lora_weights": "orthogonal", "r": 8},
        "mica": {"init_lora_weights": "mica", "r": 3, "target_modules": [n.narrow]},
        "eva": {
            "init_lora_weights": "eva",
            "eva_config": peft.EvaConfig(rho=1.5),
            "r": 2,
            "target_modules": [n.wide, last(n.one)],
        },
        "harmless fields": {
            "fan_in_fan_out": True,
            "lora_dropout": 0.3,
            "qalora_group_size": 8,
            "revision": "main",
            "task_type": "FEATURE_EXTRACTION",
            "loftq_config": {"loftq_bits": 4},
            "runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True),
            "r": 1,
        },
        "configurations of other inits": {
            "corda_config": CordaConfig(verbose=True),
            "lora_ga_config": LoraGAConfig(),
            "megatron_core": "megatron.core.other",
            "base_model_name_or_path": "somebody/something",
            "auto_mapping": {"base_model_class": "X", "parent_library": "y"},
            "inference_mode": True,
            "peft_version": "0.1.0",
            "r": 4,
        },
    }


def _kinds(n: Names) -> dict[str, dict[str, Any]]:
    return {
        "dora": {"use_dora": True, "target_modules": [last(n.one), n.wide]},
        "dora, patterns": {
            "use_dora": True,
            "use_rslora": True,
            "rank_pattern": {last(n.one): 4},
            "alpha_pattern": {last(n.other): 3},
        },
        "bias of B": {"lora_bias": True, "r": 3, "target_modules": [last(n.one), n.narrow]},
        "bias of B, rsLoRA": {"lora_bias": True, "use_rslora": True, "lora_alpha": 3},
        "embedding": {"target_modules": [n.embedding], "r": 5},
        "output module": {"target_modules": [n.head, last(n.one)], "r": 4},
    }


def refused(family: str) -> dict[str, Entry]:
    """What must be refused; name to entry. `NOT_MADE` says what PEFT cannot make of it."""
    n = NAMES[family]
    targets = [last(n.one), last(n.other)]
    fields = {"r": 6, "lora_alpha": 12, "target_modules": targets}
    entries = {
        "another method": Entry(
            {"r": 4, "target_modules": targets}, "peft_type", config=peft.LoHaConfig
        )
    }
    for name, (field_name, own) in _refused_fields(n).items():
        entries[name] = Entry({**fields, **own}, field_name)
    for name, (field_name, value) in _EDITED.items():
        entries[name] = Entry(fields, field_name, edits={field_name: value})
    return entries


def _refused_fields(n: Names) -> dict[str, tuple[str, dict[str, Any]]]:
    init = "init_lora_weights"
    targets = [last(n.one), last(n.other)]
    return {
        "all biases": ("bias", {"bias": "all"}),
        "biases of LoRA's modules": ("bias", {"bias": "lora_only"}),
        "saved head": ("modules_to_save", {"modules_to_save": [n.head]}),
        "PiSSA": (init, {init: "pissa"}),
        "fast PiSSA": (init, {init: "pissa_niter_2"}),
        "OLoRA": (init, {init: "olora"}),
        "LoRA-GA": (init, {init: "lora_ga"}),
        "replicated layers": ("layer_replication", {"layer_replication": [[0, 2], [1, 2]]}),
        "trained tokens": (
            "trainable_token_indices",
            {"trainable_token_indices": {n.embedding: [1, 2]}},
        ),
        "aLoRA": (
            "alora_invocation_tokens",
            {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
        ),
        "QALoRA": ("use_qalora", {"use_qalora": True}),
        "MonteCLoRA": ("monteclora_config", {"monteclora_config": peft.MontecloraConfig()}),
        "BD-LoRA": (
            "use_bdlora",
            {"use_bdlora": {"target_modules_bd_b": targets, "nblocks": 2}, "r": 4},
        ),
        "KaSA": ("kasa_config", {"kasa_config": {"beta": 1e-4}}),
        "VeLoRA": ("velora_config", {"velora_config": {"num_groups": 4}}),
        "parameters": (
            "target_parameters",
            {"target_parameters": [f"{n.one}.weight"], "target_modules": []},
        ),
        "tied weights": ("ensure_weight_tying", {"ensure_weight_tying": True}),
    }


_EDITED: dict[str, tuple[str, Any]] = {
    "CorDA": ("init_lora_weights", "corda"),
    "LoftQ": ("init_lora_weights", "loftq"),
    "Megatron": ("megatron_config", {"hidden_size": 32}),
    "Arrow": ("arrow_config", {"top_k": 3}),
}
NOT_MADE = {
    ("gpt2", "another method"): "Conv1D'> not supported",
    ("gpt2", "replicated layers"): "Could not locate the layers attribute",
    ("gpt2", "BD-LoRA"): "'Conv1D' object has no attribute 'out_features'",
    ("gpt2", "KaSA"): "KaSA does not support",
    (CLASSIFIER, "aLoRA"): "no attribute 'prepare_inputs_for_generation'",
}
"""Family and entry that the installed PEFT does not make, and what it says."""


def save_corpus(root: Path, family: str, entries: Mapping[str, Entry]) -> dict[str, Path]:
    """Lets PEFT make the adapters of a family; name to directory."""
    return {
        name: save_entry(root / f"{number:02d}", family, entry, seed=number)
        for number, (name, entry) in enumerate(entries.items())
    }


def save_entry(directory: Path, family: str, entry: Entry, *, seed: int) -> Path:
    """Makes one adapter of a family's tiny model, all of it random, and saves it with PEFT."""
    generator = torch.Generator().manual_seed(seed)
    with silent_peft(), torch.random.fork_rng(devices=[]), torch.no_grad():
        model = peft.get_peft_model(build(family), entry.config(**entry.fields))
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                randomise_layer(module, generator)
        save_with_peft(model, directory)
    if entry.edits:
        path = directory / CONFIG_FILE
        path.write_text(json.dumps({**json.loads(path.read_text()), **entry.edits}))
    return directory
