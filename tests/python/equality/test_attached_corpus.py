"""Every adapter that PEFT makes for a classifier, attached to it, answers as PEFT does."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tests.support.adapters import CONFIG_FILE
from tests.support.encoders import make_batch
from tests.support.peft_corpus import (
    CLASSIFIER,
    NAMES,
    Entry,
    build,
    loaded,
    save_corpus,
    save_entry,
)
from tests.support.peft_judge import PeftJudge

from pagedlora import (
    LoraManager,
    LoraModelConfig,
    ModelWeights,
    PeftCacheConfig,
    PeftCacheManager,
    UnsupportedAdapterError,
    attach,
)

TARGETS = ["all-linear", *NAMES[CLASSIFIER].extra_targets]
PAGE_BYTES = 1024
ROWS = 6
"""Of a batch, each with an adapter of its own."""


class Attached:
    """A classifier with adapters attached, and room for some of them."""

    def __init__(self, adapters: dict[str, Path], *, pages: int) -> None:
        self.model = build(CLASSIFIER)
        config = LoraModelConfig.from_module(self.model, TARGETS)
        size = pages * PAGE_BYTES
        self.cache = PeftCacheManager(
            config,
            PeftCacheConfig(host_cache_size=size, device_cache_size=size, page_size=PAGE_BYTES),
        )
        self.adapters = LoraManager(config, self.cache, base_weights=ModelWeights(self.model))
        for name, path in adapters.items():
            self.adapters.register(name, path)
        self.attached = attach(self.model, self.cache, self.adapters)

    def logits(self, names: list[str | None], ids: torch.Tensor) -> torch.Tensor:
        """Row i with adapter i."""
        batch = ids.expand(len(names), -1)
        with torch.inference_mode(), self.attached.rows(names):
            return self.model(input_ids=batch).logits

    def close(self) -> None:
        """Checks that nothing is owned, and closes the cache."""
        self.attached.detach()
        assert (self.cache.active_tasks, self.cache.paused_tasks) == ({}, {})
        self.cache.check_invariants()
        self.cache.close()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_corpus(tmp_path_factory.mktemp(CLASSIFIER), CLASSIFIER, loaded(CLASSIFIER))


def test_mixed_batches_answer_as_peft_does_also_when_read_again(adapters: dict[str, Path]) -> None:
    """In both orders, with room for the adapters of a batch and hardly more."""
    ids = make_batch(1, 9, seed=2)["input_ids"]
    judge = PeftJudge(build(CLASSIFIER), adapters)
    expected = {name: judge.logits(name, ids) for name in adapters}
    for one, other in itertools.combinations(expected.values(), 2):
        assert (one - other).abs().max() > 1e-2 * one.std(), "they answer alike"
    sizes = Attached(adapters, pages=1000)
    pages = sorted(info.num_pages for info in sizes.adapters.list())
    sizes.close()
    attached = Attached(adapters, pages=sum(pages[-ROWS:]))
    names, plain = [*adapters], build(CLASSIFIER).requires_grad_(False)
    for order in (names, names[::-1]):
        for first in range(0, len(order), ROWS - 1):
            batch: list[str | None] = [*order[first : first + ROWS - 1], None]
            answers = attached.logits(batch, ids)
            for name, row in zip(batch[:-1], answers, strict=False):
                gap = float((row - expected[str(name)]).abs().max() / expected[str(name)].std())
                assert gap < 1e-4, f"{name}: logits differ by {gap:.2g} of their deviation"
            base = plain(input_ids=ids.expand(len(batch), -1)).logits
            assert torch.equal(answers[-1], base[-1]), "a row without an adapter"
    stats = attached.cache.stats
    assert stats.source_rereads >= len(adapters) // 2
    for tier in ("device", "host"):
        attached.cache.evict_unowned(tier)
    again = attached.logits([names[0]], ids)
    torch.testing.assert_close(again[0], expected[names[0]], rtol=1e-4, atol=1e-4)
    attached.close()


def test_a_classifier_head_that_peft_saved_whole_is_refused_by_name(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    """With task_type="SEQ_CLS" PEFT adds the head to modules_to_save by itself."""
    entry = Entry({"r": 2, "target_modules": ["query"], "task_type": "SEQ_CLS"})
    directory = save_entry(tmp_path / "a", CLASSIFIER, entry, seed=1)
    assert "classifier" in (directory / CONFIG_FILE).read_text()
    attached = Attached({}, pages=100)
    with pytest.raises(UnsupportedAdapterError, match=r"classifier") as caught:
        attached.adapters.register("a", directory)
    assert caught.value.field == "modules_to_save"
    attached.close()
