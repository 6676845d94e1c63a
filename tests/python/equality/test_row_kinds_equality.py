"""Design 3.5: DoRA, biases, embeddings, output embeddings, Conv1D and fused projections, as PEFT.

PEFT refuses DoRA in mixed batches, so each answer is compared with PEFT's alone; ours come from
batches of all of them, through room for two adapters, and are asked for again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.equality_bench import Bench, open_bench
from tests.support.peft_oracle import (
    TOLERANCE,
    Answer,
    Case,
    PeftOracle,
    assert_equal_to_peft,
    assert_rounding_like_peft,
)
from tests.support.row_kinds import EXTRA_TARGETS, KINDS, save_kinds, silent_peft
from tests.support.tiny_models import VOCAB_SIZE

from pagedlora import _core
from pagedlora.dora import squared_row_norms
from pagedlora.engine import lora_hooks
from pagedlora.loaders import binding
from pagedlora.loaders.binding import BoundModule, make_rows
from pagedlora.registry import base_model

AdaptersOf = Callable[[str], dict[str, Path]]
OracleOf = Callable[[str], PeftOracle]
_MIN_DIFFERENCE = 100 * TOLERANCE


@pytest.fixture(scope="session")
def kinds_of(tmp_path_factory: pytest.TempPathFactory) -> AdaptersOf:
    """Family to its saved adapters."""

    @cache
    def saved(family: str) -> dict[str, Path]:
        return save_kinds(tmp_path_factory.mktemp(family), family)

    return saved


@pytest.fixture(scope="session")
def judge_of(kinds_of: AdaptersOf) -> OracleOf:
    """Family to PEFT with all of them."""

    @cache
    def loaded(family: str) -> PeftOracle:
        with silent_peft():
            return PeftOracle(family, kinds_of(family))

    return loaded


@contextmanager
def open_kinds(family: str, adapters: dict[str, Path], **options: Any) -> Iterator[Bench]:
    """An engine whose targets are all linear modules and those that must be named."""
    targets = ["all-linear", *EXTRA_TARGETS[family]]
    with open_bench(family, adapters, lora_targets=targets, **options) as bench:
        yield bench


def make_cases(family: str) -> list[Case]:
    """The base and every adapter with two prompts, in an arbitrary fixed order."""
    generator = random.Random(5)
    prompts = [tuple(generator.randrange(VOCAB_SIZE) for _ in range(n)) for n in (5, 19)]
    cases = [Case(name, prompt) for name in (None, *KINDS[family]) for prompt in prompts]
    generator.shuffle(cases)
    return cases


def assert_logits_differ(cases: list[Case], answers: list[Answer]) -> None:
    """Fails if the logits of two adapters are so much alike that a mix-up could go unseen."""
    by_prompt: dict[tuple[int, ...], list[tuple[str | None, torch.Tensor]]] = {}
    for case, answer in zip(cases, answers, strict=True):
        by_prompt.setdefault(case.prompt, []).append((case.adapter, answer.logits[0]))
    for given in by_prompt.values():
        for (one, left), (other, right) in itertools.combinations(given, 2):
            difference = float((left - right).abs().max() / left.std())
            assert difference > _MIN_DIFFERENCE, f"{one} and {other} are alike"


@pytest.mark.parametrize("family", KINDS)
def test_mixed_batches_answer_as_peft_does_also_when_read_again(
    family: str, kinds_of: AdaptersOf, judge_of: OracleOf
) -> None:
    adapters, cases = kinds_of(family), make_cases(family)
    with open_kinds(family, adapters, device_adapters=2, host_adapters=2) as bench:
        answers = bench.ask(cases)
        assert_equal_to_peft(judge_of(family), cases, answers)
        assert_logits_differ(cases, answers)
        cases.reverse()
        assert_equal_to_peft(judge_of(family), cases, bench.ask(cases))
        cache = bench.llm.peft_cache_manager
        before = cache.stats.source_rereads
        cache.evict_unowned("device")
        cache.evict_unowned("host")
        assert_equal_to_peft(judge_of(family), cases, bench.ask(cases))
        assert cache.stats.source_rereads >= before + len(adapters)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma3"])
def test_in_bfloat16_our_error_is_hardly_larger_than_pefts_own(
    family: str, kinds_of: AdaptersOf
) -> None:
    adapters, cases = kinds_of(family), make_cases(family)
    with open_kinds(family, adapters, dtype=torch.bfloat16) as bench:
        answers = bench.ask(cases)
    with silent_peft():
        assert_rounding_like_peft(family, adapters, cases, answers)


# ---- the check can fail ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def roomy_kinds(kinds_of: AdaptersOf) -> Iterator[Callable[[str], Bench]]:
    with ExitStack() as benches:

        @cache
        def opened(family: str) -> Bench:
            return benches.enter_context(open_kinds(family, kinds_of(family)))

        yield opened


def _without_biases(
    modules: Iterable[BoundModule], offsets: Mapping[str, int] | None = None
) -> list[_core.PlannedRow]:
    """A fault: biases are dropped."""
    return make_rows([m._replace(vectors=m.vectors._replace(bias=None)) for m in modules], offsets)


def _shifted_scales(
    modules: Iterable[BoundModule], offsets: Mapping[str, int] | None = None
) -> list[_core.PlannedRow]:
    """A fault: every output has the DoRA scale of the one before it."""
    return make_rows(
        modules, {name: max(0, offset - 4) for name, offset in (offsets or {}).items()}
    )


def _norm_of_base(weight: torch.Tensor, *_: Any) -> torch.Tensor:
    """A fault: the norm is the base weight's."""
    return weight.double().square().sum(dim=1)


def _norm_without_scale(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: float) -> Any:
    """A fault: the norm is that of W + B A."""
    return squared_row_norms(weight, a, b, 1.0)


def _norm_of_columns(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, s: float) -> Any:
    """A fault: rows and columns mixed up, where that has the right size."""
    return (weight + s * b @ a).double().square().sum(dim=0).repeat(4)[: len(weight)]


FAULTS: dict[str, tuple[str, str, Any, str, Any]] = {
    "norm of the base": ("llama", "dora", base_model, "squared_row_norms", _norm_of_base),
    "norm without scale": ("llama", "dora", base_model, "squared_row_norms", _norm_without_scale),
    "norm of columns": ("llama", "dora", base_model, "squared_row_norms", _norm_of_columns),
    "norm of an embedding": (
        "llama",
        "embedding, dora",
        base_model,
        "squared_row_norms",
        _norm_of_base,
    ),
    "scale of the neighbour": ("llama", "dora rslora", binding, "make_rows", _shifted_scales),
    "base bias scaled": ("qwen2", "dora", lora_hooks, "_bias", lambda *_: None),
    "base bias of Conv1D scaled": ("gpt2", "dora", lora_hooks, "_bias", lambda *_: None),
    "bias of B dropped": ("qwen2", "bias", binding, "make_rows", _without_biases),
    "bias of B dropped, Conv1D": ("gpt2", "bias", binding, "make_rows", _without_biases),
    "embedding not scaled": ("gemma3", "embedding", lora_hooks, "_factor", lambda _: 1.0),
    "embedding with DoRA not scaled": (
        "gemma3",
        "embedding, dora",
        lora_hooks,
        "_factor",
        lambda _: 1.0,
    ),
}
"""Name to family, adapter, and what is put in whose place."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(
    fault: str,
    roomy_kinds: Callable[[str], Bench],
    kinds_of: AdaptersOf,
    judge_of: OracleOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, name, owner, attribute, change = FAULTS[fault]
    bench, path = roomy_kinds(family), kinds_of(family)[name]
    case = next(case for case in make_cases(family) if case.adapter == name)

    def ask() -> None:
        bench.llm.load_lora("another", path)
        try:
            answers = bench.ask([Case("another", case.prompt)])
        finally:
            bench.llm.unload_lora("another")
        assert_equal_to_peft(judge_of(family), [case], answers)

    ask()
    with monkeypatch.context() as patch:
        shapes = bench.llm.lora_manager._parts.shapes
        shapes.clear()
        patch.setattr(owner, attribute, change)
        with pytest.raises(AssertionError, match=r"differ|below"):
            ask()
        shapes.clear()
    bench.check()
