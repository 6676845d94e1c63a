"""Adapters for more tokens than the model has are refused with both numbers (design 3.5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from tests.support.adapters import PREFIX, Tensors, adapter_config, write_adapter
from tests.support.cache_fixtures import Cache
from tests.support.llm_fixtures import SMALL_CACHE
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model

from pagedlora import (
    LLM,
    AdapterFormatError,
    AdapterWeights,
    LoraConfig,
    LoraManager,
    SamplingParams,
    UnsupportedAdapterError,
)
from pagedlora._core import LoraModule, ModuleKind

HIDDEN, RANK, TOKENS = 16, 3, 40


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    embedding = LoraModule("model.embed_tokens", TOKENS, HIDDEN, kind=ModuleKind.embedding)
    modules = [LoraModule(name, HIDDEN, TOKENS) for name in ("lm_head", "score")]
    inner = LoraModule("model.layers.0.lm_head", HIDDEN, TOKENS, 0)
    return make_cache(modules=[embedding, *modules, inner])


def embedding(tokens: int) -> Tensors:
    name = f"{PREFIX}model.embed_tokens.lora_embedding"
    return {f"{name}_A": torch.ones(RANK, tokens), f"{name}_B": torch.ones(HIDDEN, RANK)}


def linear(name: str, tokens: int) -> Tensors:
    name = f"{PREFIX}{name}.lora"
    a, b = torch.ones(RANK, HIDDEN), torch.ones(tokens, RANK)
    return {f"{name}_A.weight": a, f"{name}_B.weight": b}


def fields_of(tensors: Tensors) -> dict[str, Any]:
    targets = ["embed_tokens", "lm_head", "score"]
    return adapter_config(tensors, r=RANK, target_modules=targets)


def head(tokens: int) -> Tensors:
    return linear("lm_head", tokens)


CASES: dict[Callable[[int], Tensors], tuple[str, str]] = {
    embedding: ("embed_tokens.lora_embedding_A", "model.embed_tokens"),
    head: ("lm_head.lora_B.weight", "lm_head"),
}


@pytest.mark.parametrize("tokens", [TOKENS + 1, 50000])
@pytest.mark.parametrize("make", CASES)
def test_more_tokens_are_refused_with_both_numbers_and_a_way_out(
    cache: Cache, tmp_path: Path, make: Callable[[int], Tensors], tokens: int
) -> None:
    tensors = make(tokens)
    tensor, module = CASES[make]
    path = write_adapter(tmp_path, tensors, **fields_of(tensors))
    words = (
        f"{tensor}' of .* is for {tokens} tokens, and module '{module}' of the model has {TOKENS}: "
        rf"tokens were added .*Way out: .* {tokens} tokens \(resize_token_embeddings\)"
    )
    manager = LoraManager(cache.config, cache.peft)
    loads: list[Callable[[], object]] = [
        lambda: manager.register("a", path),
        lambda: manager.load_from_tensors("a", fields_of(tensors), tensors),
        lambda: AdapterWeights.from_tensors(tensors, fields_of(tensors)).carried(cache.config),
    ]
    for load in loads:
        with pytest.raises(UnsupportedAdapterError, match=words) as caught:
            load()
        assert caught.value.field.endswith(tensor)
    assert len(manager) == 0


def test_as_many_tokens_load_and_other_misfits_say_the_shape(cache: Cache, tmp_path: Path) -> None:
    """Fewer tokens, and modules that are no output embedding, have nothing to do with new ones."""
    manager = LoraManager(cache.config, cache.peft)
    good = {**embedding(TOKENS), **linear("lm_head", TOKENS)}
    manager.load_from_tensors("good", fields_of(good), good)
    misfits = [
        embedding(TOKENS - 1),
        linear("lm_head", TOKENS - 1),
        linear("score", TOKENS + 1),
        linear("model.layers.0.lm_head", TOKENS + 1),
    ]
    for tensors in misfits:
        with pytest.raises(AdapterFormatError, match=r"has shape .*; the model needs"):
            manager.load_from_tensors("a", fields_of(tensors), tensors)


def test_the_way_out_is_one(tmp_path: Path) -> None:
    """PEFT's own adapter on a resized model: refused on the old one, loads on the resized one."""
    tokens = VOCAB_SIZE + 3
    targets = ["embed_tokens", "lm_head", "q_proj"]
    trained = build_tiny_model("llama")
    trained.resize_token_embeddings(tokens, mean_resizing=False)
    peft = get_peft_model(trained, PeftConfig(r=2, target_modules=targets))
    peft.save_pretrained(str(tmp_path), save_embedding_layers=False)
    lora = LoraConfig(lora_target_modules=["all-linear", "embed_tokens", "lm_head"])
    with (
        LLM(build_tiny_model("llama"), lora_config=lora, peft_cache_config=SMALL_CACHE) as llm,
        pytest.raises(UnsupportedAdapterError, match=rf"{tokens} tokens.*has {VOCAB_SIZE}"),
    ):
        llm.load_lora("a", tmp_path)
    resized = build_tiny_model("llama")
    resized.resize_token_embeddings(tokens, mean_resizing=False)
    with LLM(resized, lora_config=lora, peft_cache_config=SMALL_CACHE) as llm:
        llm.load_lora("a", tmp_path)
        [output] = llm.generate([[1, tokens - 1]], SamplingParams(max_tokens=2), "a")
    assert output.error is None
