"""Design 3.5: every field of PEFT's LoraConfig is in one table, from which the docs are made."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
from tests.support.adapters import adapter_tensors, write_adapter
from tests.support.cache_fixtures import Cache, build_cache

from pagedlora import LoraManager, PagedLoraWarning, UnsupportedAdapterError, probe_adapter
from pagedlora.loaders.adapters_doc import document
from pagedlora.loaders.peft_config import parse_peft_config
from pagedlora.loaders.peft_fields import PEFT_FIELDS

ROOT = Path(__file__).parents[2]
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
REFUSED = [name for name, field in PEFT_FIELDS.items() if field.rule == "refused"]
FALSY = [None, False, {}, [], ""]


def installed_fields() -> set[str]:
    """Names of all fields, those of nested configurations with the outer one before them."""
    names = set()
    defaults = peft.LoraConfig()
    for field in dataclasses.fields(peft.LoraConfig):
        names.add(field.name)
        value = getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            names |= {f"{field.name}.{inner.name}" for inner in dataclasses.fields(value)}
    return names


def test_the_table_has_exactly_the_fields_of_the_installed_peft() -> None:
    assert set(PEFT_FIELDS) == installed_fields()


def test_every_entry_says_why_and_every_refusal_a_way_out() -> None:
    for field in PEFT_FIELDS.values():
        assert field.why
        assert bool(field.way_out) == (field.rule == "refused")
        assert bool(field.accepts) == bool(field.accepted)


def test_the_document_is_printed_from_the_table() -> None:
    assert (ROOT / "docs" / "adapters.md").read_text() == document()
    command = [sys.executable, "-m", "pagedlora.loaders.adapters_doc"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout == document()
    for name in PEFT_FIELDS:
        assert f"| `{name}` |" in document()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_refused_by_name_with_its_way_out(name: str) -> None:
    with pytest.raises(UnsupportedAdapterError) as caught:
        parse_peft_config({**PLAIN, name: {"x": 1}}, "x")
    assert caught.value.field == name
    assert PEFT_FIELDS[name].way_out in str(caught.value)


@pytest.mark.parametrize("value", FALSY, ids=repr)
@pytest.mark.parametrize("name", [n for n in REFUSED if PEFT_FIELDS[n].accepts is None])
def test_a_refused_field_that_says_nothing_loads(name: str, value: Any) -> None:
    parse_peft_config({**PLAIN, name: value}, "x")


@pytest.mark.parametrize(
    "name", [n for n, f in PEFT_FIELDS.items() if f.rule == "harmless" and "." not in n]
)
def test_a_harmless_field_does_not_change_what_is_read(name: str) -> None:
    plain = parse_peft_config(PLAIN, "x")
    for value in ({"x": 1}, "y", 7, True):
        assert parse_peft_config({**PLAIN, name: value}, "x") == plain


def test_the_defaults_of_the_installed_peft_load() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], r=4).to_dict()
    fields = {name: sorted(v) if isinstance(v, set) else v for name, v in config.items()}
    fields["runtime_config"] = dataclasses.asdict(peft.LoraConfig().runtime_config)
    parsed = parse_peft_config(json.loads(json.dumps(fields)), "x")
    assert (parsed.r, parsed.lora_alpha, parsed.notes) == (4, 8, ())


# ---- fields that nobody knows ------------------------------------------------------------------


def tensors_of(cache: Cache) -> dict[str, Any]:
    return adapter_tensors(cache.config.modules, 4, seed=1)


@pytest.mark.parametrize("value", FALSY, ids=repr)
def test_an_unknown_field_that_says_nothing_loads(
    small_cache: Cache, tmp_path: Path, value: Any
) -> None:
    directory = write_adapter(tmp_path, tensors_of(small_cache), tomorrow=value)
    assert small_cache.adapters.register("a", directory).report.ignored == ()


@pytest.mark.parametrize("value", [{"x": None}, 0, 0.0, True, "no", [None]], ids=repr)
def test_an_unknown_field_fails_or_warns(small_cache: Cache, tmp_path: Path, value: Any) -> None:
    directory = write_adapter(tmp_path, tensors_of(small_cache), tomorrow=value)
    with pytest.raises(UnsupportedAdapterError, match=r"tomorrow=.*strict=False") as caught:
        small_cache.adapters.register("a", directory)
    assert caught.value.field == "tomorrow"
    assert len(small_cache.adapters) == 0
    lenient = LoraManager(small_cache.config, small_cache.peft, strict=False)
    with pytest.warns(PagedLoraWarning, match="tomorrow=") as caught_warnings:
        info = lenient.register("a", directory)
    assert caught_warnings[0].filename == __file__
    assert len(info.report.ignored) == 1
    assert "tomorrow" in info.report.ignored[0]
    assert lenient.get("a").report == info.report
    assert probe_adapter(directory, strict=False).ignored == info.report.ignored
    lenient.unload("a")


def test_of_several_refused_fields_the_one_that_says_most_is_named() -> None:
    """Other methods have fields of their own, of which this table knows none."""
    for fields, named in [
        ({"tomorrow": 1, "peft_type": "LOHA", "bias": "all"}, "peft_type"),
        ({"tomorrow": 1, "bias": "all"}, "bias"),
        ({"tomorrow": 1, "later": 2}, "tomorrow"),
    ]:
        with pytest.raises(UnsupportedAdapterError) as caught:
            parse_peft_config(
                {**fields, **{k: v for k, v in PLAIN.items() if k not in fields}}, "x"
            )
        assert caught.value.field == named


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_no_module_fails_or_warns(
    small_cache: Cache, tmp_path: Path, pattern: str
) -> None:
    fields = {pattern: {"q_proj": 4, "queue_proj": 2}}
    directory = write_adapter(tmp_path, tensors_of(small_cache), r=4, **fields)
    with pytest.raises(UnsupportedAdapterError, match="matches no module") as caught:
        small_cache.adapters.register("a", directory)
    assert caught.value.field == pattern
    assert "queue_proj" in str(caught.value)
    lenient = LoraManager(small_cache.config, small_cache.peft, strict=False)
    with pytest.warns(PagedLoraWarning, match=rf"{pattern}\['queue_proj'\]"):
        info = lenient.register("a", directory)
    assert len(info.report.ignored) == 1
    lenient.unload("a")


def test_what_is_refused_by_name_is_refused_however_lenient(tmp_path: Path) -> None:
    cache = build_cache()
    lenient = LoraManager(cache.config, cache.peft, strict=False)
    directory = write_adapter(tmp_path, tensors_of(cache), bias="all")
    with pytest.raises(UnsupportedAdapterError, match="bias="):
        lenient.register("a", directory)
    cache.peft.close()
