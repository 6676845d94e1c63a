"""PEFT adapters with known content: their tensors, and directories of them on disk."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagedlora import LoraModelConfig, _core

PREFIX = "base_model.model."
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

Tensors = dict[str, torch.Tensor]
Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]


def layered_modules(
    num_layers: int, shapes: Mapping[str, tuple[int, int]], prefix: str = "model.layers"
) -> list[_core.LoraModule]:
    """The same modules in every layer.

    Args:
        num_layers: How often.
        shapes: Name within the layer to (in_features, out_features).
        prefix: Before the layer number.
    """
    return [
        _core.LoraModule(f"{prefix}.{layer}.{name}", inner, outer, layer, position)
        for layer in range(num_layers)
        for position, (name, (inner, outer)) in enumerate(shapes.items())
    ]


def adapter_tensors(
    modules: Sequence[_core.LoraModule],
    rank: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    integers: bool = True,
) -> Tensors:
    """Tensors named as PEFT names them, the same for the same arguments.

    Args:
        modules: Which modules the adapter touches.
        rank: Of each.
        seed: Different seeds give different content.
        dtype: Of the tensors.
        integers: Small integers, whose products are exact in every dtype; else normal numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        if integers:
            return torch.randint(-8, 9, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    tensors: Tensors = {}
    for module in modules:
        tensors[f"{PREFIX}{module.name}.lora_A.weight"] = draw(rank, module.in_features)
        tensors[f"{PREFIX}{module.name}.lora_B.weight"] = draw(module.out_features, rank)
    return tensors


def adapter_config(tensors: Mapping[str, torch.Tensor], **fields: Any) -> dict[str, Any]:
    """The configuration that PEFT would write for plain LoRA.

    Args:
        tensors: Say the rank and the target modules.
        **fields: Put instead; None removes the field.
    """
    pairs = [name for name in tensors if name.endswith(".lora_A.weight")]
    ranks = [tensors[name].shape[0] for name in pairs if tensors[name].shape]
    config = {
        "peft_type": "LORA",
        "r": ranks[0] if ranks else 8,
        "lora_alpha": 16,
        "use_rslora": False,
        "target_modules": sorted({name.split(".")[-3] for name in pairs}) or ["q_proj"],
        **fields,
    }
    return {name: value for name, value in config.items() if value is not None}


def write_adapter(
    directory: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], **fields: Any
) -> Path:
    """Writes a PEFT directory.

    Args:
        directory: Made if need be; older files of an adapter in it are replaced, not rewritten.
        tensors: Written as they are, fit or unfit.
        **fields: As in `adapter_config`.

    Returns:
        The directory.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / WEIGHTS_FILE).unlink(missing_ok=True)
    save_file(dict(tensors), path / WEIGHTS_FILE)
    (path / CONFIG_FILE).write_text(json.dumps(adapter_config(tensors, **fields)))
    return path


def write_random_adapter(
    directory: str | os.PathLike[str],
    config: LoraModelConfig,
    *,
    rank: int,
    seed: int,
    targets: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Writes an adapter of small integers that fits a model.

    Args:
        directory: As in `write_adapter`.
        config: The model.
        rank: Of every module.
        seed: As in `adapter_tensors`.
        targets: Ends of the names of the modules it touches; None: all.
        dtype: Of the file.
        **fields: As in `adapter_config`.
    """
    modules = select_modules(config, targets)
    return write_adapter(directory, adapter_tensors(modules, rank, seed, dtype=dtype), **fields)


def select_modules(
    config: _core.LoraModelConfig, targets: Sequence[str] | None
) -> list[_core.LoraModule]:
    """The modules whose names end in one of `targets`; None: all."""
    if targets is None:
        return list(config.modules)
    return [module for module in config.modules if module.name.split(".")[-1] in targets]


def weights_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Weights:
    """Module name to (A, B) in the dtype of a cache, as torch casts them."""
    weights: Weights = {}
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            weights[module] = (tensor.to(dtype), b.to(dtype))
    return weights


def scale_of(config: Mapping[str, Any]) -> float:
    """PEFT's factor of B A x for a configuration."""
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)


def read_matrix(pointer: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A copy of the row-major matrix at an address."""
    size = shape[0] * shape[1] * dtype.itemsize
    return torch.frombuffer(bytearray(ctypes.string_at(pointer, size)), dtype=dtype).view(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits; -0 and 0 differ."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = torch.int32 if left.dtype == torch.float32 else torch.int16
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def assert_same_weights(actual: Mapping[str, Any], expected: Weights) -> None:
    """Fails unless both have the same modules with the same bits."""
    assert set(actual) == set(expected)
    for module, matrices in expected.items():
        for letter, got, wanted in zip("AB", actual[module], matrices, strict=True):
            assert same_bits(got, wanted), f"{module} lora_{letter} differs"
