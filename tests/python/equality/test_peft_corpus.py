"""Design 3.5: the reference for a right answer is PEFT; the rest is refused by name."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.equality_bench import Bench, open_bench
from tests.support.peft_corpus import (
    DECODERS,
    NAMES,
    NOT_MADE,
    build,
    loaded,
    refused,
    save_corpus,
    save_entry,
)
from tests.support.peft_oracle import (
    TOLERANCE,
    Answer,
    Case,
    PeftOracle,
    assert_equal_to_peft,
)
from tests.support.row_kinds import silent_peft
from tests.support.tiny_models import VOCAB_SIZE

from pagedlora import (
    AdapterFormatError,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    UnsupportedAdapterError,
)
from pagedlora.loaders.module_rules import ModuleRules, ModuleScaling
from pagedlora.loaders.patterns import KeyTable, PatternTimer
from pagedlora.loaders.peft_fields import PEFT_FIELDS
from pagedlora.loaders.tensor_names import NameMatcher

CorpusOf = Callable[[str], dict[str, Path]]
OracleOf = Callable[[str], PeftOracle]
REFUSED = refused("llama")
_MIN_DIFFERENCE = 100 * TOLERANCE


@pytest.fixture(scope="session")
def corpus_of(tmp_path_factory: pytest.TempPathFactory) -> CorpusOf:
    """Family to the adapters that load."""

    @cache
    def saved(family: str) -> dict[str, Path]:
        return save_corpus(tmp_path_factory.mktemp(family), family, loaded(family))

    return saved


@pytest.fixture(scope="session")
def judge_of(corpus_of: CorpusOf) -> OracleOf:
    """Family to PEFT with all of them."""

    @cache
    def judge(family: str) -> PeftOracle:
        with silent_peft():
            return PeftOracle(family, corpus_of(family))

    return judge


def make_cases(family: str) -> list[Case]:
    """Every adapter with the same prompt, in an arbitrary fixed order."""
    generator = random.Random(3)
    prompt = tuple(generator.randrange(VOCAB_SIZE) for _ in range(9))
    cases = [Case(name, prompt) for name in loaded(family)]
    generator.shuffle(cases)
    return cases


def assert_logits_differ(cases: list[Case], answers: list[Answer]) -> None:
    """Fails if the logits of two adapters are so much alike that a mix-up could go unseen."""
    for (one, left), (other, right) in itertools.combinations(zip(cases, answers, strict=True), 2):
        first, second = left.logits[0], right.logits[0]
        difference = float((first - second).abs().max() / first.std())
        assert difference > _MIN_DIFFERENCE, f"{one.adapter} and {other.adapter} are alike"


def open_corpus(
    family: str, adapters: dict[str, Path], **options: Any
) -> AbstractContextManager[Bench]:
    """An engine whose targets are all linear modules and those that must be named."""
    targets = ["all-linear", *NAMES[family].extra_targets]
    return open_bench(family, adapters, lora_targets=targets, **options)


@pytest.mark.parametrize("family", DECODERS)
def test_every_supported_configuration_answers_as_peft_does_also_when_read_again(
    family: str, corpus_of: CorpusOf, judge_of: OracleOf
) -> None:
    adapters, cases = corpus_of(family), make_cases(family)
    with open_corpus(family, adapters, device_adapters=2, host_adapters=3) as bench:
        answers = bench.ask(cases)
        assert_equal_to_peft(judge_of(family), cases, answers)
        assert_logits_differ(cases, answers)
        cases.reverse()
        assert_equal_to_peft(judge_of(family), cases, bench.ask(cases))
        stats = bench.llm.peft_cache_manager.stats
        assert min(stats.device.tasks_evicted, stats.host.tasks_evicted) >= len(cases)
        assert stats.source_rereads >= len(cases) // 2


def test_the_corpus_meets_every_field_of_the_table() -> None:
    """With a value that is not PEFT's default; those of `LoraRuntimeConfig` in one object."""
    asked = {name for entry in loaded("llama").values() for name in entry.fields}
    named = {entry.refused for entry in refused("llama").values()}
    for name, field in PEFT_FIELDS.items():
        if "." not in name:
            assert name in (named if field.rule == "refused" else asked), name


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name_before_anything_is_registered(
    name: str, tmp_path: Path, bench: Bench
) -> None:
    directory = save_corpus(tmp_path, "llama", {name: REFUSED[name]})[name]
    with pytest.raises(UnsupportedAdapterError) as caught:
        bench.llm.load_lora(name, directory)
    assert REFUSED[name].refused in (caught.value.field, caught.value.field.rpartition(".")[2])
    assert REFUSED[name].refused in str(caught.value)
    assert name not in {info.name for info in bench.llm.list_loras()}


CELLS = [(family, name) for family in NAMES for name in refused(family) if family != "llama"]


@pytest.mark.parametrize(("family", "name"), CELLS)
def test_it_is_refused_so_whatever_the_model(family: str, name: str, tmp_path: Path) -> None:
    """A registry is enough; what PEFT itself does not make of a family cannot be there."""
    entry = refused(family)[name]
    if (family, name) in NOT_MADE:
        with pytest.raises(Exception, match=NOT_MADE[family, name]):
            save_entry(tmp_path / "a", family, entry, seed=1)
        return
    directory = save_entry(tmp_path / "a", family, entry, seed=1)
    config = LoraModelConfig.from_module(build(family))
    sizes = PeftCacheConfig(host_cache_size=2**20, device_cache_size=2**20, page_size=4096)
    manager = LoraManager(config, PeftCacheManager(config, sizes))
    with pytest.raises(UnsupportedAdapterError, match=entry.refused) as caught:
        manager.register("a", directory)
    assert entry.refused == caught.value.field
    assert manager.list() == []
    manager.cache_manager.close()


def test_whole_modules_are_listed_with_their_bytes(tmp_path: Path, bench: Bench) -> None:
    directory = save_corpus(tmp_path, "llama", {"a": REFUSED["saved head"]})["a"]
    with pytest.raises(UnsupportedAdapterError) as error:
        bench.llm.load_lora("a", directory)
    assert "has 1 such tensor of 8192 bytes: " in str(error.value)
    assert "lm_head.weight' [64, 32] of 8192 bytes" in str(error.value)


@pytest.fixture(scope="session")
def _bench(corpus_of: CorpusOf) -> Iterator[Bench]:
    with open_corpus("llama", corpus_of("llama")) as bench:
        yield bench


@pytest.fixture
def bench(_bench: Bench) -> Iterator[Bench]:
    """An engine with room for everything, shared: leave it as it was."""
    yield _bench
    _bench.check()


# ---- the check can fail ------------------------------------------------------------------------


def _one_scale(rules: ModuleRules, module: str) -> ModuleScaling:
    """A fault: the scale of all modules is that of the configuration."""
    scaling = _SCALING(rules, module)
    config = rules._config
    root = math.sqrt(config.r) if config.use_rslora else config.r
    return scaling._replace(scale=config.lora_alpha / root)


def _without_root(rules: ModuleRules, module: str) -> ModuleScaling:
    """A fault: rank-stabilised adapters are scaled like others."""
    scaling = _SCALING(rules, module)
    root = math.sqrt(scaling.rank) if rules._config.use_rslora else 1
    return scaling._replace(scale=scaling.scale / root)


def _one_lookup(rules: ModuleRules, module: str) -> ModuleScaling:
    """A fault: the key that gives the rank is the key of the alpha, too."""
    scaling, config = _SCALING(rules, module), rules._config
    alpha = config.alpha_pattern.get(_FIND_KEY(rules._ranks, module) or "", config.lora_alpha)
    return scaling._replace(scale=alpha / scaling.rank)


def _last_key(table: KeyTable, module: str) -> str | None:
    """A fault: of several keys that match the last one counts."""
    return next(
        (
            key
            for key in reversed(table._keys)
            if _FIND_KEY(KeyTable([key], PatternTimer()), module)
        ),
        None,
    )


def _without_anchor(table: KeyTable, module: str) -> str | None:
    """A fault: keys are compared as texts."""
    return next((key for key in table._keys if module.endswith(f".{key}")), None)


def _other_layer(matcher: NameMatcher, raw: str, module: str) -> str | None:
    """A fault: the name map mixes up two layers."""
    other = module.replace("layers.0", "x").replace("layers.1", "layers.0").replace("x", "layers.1")
    return _FIND(matcher, other, other)


_FIND_KEY = KeyTable.find
_SCALING = ModuleRules.scaling
_FIND = NameMatcher.find
FAULTS: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "one scale for all modules": (ModuleRules, "scaling", _one_scale, "alpha pattern"),
    "one scale, with rsLoRA": (ModuleRules, "scaling", _one_scale, "patterns and rsLoRA"),
    "rsLoRA ignored": (ModuleRules, "scaling", _without_root, "patterns and rsLoRA"),
    "one lookup for both patterns": (
        ModuleRules,
        "scaling",
        _one_lookup,
        "both patterns, other keys",
    ),
    "the last key wins": (KeyTable, "find", _last_key, "first alpha wins"),
    "anchors ignored": (KeyTable, "find", _without_anchor, "anchored key"),
    "layers mixed up": (NameMatcher, "find", _other_layer, "all-linear"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_scale_pattern_or_name_map_is_seen(
    fault: str,
    bench: Bench,
    corpus_of: CorpusOf,
    judge_of: OracleOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, method, change, name = FAULTS[fault]
    case = next(case for case in make_cases("llama") if case.adapter == name)
    assert_loads_like_peft(bench, judge_of("llama"), case, corpus_of("llama")[name])
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, change)
        with pytest.raises((AssertionError, AdapterFormatError), match=r"differ|below|has rank"):
            assert_loads_like_peft(bench, judge_of("llama"), case, corpus_of("llama")[name])


def assert_loads_like_peft(bench: Bench, judge: PeftOracle, case: Case, path: Path) -> None:
    """Loads an adapter under another name, asks it what `case` asks, and unloads it."""
    shapes = bench.llm.lora_manager._parts.shapes
    shapes.clear()
    bench.llm.load_lora("another", path)
    shapes.clear()
    try:
        answers = bench.ask([Case("another", case.prompt)])
    finally:
        bench.llm.unload_lora("another")
    assert_equal_to_peft(judge, [case], answers)
