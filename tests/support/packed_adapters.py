"""A small model with TensorRT-LLM's module ids, and packed adapters of it with known content."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tests.support.adapters import Weights, layered_modules

from pagedlora import LoraModelConfig
from pagedlora.engine.dtypes import to_core_dtype

HIDDEN = 16
MLP = 32
NUM_LAYERS = 2
SHAPES = {
    "attn_qkv": (HIDDEN, 3 * HIDDEN),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_dense": (HIDDEN, HIDDEN),
    "mlp_h_to_4h": (HIDDEN, MLP),
    "mlp_4h_to_h": (MLP, HIDDEN),
    "mlp_gate": (HIDDEN, MLP),
    "cross_attn_qkv": (HIDDEN, 3 * HIDDEN),
    "cross_attn_q": (HIDDEN, HIDDEN),
    "cross_attn_k": (HIDDEN, HIDDEN),
    "cross_attn_v": (HIDDEN, HIDDEN),
    "cross_attn_dense": (HIDDEN, HIDDEN),
}
"""One attention head; the position of a name is its module id."""
_LOW_RANK_IDS = frozenset({1, 2, 3, 9, 10, 11})
ROWS = len(SHAPES) * NUM_LAYERS

Packed = tuple[torch.Tensor, torch.Tensor]


def packed_model(dtype: torch.dtype = torch.float32, max_lora_rank: int = 64) -> LoraModelConfig:
    """Two layers of all modules of `SHAPES`."""
    return LoraModelConfig(layered_modules(NUM_LAYERS, SHAPES), to_core_dtype(dtype), max_lora_rank)


def matrices_of_ranks(
    model: LoraModelConfig, ranks: Mapping[int, int], seed: int, dtype: torch.dtype = torch.float32
) -> Weights:
    """Normal numbers, none of them zero, for the modules whose ids have a rank, in every layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator).to(dtype)
        return torch.where(numbers == 0, torch.ones((), dtype=dtype), numbers)

    weights: Weights = {}
    for module in sorted(model.modules, key=lambda m: (m.module_id, m.layer_id)):
        if rank := ranks.get(module.module_id):
            weights[module.name] = (
                draw(rank, module.in_features),
                draw(module.out_features, rank),
            )
    return weights


def reference_matrices(
    model: LoraModelConfig, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Weights:
    """The adapter of the scenarios: rank 8 everywhere, but 4 on plain q, k and v."""
    ranks = {i: 4 if i in _LOW_RANK_IDS else 8 for i in range(len(SHAPES))}
    return matrices_of_ranks(model, ranks, seed, dtype)


def pack(
    model: LoraModelConfig, matrices: Weights, *, columns: int = 4, padding: int = 0
) -> Packed:
    """Packs matrices, one row per module in the order of the mapping.

    Args:
        model: Says the ids and layers.
        matrices: Module name to (A, B), all of one dtype.
        columns: Of the configuration: 3, or 4 with zeros in the last.
        padding: Zeros after the longest row.

    Returns:
        Weights [1, rows, W] and int32 configuration [1, rows, columns].
    """
    modules = {module.name: module for module in model.modules}
    flat = [torch.cat([a.reshape(-1), b.reshape(-1)]) for a, b in matrices.values()]
    width = max(row.numel() for row in flat) + padding
    weights = torch.zeros(1, len(flat), width, dtype=flat[0].dtype)
    config = torch.zeros(1, len(flat), columns, dtype=torch.int32)
    for position, (name, row) in enumerate(zip(matrices, flat, strict=True)):
        module, rank = modules[name], matrices[name][0].shape[0]
        weights[0, position, : row.numel()] = row
        config[0, position, :3] = torch.tensor([module.module_id, module.layer_id, rank])
    return weights, config
