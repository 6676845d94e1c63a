"""Design 3.1 and ADR 12: adapters that PEFT made, cut for ranks, answer as PEFT does unsharded.

Every adapter that loads, of every family, is loaded by the ranks of groups of 1, 2 and 4, used,
evicted from both tiers and read again. Where a group has more ranks than the model has heads of
keys and values, several ranks have the same head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.peft_corpus import CLASSIFIER, DECODERS, NAMES, build, loaded, save_corpus
from tests.support.peft_judge import PeftJudge
from tests.support.row_kinds import EXTRA_TARGETS, KINDS, save_kinds
from tests.support.sharded_model import ShardedModel

from pagedlora import PagedLoraError
from pagedlora.loaders import shards
from pagedlora.loaders.bound import BoundModule
from pagedlora.loaders.stored import StoredTensor
from pagedlora.sharding import ModuleShard, Range

pytestmark = pytest.mark.slow

INPUTS = torch.tensor([[3, 1, 41, 15, 9, 26, 5, 35, 63, 0]])
TP_SIZES = (1, 2, 4)


class Corpus(NamedTuple):
    """Adapters of a family on disk, and what PEFT answers with each."""

    family: str
    adapters: dict[str, Path]
    targets: list[str]
    expected: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def corpus_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Corpus]:
    """Family to its adapters; "kinds of" a family: those of all kinds of rows."""

    @cache
    def made(label: str) -> Corpus:
        root = tmp_path_factory.mktemp(label.replace(" ", "_"))
        family = label.removeprefix("kinds of ")
        if family != label:
            adapters, extra = save_kinds(root, family), list(EXTRA_TARGETS[family])
        else:
            adapters = save_corpus(root, family, loaded(family))
            extra = NAMES[family].extra_targets
        judge = PeftJudge(build(family), adapters)
        expected = {name: judge.logits(name, INPUTS) for name in adapters}
        return Corpus(family, adapters, ["all-linear", *extra], expected)

    return made


@pytest.fixture
def open_model() -> Iterator[Callable[..., ShardedModel]]:
    """Opens sharded models; each is checked and closed at the end."""
    opened: list[ShardedModel] = []

    def make(corpus: Corpus, tp_size: int, **options: Any) -> ShardedModel:
        model = ShardedModel(
            corpus.family,
            build(corpus.family),
            corpus.adapters,
            tp_size,
            targets=corpus.targets,
            **options,
        )
        opened.append(model)
        return model

    yield make
    for model in opened:
        model.close()


def assert_answers(model: ShardedModel, corpus: Corpus) -> None:
    """Fails unless every adapter answers as PEFT does."""
    for name, expected in corpus.expected.items():
        gap = float((model.run(name, INPUTS) - expected).abs().max() / expected.std())
        assert gap < 1e-4, f"{name}: logits differ by {gap:.2g} of their deviation"


CORPORA = (*DECODERS, CLASSIFIER, *(f"kinds of {family}" for family in KINDS))


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("label", CORPORA)
def test_ranks_answer_together_as_peft_does_also_when_read_again(
    label: str,
    tp_size: int,
    corpus_of: Callable[[str], Corpus],
    open_model: Callable[..., ShardedModel],
) -> None:
    corpus = corpus_of(label)
    model = open_model(corpus, tp_size)
    assert_answers(model, corpus)
    before = [rank.cache.stats.source_rereads for rank in model.ranks]
    model.evict()
    assert_answers(model, corpus)
    for rank, rereads in zip(model.ranks, before, strict=True):
        assert rank.cache.stats.source_rereads >= rereads + len(corpus.adapters)


@pytest.mark.parametrize("label", CORPORA)
def test_what_ranks_have_is_the_whole_bit_for_bit(
    label: str, corpus_of: Callable[[str], Corpus], open_model: Callable[..., ShardedModel]
) -> None:
    corpus = corpus_of(label)
    whole, *cut = [open_model(corpus, tp_size) for tp_size in TP_SIZES]
    for name in corpus.adapters:
        wanted = whole.gathered(name)
        assert wanted
        digest = whole.ranks[0].adapters.load(name, corpus.adapters[name]).generation
        for model in cut:
            got = model.gathered(name)
            assert got.keys() == wanted.keys()
            for module, (a, b) in wanted.items():
                assert torch.equal(got[module][0], a), f"{name}: A of {module}"
                assert torch.equal(got[module][1], b), f"{name}: B of {module}"
            infos = [rank.adapters.load(name, corpus.adapters[name]) for rank in model.ranks]
            assert {info.generation for info in infos} == {digest}
            assert len({info.num_pages for info in infos}) == 1, "ranks need the same pages"


@pytest.mark.parametrize("tp_size", [2, 4])
def test_fused_modules_that_transformers_cuts_as_one_answer_as_well(
    tp_size: int, corpus_of: Callable[[str], Corpus], open_model: Callable[..., ShardedModel]
) -> None:
    """Its own plan for Phi-3 gathers the outputs of qkv_proj and gate_up_proj."""
    corpus = corpus_of("phi3")
    model = open_model(corpus, tp_size, with_own_plan=False)
    assert_answers(model, corpus)


def test_on_a_cut_fused_module_an_adapter_has_a_row_for_each_part(
    corpus_of: Callable[[str], Corpus], open_model: Callable[..., ShardedModel]
) -> None:
    """q, k and v; gate and up. Over four ranks two have the same head of keys and values."""
    corpus = corpus_of("kinds of phi3")
    model = open_model(corpus, 4)
    for rank in model.ranks:
        with rank.using("fused"):
            weights = rank.weights("fused")
        for layer in range(2):
            a, b = weights[f"model.layers.{layer}.self_attn.qkv_proj"][:2]
            assert (a.shape, b.shape) == ((3 * 7, 32), (8 + 4 + 4 + 8, 3 * 7))
            a, b = weights[f"model.layers.{layer}.mlp.gate_up_proj"][:2]
            assert (a.shape, b.shape) == ((2 * 7, 32), (24, 2 * 7))


# ---- the check can fail ------------------------------------------------------------------------


def _row_before(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """A fault: every rank but the first begins one row too early."""
    return _ROWS_OF(tensor, max(0, first - 1), count)


def _first_columns(module: BoundModule, shard: ModuleShard) -> BoundModule:
    """A fault: all ranks have the first rank's columns of A."""
    ((_, count),) = shard.features
    return _BY_INPUT(module, dataclasses.replace(shard, features=((0, count),)))


def _bias_on_every_rank(module: BoundModule, shard: ModuleShard) -> BoundModule:
    """A fault: a bias is added once for each rank."""
    return _BY_INPUT(module, dataclasses.replace(shard, is_first=True))


def _norm_of_own_columns(module: BoundModule, shard: ModuleShard) -> BoundModule:
    """A fault: DoRA's norm is taken over this rank's columns of B A, the others being 0."""
    bound = _BY_INPUT(module, shard)
    return bound._replace(whole_a=None)


def _parts_back_to_front(wanted: Range, here: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
    """A fault: the parts of a fused module lie in the reverse order."""
    found = [*_OVERLAPS(wanted, here)]
    total = sum(length for _, length, _ in found)
    for begin, length, local_first in found:
        yield begin, length, total - local_first - length


_ROWS_OF, _BY_INPUT, _OVERLAPS = shards.rows_of, shards._by_input, shards._overlaps
FAULTS: dict[str, tuple[str, str, str, Callable[..., Any]]] = {
    "rows of B": ("llama", "plain", "rows_of", _row_before),
    "rows of B of a fused module": ("kinds of phi3", "fused", "rows_of", _row_before),
    "rows of DoRA's scale": ("kinds of qwen2", "dora", "rows_of", _row_before),
    "columns of A": ("llama", "all-linear", "_by_input", _first_columns),
    "columns of A of an embedding": ("llama", "embedding", "_by_input", _first_columns),
    "bias of B": ("llama", "bias of B", "_by_input", _bias_on_every_rank),
    "bias of B, Conv1D": ("gpt2", "bias of B", "_by_input", _bias_on_every_rank),
    "norm of DoRA": ("kinds of llama", "dora", "_by_input", _norm_of_own_columns),
    "order of parts": ("kinds of phi3", "fused", "_overlaps", _parts_back_to_front),
}
"""Name to corpus, adapter, and what is put in whose place in `loaders/shards.py`."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_split_is_seen(
    fault: str,
    corpus_of: Callable[[str], Corpus],
    open_model: Callable[..., ShardedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    label, name, attribute, change = FAULTS[fault]
    corpus = corpus_of(label)
    alone = corpus._replace(
        adapters={name: corpus.adapters[name]}, expected={name: corpus.expected[name]}
    )
    assert_answers(open_model(alone, 2), alone)
    monkeypatch.setattr(shards, attribute, change)
    with pytest.raises((AssertionError, PagedLoraError), match=r"differ|disagree|shape"):
        assert_answers(open_model(alone, 2), alone)
