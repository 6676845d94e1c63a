"""A tiny model cut for ranks, its adapters, and what each rank must have of them.

What a rank must have is written here with torch alone, not with what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.adapters import PREFIX, Tensors, write_adapter
from tests.support.row_adapters import apply_rows

from pagedlora import (
    Dtype,
    LlmRequest,
    LoraBatch,
    LoraManager,
    LoraModelConfig,
    LoraOperator,
    PeftCacheConfig,
    PeftCacheManager,
    _core,
)
from pagedlora._core import LoraModule, ModuleKind
from pagedlora.peft_cache import Tier
from pagedlora.sharding import Parallel

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCAB = 16, 4, 4, 2, 24, 40
Q, KV = HEAD * HEADS, HEAD * KV_HEADS
FUSED = {
    "qkv_proj": {"q_proj": Q, "k_proj": KV, "v_proj": KV},
    "gate_up_proj": {"gate_proj": INNER, "up_proj": INNER},
}
PLAN = {
    "qkv_proj": "colwise",
    "q_proj": "colwise",
    "k_proj": "colwise",
    "o_proj": "rowwise",
    "gate_up_proj": "colwise",
    "down_proj": "rowwise",
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}
SIZES = {
    "qkv_proj": (HIDDEN, Q + 2 * KV),
    "q_proj": (HIDDEN, Q),
    "k_proj": (HIDDEN, KV),
    "o_proj": (Q, HIDDEN),
    "gate_up_proj": (HIDDEN, 2 * INNER),
    "down_proj": (INNER, HIDDEN),
    "router": (HIDDEN, 3),
    "embed_tokens": (VOCAB, HIDDEN),
    "lm_head": (HIDDEN, VOCAB),
}
"""Last part of a name to in and out features; `router` is whole on every rank."""
BY_INPUT = ("o_proj", "down_proj", "embed_tokens")
OUTSIDE = ("embed_tokens", "lm_head")


def whole_config(num_layers: int = 1) -> LoraModelConfig:
    """All modules of `SIZES`."""
    modules = [LoraModule("embed_tokens", VOCAB, HIDDEN, kind=ModuleKind.embedding)]
    for layer in range(num_layers):
        modules += [
            LoraModule(f"layers.{layer}.{name}", *sizes, layer)
            for name, sizes in SIZES.items()
            if name not in OUTSIDE
        ]
    return LoraModelConfig([*modules, LoraModule("lm_head", HIDDEN, VOCAB)], Dtype.float32, 16)


def rank_config(config: LoraModelConfig, parallel: Parallel) -> LoraModelConfig:
    """What a rank has."""
    return config.shard(PLAN, **parallel._asdict(), head_size=HEAD, fused_modules=FUSED)


def random_adapter(
    config: LoraModelConfig, rank: int, seed: int, *, bias: bool = False, dora: bool = False
) -> Tensors:
    """Tensors as PEFT names them; with biases none for embeddings, which PEFT refuses."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors: Tensors = {}
    for module in config.modules:
        name, sizes = PREFIX + module.name, (module.in_features, module.out_features)
        if dora:
            tensors[f"{name}.lora_magnitude_vector"] = draw(sizes[1]).abs() + 0.5
        if module.kind == ModuleKind.embedding:
            if bias:
                continue
            tensors[f"{name}.lora_embedding_A"] = draw(rank, sizes[0])
            tensors[f"{name}.lora_embedding_B"] = draw(sizes[1], rank)
            continue
        tensors[f"{name}.lora_A.weight"] = draw(rank, sizes[0])
        tensors[f"{name}.lora_B.weight"] = draw(sizes[1], rank)
        if bias:
            tensors[f"{name}.lora_B.bias"] = draw(sizes[1])
    return tensors


def save_adapter(directory: Path, tensors: Tensors, **fields: Any) -> Path:
    """A PEFT directory of such tensors."""
    names = {name.removeprefix(PREFIX).split(".lora_")[0] for name in tensors}
    return write_adapter(directory, tensors, **{"target_modules": sorted(names), **fields})


def base_weight(name: str) -> torch.Tensor:
    """The whole weight [out, in] of a module."""
    inner, outer = SIZES[name.rsplit(".", 1)[-1]]
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(outer, inner, generator=generator) / 4


def features_here(name: str, tp_size: int, tp_rank: int) -> torch.Tensor:
    """Which outputs, or inputs of those in `BY_INPUT`, a rank has of a whole module."""
    q = torch.arange(Q).view(HEADS, HEAD).chunk(tp_size)[tp_rank].flatten()
    heads = torch.arange(KV).view(KV_HEADS, HEAD)
    few = tp_size > KV_HEADS
    kv = heads[tp_rank * KV_HEADS // tp_size] if few else heads.chunk(tp_size)[tp_rank].flatten()
    inner = torch.arange(INNER).chunk(tp_size)[tp_rank]
    vocabulary = torch.arange(VOCAB).chunk(tp_size)[tp_rank]
    return {
        "qkv_proj": torch.cat([q, Q + kv, Q + KV + kv]),
        "q_proj": q,
        "k_proj": kv,
        "o_proj": q,
        "gate_up_proj": torch.cat([inner, INNER + inner]),
        "down_proj": inner,
        "router": torch.arange(3),
        "embed_tokens": vocabulary,
        "lm_head": vocabulary,
    }[name.rsplit(".", 1)[-1]]


@dataclass(frozen=True)
class RankCache:
    """One rank's cache, with one adapter."""

    config: LoraModelConfig
    peft: PeftCacheManager
    adapters: LoraManager

    def leased(self) -> _core.BatchLease:
        """A lease of a request for the adapter."""
        return self.peft.ensure_batch([self.request], [])

    @property
    def request(self) -> LlmRequest:
        """The one request."""
        return LlmRequest(1, lora_task_id=self.adapters.task_id("a"))

    def weights(self, tier: Tier = "device") -> dict[str, tuple[torch.Tensor, ...]]:
        """What is in the pages."""
        return self.peft.task_weights(self.adapters.task_id("a"), tier)  # type: ignore[return-value]


@contextmanager
def rank_cache(config: LoraModelConfig, directory: Path, **options: Any) -> Iterator[RankCache]:
    """A cache of one rank, with the adapter resident in both tiers; checked and closed at the end.

    `options` are those of `LoraManager`.
    """
    budgets = PeftCacheConfig(host_cache_size=2**19, device_cache_size=2**19, page_size=1024)
    peft = PeftCacheManager(config, budgets)
    cache = RankCache(config, peft, LoraManager(config, peft, **options))
    try:
        cache.adapters.load("a", directory)
        peft.add_request_peft(cache.request)
        assert peft.wait_idle()
        with cache.leased() as lease:
            assert not lease.errors
            yield cache
    finally:
        peft.mark_request_done(LlmRequest(1))
        peft.close()
        peft.check_invariants()


def answer(cache: RankCache, name: str, x: torch.Tensor, *, adds_bias: bool = True) -> torch.Tensor:
    """What a rank's module makes of its inputs (of token ids here for an embedding), with LoRA.

    Args:
        cache: The rank's.
        name: Of the module.
        x: The whole input; token ids [tokens] of an embedding.
        adds_bias: Whether the base module's bias, of 0.25, is added here.
    """
    sharding = cache.config.sharding
    parallel = Parallel() if sharding is None else sharding.parallel
    here = features_here(name, parallel.tp_size, parallel.tp_rank)
    index = cache.config.find(name)
    assert index is not None
    with cache.leased() as lease:
        if x.dtype == torch.int64:
            return _look_up(lease, index, x, base_weight(name).T, here)
        weight = base_weight(name)
        if name.rsplit(".", 1)[-1] in BY_INPUT:
            x, weight = x[:, here].contiguous(), weight[:, here]
        else:
            weight = weight[here]
        bias = torch.full((len(weight),), 0.25 if adds_bias else 0.0)
        y = x @ weight.T + bias
        return apply_rows(lease, [(1, len(x))], index, x, y, base_bias=bias)


def _look_up(
    lease: _core.BatchLease, index: int, x: torch.Tensor, table: torch.Tensor, here: torch.Tensor
) -> torch.Tensor:
    """Of a rank that has some tokens; 0 for the others."""
    local = x - here[0]
    is_here = (local >= 0) & (local < len(here))
    y = torch.where(is_here[:, None], table[x], 0.0)
    LoraOperator(Dtype.float32).apply_embedding(
        LoraBatch(lease, [(1, len(x))]),
        index,
        local.data_ptr(),
        y.data_ptr(),
        len(x),
        y.stride(0),
        Dtype.float32,
    )
    return y
