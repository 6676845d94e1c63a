"""A tiny model whose adapters are loaded and computed by the ranks of a tensor parallel group.

The base model is whole. Every module with LoRA is computed rank by rank, each with its part of the
base weight and what its own cache has of the adapter; the parts are put side by side, or added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.support.row_adapters import apply_rows
from torch import nn
from transformers.pytorch_utils import Conv1D

from pagedlora import (
    Dtype,
    LlmRequest,
    LoraBatch,
    LoraManager,
    LoraModelConfig,
    LoraOperator,
    ModelWeights,
    PeftCacheConfig,
    PeftCacheManager,
    _core,
)
from pagedlora.loaders.fused_modules import fused_modules_of
from pagedlora.sharding import ModuleShard

Weights = Mapping[str, tuple[torch.Tensor | None, ...]]
_CACHE_BYTES = 2**20
_FUSED = {"c_attn": {"c_q": 32, "c_k": 32, "c_v": 32}}
"""GPT-2 has q, k and v side by side, without names of their own."""
_OWN_PLANS: dict[str, dict[str, str]] = {
    "phi3": {
        "qkv_proj": "colwise",
        "gate_up_proj": "colwise",
        "o_proj": "rowwise",
        "down_proj": "rowwise",
        "embed_tokens": "embedding_rowwise",
        "lm_head": "colwise",
    },
    "gpt2": {
        "c_attn": "colwise",
        "attn.c_proj": "rowwise",
        "c_fc": "colwise",
        "mlp.c_proj": "rowwise",
        "wte": "embedding_rowwise",
        "lm_head": "colwise",
    },
    "qwen2_moe": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
        **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
    },
    "bert": {
        **dict.fromkeys(("query", "key", "value", "intermediate.dense"), "colwise"),
        "output.dense": "rowwise",
        "word_embeddings": "embedding_rowwise",
    },
}
"""Phi-3's cuts its fused modules part by part, unlike the one that transformers declares."""


class Rank:
    """The cache of one rank, with adapters registered by name."""

    def __init__(
        self,
        model: nn.Module,
        adapters: Mapping[str, Path],
        targets: list[str],
        parallel: tuple[int, int],
        plan: Mapping[str, str] | None,
    ) -> None:
        config = getattr(model, "config", None)
        fused = {**fused_modules_of(config), **_FUSED}
        size, rank = parallel
        self.config = LoraModelConfig.from_module(
            model, targets, tp_size=size, tp_rank=rank, tp_plan=plan, fused_modules=fused
        )
        self.cache = PeftCacheManager(
            self.config,
            PeftCacheConfig(
                host_cache_size=_CACHE_BYTES, device_cache_size=_CACHE_BYTES, page_size=1024
            ),
        )
        self.adapters = LoraManager(
            self.config, self.cache, base_weights=ModelWeights(model), fused_modules=fused
        )
        for name, path in adapters.items():
            self.adapters.register(name, path)
        self.lease: Any = None

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Leases an adapter; afterwards nobody owns it."""
        request = LlmRequest(1, lora_task_id=self.adapters.task_id(name))
        self.cache.add_request_peft(request)
        try:
            with self.cache.ensure_batch([request], []) as self.lease:
                assert not self.lease.errors, dict(self.lease.errors)
                yield
        finally:
            self.lease = None
            self.cache.mark_request_done(request)

    def weights(self, name: str) -> Weights:
        """What the device pages of a leased adapter hold."""
        return self.cache.task_weights(self.adapters.task_id(name), "device")

    def close(self) -> None:
        """Checks that every page is accounted for, and closes the cache."""
        assert (self.cache.active_tasks, self.cache.paused_tasks) == ({}, {})
        self.cache.check_invariants()
        self.cache.close()


class ShardedModel:
    """A whole model and the ranks that compute its adapters.

    Attributes:
        ranks: In order.
    """

    def __init__(
        self,
        family: str,
        model: nn.Module,
        adapters: Mapping[str, Path],
        tp_size: int,
        *,
        targets: list[str],
        with_own_plan: bool = True,
    ) -> None:
        plan = _OWN_PLANS.get(family) if with_own_plan else None
        self.ranks = [
            Rank(model, adapters, targets, (tp_size, rank), plan) for rank in range(tp_size)
        ]
        self._model = model

    @property
    def modules(self) -> list[_core.LoraModule]:
        """All of the model's, whole."""
        sharding = self.ranks[0].config.sharding
        return list(self.ranks[0].config.modules if sharding is None else sharding.modules)

    def shard(self, rank: Rank, index: int) -> ModuleShard:
        """What a rank has of a module."""
        sharding = rank.config.sharding
        if sharding is None:
            return ModuleShard(index, "none", ())
        shard = sharding.shards[index]
        assert shard is not None
        return shard

    def run(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [tokens or labels, ...] of one adapter, for one sequence."""
        with ExitStack() as stack:
            for rank in self.ranks:
                stack.enter_context(rank.using(name))
            for index, module in enumerate(self.modules):
                hook = self._hook(index)
                target = self._model.get_submodule(module.name)
                stack.callback(target.register_forward_hook(hook).remove)
            with torch.inference_mode():
                return self._model(input_ids=inputs).logits[0]

    def _hook(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
            if isinstance(module, nn.Embedding):
                return self._embed(module, index, args[0].flatten()).view(y.shape)
            x = args[0].reshape(-1, args[0].shape[-1])
            return self._project(module, index, x).view(y.shape)

        return hook

    def _project(self, module: Any, index: int, x: torch.Tensor) -> torch.Tensor:
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        bias = torch.zeros(len(weight)) if module.bias is None else module.bias.detach()
        whole = torch.full((len(x), len(weight)), torch.nan)
        total = torch.zeros_like(whole)
        for rank in self.ranks:
            shard = self.shard(rank, index)
            here = _indices(shard)
            if shard.how == "input":
                own = bias if shard.is_first else torch.zeros_like(bias)
                total += self._apply(rank, shard, x[:, here], weight[:, here], own)
                whole = total
            else:
                _put(whole, here, self._apply(rank, shard, x, weight[here], bias[here]))
        return whole

    @staticmethod
    def _apply(
        rank: Rank, shard: ModuleShard, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        x, bias = x.contiguous(), bias.contiguous()
        y = x @ weight.T + bias
        return apply_rows(rank.lease, [(1, len(x))], shard.local_index, x, y, base_bias=bias)

    def _embed(self, module: nn.Embedding, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the tokens that it has; 0 for the others."""
        total = torch.zeros(len(ids), module.embedding_dim)
        for rank in self.ranks:
            shard = self.shard(rank, index)
            here = _indices(shard) if shard.how == "input" else torch.arange(len(module.weight))
            local = (ids - here[0]).contiguous()
            is_here = (local >= 0) & (local < len(here))
            y = torch.where(is_here[:, None], module.weight.detach()[ids], 0.0)
            factor = float(getattr(module, "embed_scale", 1.0))
            y = y * factor
            LoraOperator(Dtype.float32).apply_embedding(
                LoraBatch(rank.lease, [(1, len(ids))]),
                shard.local_index,
                local.data_ptr(),
                y.data_ptr(),
                len(ids),
                y.stride(0),
                Dtype.float32,
                factor,
            )
            total = total + y if shard.how == "input" else y
        return total

    def gathered(self, name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B of every module of an adapter, put together from all ranks."""
        with ExitStack() as stack:
            for rank in self.ranks:
                stack.enter_context(rank.using(name))
            stored = [rank.weights(name) for rank in self.ranks]
        names = [module.name for module in self.modules]
        made: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for module_name in stored[0]:
            index = names.index(module_name)
            module = self.modules[index]
            made[module_name] = self._gather(index, module, [each[module_name] for each in stored])
        return made

    def _gather(
        self, index: int, module: _core.LoraModule, stored: list[tuple[Any, ...]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A row per part of a fused module has a copy of A, and its own outputs of B."""
        by_part = [_without_copies(each[0], each[1]) for each in stored]
        ranks = len(by_part[0][0])
        a = torch.full((ranks, module.in_features), torch.nan)
        b = torch.full((module.out_features, ranks), torch.nan)
        for rank, (own_a, own_b) in zip(self.ranks, by_part, strict=True):
            shard = self.shard(rank, index)
            everything, here = slice(None), _indices(shard)
            _put(a, here if shard.how == "input" else everything, own_a)
            _put(b.T, here if shard.how == "output" else everything, own_b.T)
        return a, b

    def evict(self) -> None:
        """From both tiers of every rank."""
        for rank in self.ranks:
            for tier in ("device", "host"):
                rank.cache.evict_unowned(tier)
                assert rank.cache.resident_tasks(tier) == 0

    def close(self) -> None:
        """Checks and closes every rank."""
        for rank in self.ranks:
            rank.close()


def _indices(shard: ModuleShard) -> Any:
    """Of the features that are here."""
    if shard.how == "none":
        return slice(None)
    return torch.cat([torch.arange(first, first + count) for first, count in shard.features])


def _put(whole: torch.Tensor, here: Any, part: torch.Tensor) -> None:
    """Columns of a matrix; those that another rank has, too, must be the same there."""
    before = whole[:, here]
    is_new = before.isnan()
    assert torch.equal(torch.where(is_new, part, before), part), "ranks disagree"
    whole[:, here] = part


def _without_copies(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Undoes what a fused module's parts cost: A once, B of all parts together."""
    for copies in (3, 2):
        ranks, rest = divmod(len(a), copies)
        if rest == 0 and torch.equal(a, a[:ranks].repeat(copies, 1)):
            pieces = b.view(len(b), copies, ranks)
            assert (pieces != 0).any(dim=2).sum(dim=1).le(1).all(), "outputs with several rows"
            return a[:ranks], pieces.sum(dim=1)
    return a, b
