"""How large adapters are in pages, and engines with room for some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pagedlora.config import KvCacheConfig, LoraConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.demo.scenario import DemoError
from pagedlora.engine.llm import LLM
from pagedlora.lora_manager import AdapterInfo, LoraManager
from pagedlora.model_config import LoraModelConfig
from pagedlora.peft_cache import PeftCacheManager
from pagedlora.requests import RequestOutput
from pagedlora.sampling_params import SamplingParams

MAX_RANK = 64
KV_BLOCK_TOKENS = 16
MAX_PROMPT_TOKENS = 96
_ALL_KINDS = {"q", "k", "v", "o", "gate", "up", "down"}
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Fleet:
    """Adapters and their sizes in pages of one size.

    Attributes:
        paths: Name to directory.
        infos: Name to what is known of it.
        page_bytes: Size of a page.
        max_part_bytes: Most bytes of a matrix in one piece.
    """

    paths: Mapping[str, Path]
    infos: Mapping[str, AdapterInfo]
    page_bytes: int
    max_part_bytes: int

    @property
    def total_bytes(self) -> int:
        """What all adapters take together."""
        return sum(info.bytes for info in self.infos.values())

    def room_for_largest(self, count: int, names: Iterable[str] | None = None) -> int:
        """Bytes of the `count` largest adapters, of all or of those named."""
        infos = self.infos.values() if names is None else [self.infos[name] for name in names]
        return sum(sorted((info.bytes for info in infos), reverse=True)[:count])

    def room_for_average(self, count: int) -> int:
        """Bytes of `count` adapters of average size, and never less than the largest one."""
        average = self.total_bytes * count // len(self.infos)
        return max(average, self.room_for_largest(1))


def measure_fleet(model: nn.Module, paths: Mapping[str, Path], dtype: torch.dtype) -> Fleet:
    """Sizes of adapters as the cache would hold them; no weights are read.

    Args:
        model: The base model.
        paths: Name to directory of the adapters.
        dtype: Of the cache.

    Raises:
        PagedLoraError: An adapter cannot be used with the model.
    """
    config = LoraModelConfig.from_module(model, dtype=dtype, max_lora_rank=MAX_RANK)
    cache = PeftCacheManager(
        config, PeftCacheConfig(host_cache_size=_PROBE_BYTES, device_cache_size=_PROBE_BYTES)
    )
    try:
        manager = LoraManager(config, cache)
        infos = {name: manager.register(name, path) for name, path in paths.items()}
        return Fleet(dict(paths), infos, cache.page_bytes, cache.max_part_bytes)
    finally:
        cache.close()


def open_engine(
    model: nn.Module,
    fleet: Fleet,
    *,
    host_bytes: int,
    device_bytes: int,
    batch_size: int,
    answer_tokens: int,
) -> LLM:
    """An engine on a live model with all adapters of the fleet registered.

    Args:
        model: Given back unchanged when the engine is closed.
        fleet: Fixes the page and part sizes.
        host_bytes: Budget of the host tier.
        device_bytes: Budget of the device tier.
        batch_size: Requests that run at once.
        answer_tokens: Longest answer.
    """
    blocks = -(-(MAX_PROMPT_TOKENS + answer_tokens) // KV_BLOCK_TOKENS)
    llm = LLM(
        model,
        lora_config=LoraConfig(max_lora_rank=MAX_RANK),
        peft_cache_config=PeftCacheConfig(
            host_cache_size=host_bytes,
            device_cache_size=device_bytes,
            page_size=fleet.page_bytes,
            max_part_size=fleet.max_part_bytes,
        ),
        kv_cache_config=KvCacheConfig(num_blocks=batch_size * blocks, block_size=KV_BLOCK_TOKENS),
        scheduler_config=SchedulerConfig(max_batch_size=batch_size),
    )
    for name, path in fleet.paths.items():
        llm.load_lora(name, path)
    return llm


def ask(
    llm: LLM,
    prompts: Sequence[list[int]],
    adapters: Sequence[str | None],
    *,
    max_tokens: int,
    ignore_eos: bool = True,
) -> list[list[int]]:
    """Greedy answers, as token ids without the one that ended them.

    Args:
        llm: The engine.
        prompts: Token ids.
        adapters: The adapter of each prompt; None is the base model.
        max_tokens: Most tokens of an answer.
        ignore_eos: Whether every answer is that long.

    Raises:
        DemoError: A request failed.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    outputs = llm.generate(prompts, params, adapters)
    return [_tokens(output, adapter) for output, adapter in zip(outputs, adapters, strict=True)]


def _tokens(output: RequestOutput, adapter: str | None) -> list[int]:
    if output.error is not None:
        raise DemoError(f"the request for {adapter or 'the base model'} failed: {output.error}")
    (completion,) = output.outputs
    ended = completion.finish_reason == "stop"
    return completion.token_ids[:-1] if ended else completion.token_ids


def describe(info: AdapterInfo) -> tuple[str, str]:
    """Rank and targets of an adapter for people."""
    ranks = sorted(set(info.ranks.values()))
    kinds: dict[str, set[str]] = {}
    for module in info.ranks:
        parent, _, kind = module.rpartition(".")
        kinds.setdefault(kind.removesuffix("_proj"), set()).add(parent)
    layers = {parent.rpartition(".")[0] for parents in kinds.values() for parent in parents}
    targets = "all-linear" if kinds.keys() >= _ALL_KINDS else ",".join(kinds)
    return "-".join(map(str, ranks)), f"{targets} in {len(layers)} layers"
