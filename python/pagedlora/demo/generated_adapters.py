"""Adapters with seeded random content, in PEFT's format: to fill a cache with, not to talk to."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from pagedlora import _core

Q_V = ("q_proj", "v_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR: Literal["all-linear"] = "all-linear"


@dataclass(frozen=True)
class AdapterShape:
    """Rank and targets of an adapter."""

    rank: int
    target_modules: tuple[str, ...] | Literal["all-linear"]

    def targets(self, module_name: str) -> bool:
        """Whether the adapter touches the module, by PEFT's rule: the end of the name counts."""
        if self.target_modules == ALL_LINEAR:
            return True
        return module_name.rpartition(".")[2] in self.target_modules


FLEET_SHAPES = (
    *(AdapterShape(rank, Q_V) for rank in (4, 8, 8, 12, 16, 16, 32, 64)),
    *(AdapterShape(rank, ATTENTION) for rank in (4, 4, 8, 8, 12, 48)),
    *(AdapterShape(rank, ALL_LINEAR) for rank in (4, 4, 4, 4, 6, 8)),
)
"""Mixed as fleets are: many small adapters, few large ones. On average 2.8 MB for SmolLM2-135M."""


def write_adapters(
    root: Path,
    named_shapes: Iterable[tuple[str, AdapterShape]],
    modules: Sequence[_core.LoraModule],
    *,
    seed: int,
    strength: float,
) -> dict[str, Path]:
    """Writes adapters of distinct content.

    Args:
        root: Gets one directory per adapter, named after it.
        named_shapes: What to write.
        modules: All modules of the model that can carry LoRA.
        seed: The same seed, the same bytes.
        strength: Size of an adapter's effect on its modules' outputs for inputs of unit variance,
            if it touches two kinds of modules; one that touches more spreads it over them.

    Returns:
        Name to directory, in the order given.
    """
    paths: dict[str, Path] = {}
    for number, (name, shape) in enumerate(named_shapes):
        paths[name] = root / name
        paths[name].mkdir(parents=True)
        touched = [module for module in modules if shape.targets(module.name)]
        alpha = shape.rank * (1 + number % 2)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        kinds = len({module.name.rpartition(".")[2] for module in touched})
        effect = strength * math.sqrt(2 / kinds)
        b_bound = effect * 3 / math.sqrt(shape.rank) / (alpha / shape.rank)
        tensors = _random_tensors(touched, shape.rank, b_bound, generator)
        save_file(tensors, paths[name] / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_config(paths[name], shape, alpha)
    return paths


def _random_tensors(
    modules: Sequence[_core.LoraModule], rank: int, b_bound: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A as PEFT initialises it and a uniform B, in bfloat16, drawn in one go."""
    sizes = [size for m in modules for size in (rank * m.in_features, m.out_features * rank)]
    values = torch.empty(sum(sizes), dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)
    pieces = iter(torch.split(values, sizes))
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        prefix = f"base_model.model.{module.name}"
        a = next(pieces).mul_(1 / math.sqrt(module.in_features))
        b = next(pieces).mul_(b_bound)
        tensors[f"{prefix}.lora_A.weight"] = a.view(rank, module.in_features)
        tensors[f"{prefix}.lora_B.weight"] = b.view(module.out_features, rank)
    return tensors


def _write_config(directory: Path, shape: AdapterShape, alpha: int) -> None:
    targets = shape.target_modules
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
