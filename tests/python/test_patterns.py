"""PEFT's rules for names and regular expressions, and bounds for those of strangers."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from tests.support.adapters import adapter_tensors, write_adapter
from tests.support.cache_fixtures import Cache

from pagedlora import AdapterFormatError, PagedLoraError
from pagedlora.loaders import patterns
from pagedlora.loaders.patterns import (
    MAX_PATTERN_LENGTH,
    BadPatternError,
    Expression,
    KeyTable,
    NameSet,
    PatternTimer,
)

SLOW = ["((.|.)*)*[A-Z]", r"(.*?.*?)*(.*?.*?)*(.+.+)+[A-Z]$", r"(.+?)+?(.+?)+?[A-Z]"]
MODULE = "model.layers.10.self_attn.q_proj"

PARTS = st.sampled_from(
    ["q_proj", "v_proj", "self_attn", "model", "layers", "0", "1", "10", "xq_proj", "q.proj", ""]
)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
KEYS = PATHS | st.sampled_from(
    ["^q_proj", "^model.layers.1.q_proj", "(q|v)_proj", ".*", "", "^", r"self_attn\.v_proj", "q_.*"]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(KEYS, max_size=8), PATHS)
def test_the_key_of_a_module_is_pefts(keys: list[str], module: str) -> None:
    """PEFT gives the module's name where no key matches, and looks that up again."""
    expected: str | None = get_pattern_key(keys, module)
    if expected not in keys:
        expected = None
    assert KeyTable(keys, PatternTimer()).find(module) == expected


def test_very_many_plain_keys_are_looked_up_and_not_tried_one_by_one() -> None:
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(100) for j in range(100)]
    table = KeyTable(names, PatternTimer())
    assert not table._expressions
    assert len(table._plain) < 20  # one for each length and place of the dots
    assert [table.find(name) for name in names[::97]] == names[::97]
    assert table.find("model.layers.0.mlp.experts.0.down_proj") is None


def test_names_mean_the_ends_of_names() -> None:
    names = NameSet(["q_proj", "self_attn.v_proj", "model.x"], PatternTimer())
    assert [name in names for name in ("q_proj", "a.q_proj", "a.self_attn.v_proj", "model.x")] == [
        True
    ] * 4
    assert [name in names for name in ("xq_proj", "v_proj", "q_proj.x", "x", "")] == [False] * 5
    assert names.has_exactly("model.x")
    assert not names.has_exactly("a.q_proj")
    one = NameSet(r".*\.q_proj", PatternTimer())
    assert MODULE in one
    assert f"{MODULE}.x" not in one


# ---- bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", SLOW)
def test_an_expression_that_would_match_for_years_is_given_up(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 0.5)
    with pytest.raises(BadPatternError, match="takes too long"):
        Expression(pattern, PatternTimer()).is_full_match(MODULE)


def test_compiling_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration has room for very many expressions."""
    timer = PatternTimer()
    Expression("a+", timer)
    monkeypatch.setattr(patterns.time, "monotonic", lambda: math.inf)
    with pytest.raises(BadPatternError, match=r"'b\+' is one of too many: .* have 2 s"):
        Expression("b+", timer)


def test_all_expressions_of_an_adapter_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 0.5)
    timer = PatternTimer()
    slow = [Expression(pattern, timer) for pattern in SLOW * 20]
    started = time.monotonic()
    for expression in slow:
        with pytest.raises(BadPatternError):
            expression.is_match(MODULE)
    assert time.monotonic() - started < 30  # one after the other they would take for ever


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_an_adapter_with_such_an_expression_is_refused_and_the_field_named(
    small_cache: Cache, tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 0.5)
    value: Any = {SLOW[0]: 4} if field == "rank_pattern" else SLOW[0]
    tensors = adapter_tensors(small_cache.config.modules, 4, seed=1)
    directory = write_adapter(tmp_path / "a", tensors, **{field: value})
    with pytest.raises(AdapterFormatError, match=rf"has {field}: .*takes too long to match"):
        small_cache.adapters.register("a", directory)
    assert len(small_cache.adapters) == 0


COSTLY = [
    ("(?:a{1000}){1000}", "repetitions written out"),
    ("((a{0,99999}){0,99999}){0,99999}", "repetitions written out"),
    ("a{99999999999999999999}", "repetitions written out"),
    ("x" * (MAX_PATTERN_LENGTH + 1), "over the limit"),
    ("x{e<=3}", "no module's name needs"),
    ("x{}", "no module's name needs"),
    ("[[:alpha:]]+", "no module's name needs"),
    ("(" * 3000 + ")" * 3000, "not a regular expression"),
    ("(?R)", "not a regular expression"),
    (r"\p{L}", "no module's name needs"),
    ("(?|a|b)", "not a regular expression"),
    ("(?<=a+)b", "not a regular expression"),
    ("*", "not a regular expression"),
]


@pytest.mark.parametrize(("pattern", "message"), COSTLY, ids=[f"{each[0]:.20}" for each in COSTLY])
def test_what_costs_too_much_or_is_no_expression_of_peft_is_not_compiled(
    pattern: str, message: str
) -> None:
    with pytest.raises(BadPatternError, match=message) as caught:
        Expression(pattern, PatternTimer())
    assert len(str(caught.value)) < 500


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab.*+?()[]{}|^$\\1,dwRP<=!:-_", max_size=12))
def test_any_text_is_an_expression_like_in_peft_or_refused(text: str) -> None:
    import re

    try:
        ours = Expression(text, PatternTimer()).is_full_match("ab.a_b.d1")
    except BadPatternError:
        return
    assert ours == (re.fullmatch(text, "ab.a_b.d1") is not None)


def test_a_configuration_of_very_many_keys_is_read_in_no_time(
    small_cache: Cache, tmp_path: Path
) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 4, seed=1)
    keys = {name.rpartition(".lora_")[0].split("model.", 2)[2]: 4 for name in tensors}
    extra = {f"model.layers.{i}.q_proj": 4 for i in range(20_000)}
    directory = write_adapter(tmp_path, tensors, rank_pattern={**keys, **extra})
    with pytest.raises(PagedLoraError, match="matches no module"):
        small_cache.adapters.register("a", directory)
    table = KeyTable([*keys, *extra], PatternTimer())
    assert len(table._plain) < 100
