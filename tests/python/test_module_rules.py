"""Which modules a configuration means, and with which scale: PEFT's own functions are the judge."""

from __future__ import annotations

import math
from typing import Any

import peft
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from pagedlora import AdapterFormatError
from pagedlora.loaders.module_rules import ModuleRules
from pagedlora.loaders.peft_config import parse_peft_config

MODULES = [
    f"{prefix}.{layer}.{name}"
    for prefix in ("model.layers", "transformer.h", "model.vision.layers")
    for layer in (0, 1, 12)
    for name in ("self_attn.q_proj", "mlp.experts.1.up_proj", "mlp.experts.0.layers.2.q_proj")
] + ["q_proj", "lm_head", "layers.1.q_proj"]

NAMES = st.sampled_from(
    [
        "q_proj",
        "up_proj",
        "1.up_proj",
        "self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "head",
    ]
)
EXPRESSIONS = st.sampled_from(
    [r".*q_proj", r"model\.layers\..*", r".*\.(0|12)\..*", "q_proj", r".*experts\.\d\..*", "(a|.*)"]
)
KEYS = st.sampled_from(
    [
        "q_proj",
        "^q_proj",
        r".*\.1\..*",
        "1.self_attn.q_proj",
        "self.attn.q_proj",
        "up_proj",
        "(q|up)_proj",
    ]
)
NUMBERS = st.integers(1, 40) | st.floats(0.1, 9)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Fields that PEFT takes."""
    fields: dict[str, Any] = {
        "r": draw(st.integers(1, 9)),
        "lora_alpha": draw(NUMBERS),
        "use_rslora": draw(st.booleans()),
        "rank_pattern": draw(st.dictionaries(KEYS, st.integers(1, 9), max_size=4)),
        "alpha_pattern": draw(st.dictionaries(KEYS, NUMBERS, max_size=4)),
        "target_modules": draw(st.lists(NAMES, min_size=1, max_size=3) | EXPRESSIONS),
        "exclude_modules": draw(st.none() | st.lists(NAMES, max_size=2) | EXPRESSIONS),
    }
    if isinstance(fields["target_modules"], list):
        layers = st.integers(0, 2) | st.lists(st.sampled_from([0, 1, 2, 12]), max_size=3)
        fields["layers_to_transform"] = draw(st.none() | layers)
        if fields["layers_to_transform"] is not None:
            patterns = st.sampled_from(
                ["layers", "h", ["h", "layers"], [], "", "experts", "x|layers"]
            )
            fields["layers_pattern"] = draw(st.none() | patterns)
    return fields


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(configurations(), st.sampled_from(MODULES))
def test_targets_ranks_and_scales_are_pefts(fields: dict[str, Any], module: str) -> None:
    rules = ModuleRules(parse_peft_config(fields, "x"), "x")
    theirs = peft.LoraConfig(**fields)
    found = check_target_module_exists(theirs, module)
    is_target = bool(found) and not isinstance(found, _ExcludedModule)
    assert rules.is_target(module) == is_target
    rank = theirs.rank_pattern.get(get_pattern_key(theirs.rank_pattern, module), theirs.r)
    key = get_pattern_key(theirs.alpha_pattern, module)
    alpha = theirs.alpha_pattern.get(key, theirs.lora_alpha)
    scaling = rules.scaling(module)
    assert scaling.rank == rank
    assert scaling.scale == alpha / (math.sqrt(rank) if theirs.use_rslora else rank)


def test_the_first_number_in_a_name_is_the_layer() -> None:
    fields = {"r": 1, "lora_alpha": 1, "target_modules": ["up_proj"], "layers_to_transform": [1]}
    rules = ModuleRules(parse_peft_config(fields, "x"), "x")
    assert rules.is_target("model.layers.1.mlp.experts.0.up_proj")
    assert not rules.is_target("model.layers.0.mlp.experts.1.up_proj")
    assert rules.is_target("up_proj")  # a whole name needs no layer


def test_a_scale_over_float32_names_the_module() -> None:
    fields = {
        "r": 1,
        "lora_alpha": 1,
        "target_modules": "all-linear",
        "use_rslora": True,
        "alpha_pattern": {"up_proj": 3e38},
    }
    rules = ModuleRules(parse_peft_config(fields, "x"), "x")
    assert rules.scaling("up_proj").scale == 3e38
    smaller = {**fields, "alpha_pattern": {"up_proj": 3.4e38}}
    assert ModuleRules(parse_peft_config(smaller, "x"), "x").scaling("a.up_proj").scale == 3.4e38
    with pytest.raises(AdapterFormatError, match="a number in float32's range"):
        parse_peft_config({**fields, "alpha_pattern": {"up_proj": 3.5e38}}, "x")
