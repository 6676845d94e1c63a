"""Prints how full pages are with real models' adapters, beside other ways of sizing, as Markdown.

Usage, from the repository's root: python -m benchmarks.python.utilisation_table
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tests.support.trtllm_sizing import Adapter, slot_utilisation, trtllm_utilisation

from pagedlora import LoraModelConfig, _core

BUDGET_BYTES = 2**30  # the default of PeftCacheConfig.host_cache_size
RANKS = ((8, 16, 32, 64, 128), (4, 8, 16, 32, 64), (8,), (64,))
TARGETS: Mapping[str, Sequence[str] | None] = {
    "q, v": ("q_proj", "v_proj"),
    "q, k, v, o": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "all-linear": None,
}
MIXED = "a third each"

_LLAMA = {"model_type": "llama", "vocab_size": 64}
MODELS: Mapping[str, dict[str, Any]] = {
    "135M": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "0.5B": {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70B": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


@dataclass(frozen=True)
class Fleet:
    """Adapters that are resident together.

    Attributes:
        ranks: One adapter, or one per target list, of each.
        targets: Key of `TARGETS`, or `MIXED`.
    """

    ranks: tuple[int, ...]
    targets: str

    def adapters(self, config: LoraModelConfig) -> list[Adapter]:
        """Rows of each adapter."""
        names = list(TARGETS) if self.targets == MIXED else [self.targets]
        modules = [target_modules(config, TARGETS[name]) for name in names]
        return [[(m, rank) for m in chosen] for chosen in modules for rank in self.ranks]


@dataclass(frozen=True)
class Utilisation:
    """Shares of the bytes in use that are weights."""

    pagedlora: float
    trtllm: float
    max_rank_slots: float


def fleets() -> Iterator[Fleet]:
    """Those of the table, in its order."""
    for ranks in RANKS:
        for targets in (*TARGETS, MIXED):
            yield Fleet(ranks, targets)


def target_modules(config: LoraModelConfig, ends: Sequence[str] | None) -> list[int]:
    """Indices of the modules whose names end in one of `ends`; None: all."""
    return [
        index
        for index, module in enumerate(config.modules)
        if ends is None or module.name.split(".")[-1] in ends
    ]


@cache
def model_config(name: str) -> LoraModelConfig:
    """One of `MODELS` in bfloat16."""
    from transformers import AutoConfig

    fields = dict(MODELS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return LoraModelConfig.from_hf_config(config, dtype=torch.bfloat16, max_lora_rank=128)


@cache
def layout_params(name: str) -> _core.LayoutParams:
    """Page and part sizes that a cache of `BUDGET_BYTES` uses for the model."""
    return _core.search_layout_params(model_config(name), BUDGET_BYTES)


@cache
def measure(name: str, fleet: Fleet) -> Utilisation:
    """How full a fleet's pages are on a model."""
    config, params = model_config(name), layout_params(name)
    adapters = fleet.adapters(config)
    sizes = [_core.measure_layout(config, rows, params) for rows in adapters]
    pages = sum(num_pages for num_pages, _ in sizes)
    payload = sum(payload_bytes for _, payload_bytes in sizes)
    features = [module.in_features + module.out_features for module in config.modules]
    return Utilisation(
        payload / (pages * params.page_bytes),
        trtllm_utilisation(features, adapters),
        slot_utilisation(features, adapters),
    )


def percent(share: float) -> str:
    """Rounded down, so that 99.0 means at least 99 %."""
    return f"{int(share * 1000) / 10:.1f}"


def markdown() -> str:
    """Both tables."""
    lines = ["| ranks | targets | " + " | ".join(MODELS) + " |", "|---|---|" + "---|" * len(MODELS)]
    for fleet in fleets():
        cells = []
        for name in MODELS:
            shares = measure(name, fleet)
            other = f"{percent(shares.trtllm)} / {percent(shares.max_rank_slots)}"
            cells.append(f"**{percent(shares.pagedlora)}** / {other}")
        ranks = ", ".join(map(str, fleet.ranks))
        lines.append(f"| {ranks} | {fleet.targets} | " + " | ".join(cells) + " |")
    lines += ["", *model_table()]
    return "\n".join(lines)


def model_table() -> Iterator[str]:
    """What the search chose for each model, and how many adapters that holds."""
    columns = (
        "modules",
        "page",
        "largest part",
        "one rank, all-linear",
        "rank 16, all-linear, per GiB",
    )
    yield "| model | " + " | ".join(columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for name in MODELS:
        config, params = model_config(name), layout_params(name)
        rank_bytes = sum(m.in_features + m.out_features for m in config.modules) * 2
        (rows,) = Fleet((16,), "all-linear").adapters(config)
        num_pages, _ = _core.measure_layout(config, rows, params)
        fitting = BUDGET_BYTES // params.page_bytes // num_pages
        yield (
            f"| {name} | {len(config.modules)} | {params.page_bytes:,} B "
            f"| {params.max_part_bytes:,} B | {rank_bytes:,} B | {fitting} |"
        )


if __name__ == "__main__":
    print(markdown())
