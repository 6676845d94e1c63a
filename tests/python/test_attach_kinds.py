"""Without the engine: DoRA, biases of B and embeddings, mixed in one batch, equal to PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.warning import PeftWarning
from tests.support.attachments import assert_equal
from tests.support.encoders import EncoderOracle, build_classifier, make_batch
from tests.support.peft_oracle import quiet_peft

from pagedlora import (
    LoraManager,
    LoraModelConfig,
    ModelWeights,
    PeftCacheConfig,
    PeftCacheManager,
    UnsupportedAdapterError,
    attach,
)

ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"r": 4, "target_modules": ["query", "dense", "classifier"], "use_dora": True},
    "embedding": {"r": 8, "target_modules": ["word_embeddings", "value"]},
    "bias": {"r": 4, "target_modules": ["key", "classifier"], "lora_bias": True},
    "dora-embedding": {"r": 3, "target_modules": ["word_embeddings", "query"], "use_dora": True},
}
TARGETS = ["query", "key", "value", "dense", "classifier", "word_embeddings"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by PEFT, with random values in every tensor."""
    root = tmp_path_factory.mktemp("kinds")
    generator = torch.Generator().manual_seed(1)
    model = build_classifier()
    for name, options in ADAPTERS.items():
        with quiet_peft(), torch.no_grad():
            wrapped = peft.get_peft_model(model, peft.LoraConfig(lora_alpha=8, **options))
            for parameter_name, parameter in wrapped.named_parameters():
                if "lora_" in parameter_name:
                    drawn = 0.3 * torch.randn(parameter.shape, generator=generator)
                    is_magnitude = "magnitude" in parameter_name
                    parameter.copy_(parameter + drawn if is_magnitude else drawn)
            with warnings.catch_warnings():
                # PEFT takes a bias of B for an incomplete matrix.
                warnings.filterwarnings("ignore", ".*have invalid shape", PeftWarning)
                wrapped.save_pretrained(root / name)
            wrapped.unload()
    return root


def test_rows_of_every_kind_in_one_batch_equal_peft(directory: Path) -> None:
    model = build_classifier()
    config = LoraModelConfig.from_module(model, TARGETS)
    cache = PeftCacheManager(config, PeftCacheConfig(host_cache_size="8MiB"))
    adapters = LoraManager(config, cache, lora_dir=directory, base_weights=ModelWeights(model))
    names = [*ADAPTERS, None]
    batch = make_batch(len(names), 7, seed=3)
    with torch.inference_mode(), attach(model, cache, adapters) as attached:
        with attached.rows(names):
            answers = model(**batch).logits
        for tier in ("device", "host"):
            cache.core.evict_unowned(tier)
        with attached.rows(names):
            again = model(**batch).logits
    oracle = EncoderOracle(build_classifier(), {name: directory / name for name in ADAPTERS})
    expected = oracle(names, **batch)
    assert_equal(answers, expected)
    assert torch.equal(answers, again), "after eviction and another read"
    assert cache.stats.source_rereads == len(ADAPTERS)
    base = oracle([None] * len(names), **batch)
    assert ((expected - base).abs().amax(dim=1) > 0.1 * base.std())[:-1].all(), "they answer alike"


def test_dora_without_base_weights_is_refused(directory: Path) -> None:
    config = LoraModelConfig.from_module(build_classifier(), TARGETS)
    cache = PeftCacheManager(config, PeftCacheConfig(host_cache_size="8MiB"))
    with pytest.raises(UnsupportedAdapterError, match="base_weights") as caught:
        LoraManager(config, cache).register("dora", directory / "dora")
    assert caught.value.field == "use_dora"
