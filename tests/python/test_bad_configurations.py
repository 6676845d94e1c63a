"""Configurations that must be refused: a typed error that names the field, nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.adapters import (
    CONFIG_FILE,
    adapter_tensors,
    select_modules,
    write_adapter,
)
from tests.support.cache_fixtures import Cache
from tests.support.refusals import Q_A, Q_B, good_tensors, refuse

from pagedlora import (
    AdapterFormatError,
    PagedLoraError,
    UnsupportedAdapterError,
    probe_adapter,
)
from pagedlora.loaders.peft_config import PeftLoraConfig, parse_peft_config
from pagedlora.loaders.rows import pair_tensors
from pagedlora.loaders.stored import StoredTensor

# ---- impossible values --------------------------------------------------------------------------

CONFIG_TEXTS = {
    "empty": "",
    "not json": "{r: 4}",
    "list": "[]",
    "deep": "[" * 100_000,
    "not utf-8": '{"r": 4, "x": "\udcff"}',
    "rank text": '{"r": "4", "lora_alpha": 8, "target_modules": ["q_proj"]}',
    "rank true": '{"r": true, "lora_alpha": 8, "target_modules": ["q_proj"]}',
    "rank a fraction": '{"r": 8.0, "lora_alpha": 8, "target_modules": ["q_proj"]}',
    "rank -1": '{"r": -1, "lora_alpha": 8, "target_modules": ["q_proj"]}',
    "rank null": '{"r": null, "lora_alpha": 8, "target_modules": ["q_proj"]}',
    "rank 0": '{"r": 0, "lora_alpha": 8, "target_modules": ["q_proj"]}',
    "no rank": '{"lora_alpha": 8, "target_modules": ["q_proj"]}',
    "no alpha": '{"r": 4, "target_modules": ["q_proj"]}',
    "alpha nan": '{"r": 4, "lora_alpha": NaN, "target_modules": ["q_proj"]}',
    "alpha infinite": '{"r": 4, "lora_alpha": 1e999, "target_modules": ["q_proj"]}',
    "alpha beyond float": f'{{"r": 4, "lora_alpha": 1{"0" * 400}, "target_modules": ["q_proj"]}}',
    "alpha beyond float32": '{"r": 4, "lora_alpha": 1e300, "target_modules": ["q_proj"]}',
    "rank beyond float": f'{{"r": 1{"0" * 400}, "lora_alpha": 1, "target_modules": ["q_proj"]}}',
    "rslora text": '{"r": 4, "lora_alpha": 8, "use_rslora": "no", "target_modules": ["q_proj"]}',
    "no targets": '{"r": 4, "lora_alpha": 8}',
    "empty targets": '{"r": 4, "lora_alpha": 8, "target_modules": []}',
    "numbers as targets": '{"r": 4, "lora_alpha": 8, "target_modules": [1]}',
    "a key twice": '{"r": 4, "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}',
    "an inner key twice": (
        '{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", '
        '"alpha_pattern": {"q_proj": 1, "q_proj": 2}}'
    ),
    "an unused key twice": (
        '{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "eva_config": {"x": 1, "x": 1}}'
    ),
    "number of 5000 digits": f'{{"r": 1{"0" * 5000}, "lora_alpha": 1, "target_modules": ["q"]}}',
    "too long": '{"r": 4, "x": "' + "y" * (5 << 20) + '"}',
}


@pytest.mark.parametrize("text", CONFIG_TEXTS.values(), ids=CONFIG_TEXTS)
def test_a_broken_configuration(small_cache: Cache, tmp_path: Path, text: str) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    (directory / CONFIG_FILE).write_bytes(text.encode(errors="surrogateescape"))
    error = refuse(small_cache, directory, AdapterFormatError)
    assert str(directory) in error.path
    assert len(str(error)) < 1000


PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
BROKEN_FIELDS: list[tuple[str, Any, str]] = [
    ("rank_pattern", {"q_proj": 0}, "integer from 1"),
    ("rank_pattern", {"q_proj": "4"}, "integer from 1"),
    ("rank_pattern", {"q_proj": True}, "integer from 1"),
    ("rank_pattern", [4], "names with a number each"),
    ("rank_pattern", {"(": 4}, "not a regular expression"),
    ("alpha_pattern", {"q_proj": None}, "a number in float32's range"),
    ("alpha_pattern", {"q_proj": 1e39}, "a number in float32's range"),
    ("alpha_pattern", "q_proj", "names with a number each"),
    ("alpha_pattern", {"[": 1}, "not a regular expression"),
    ("target_modules", "(", "not a regular expression"),
    ("target_modules", 7, "names are needed"),
    ("target_modules", {"q_proj": 1}, "names are needed"),
    ("exclude_modules", "*", "not a regular expression"),
    ("exclude_modules", [1], "names are needed"),
    ("exclude_modules", ["q_proj"], "exclude_modules 'q_proj'"),
    ("exclude_modules", ".*", "exclude_modules '.*'"),
    ("layers_to_transform", "1", "a number or a list of numbers"),
    ("layers_to_transform", [0.0], "a number or a list of numbers"),
    ("layers_to_transform", [-1], "a number or a list of numbers"),
    ("layers_to_transform", [0], "layers_to_transform [0]"),
    ("layers_pattern", "layers", "without layers_to_transform"),
]


@pytest.mark.parametrize(
    ("field", "value", "message"), BROKEN_FIELDS, ids=lambda value: f"{value!s:.20}"
)
def test_a_field_with_an_impossible_value(
    small_cache: Cache, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    tensors = adapter_tensors(select_modules(small_cache.config, ["q_proj"]), 4, seed=1)
    directory = write_adapter(tmp_path / "a", tensors, **{**PLAIN, field: value})
    error = refuse(small_cache, directory, AdapterFormatError)
    assert message in str(error)
    assert field in str(error)


@pytest.mark.parametrize("fields", [{"layers_to_transform": [0]}, {"layers_pattern": "layers"}])
def test_layers_need_a_list_of_targets(
    small_cache: Cache, tmp_path: Path, fields: dict[str, Any]
) -> None:
    fields = {"layers_to_transform": 0, **fields, "target_modules": ".*q_proj"}
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache), **fields)
    error = refuse(small_cache, directory, AdapterFormatError)
    assert "PEFT takes only with a list of target_modules" in str(error)


@pytest.mark.parametrize("init", [False, "orthogonal"])
def test_a_module_whose_weights_peft_would_draw_is_not_left_out(
    small_cache: Cache, tmp_path: Path, init: Any
) -> None:
    tensors = good_tensors(small_cache)
    for matrix in (Q_A, Q_B):
        del tensors[matrix]
    directory = write_adapter(tmp_path / "a", tensors, init_lora_weights=init)
    error = refuse(small_cache, directory, AdapterFormatError)
    assert "PEFT would draw random weights" in str(error)
    assert error.tensor == "model.layers.0.self_attn.q_proj.lora_A.weight"
    zero = write_adapter(tmp_path / "zero", tensors, init_lora_weights="gaussian")
    assert small_cache.adapters.register("zero", zero).report.missing == 1


def test_very_many_targets_are_looked_up_and_not_tried_one_by_one() -> None:
    class Target(str):
        """A name that fails when it is compared with something that it does not equal."""

        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            assert str.__eq__(self, other), "compared one by one"
            return True

    tensors = [
        StoredTensor(f"model.layers.{layer}.q_proj.lora_{matrix}.weight", "F32", [4, 4], 0)
        for layer in range(300)
        for matrix in "AB"
    ]
    targets = tuple(Target(f"hostile{number}") for number in range(50_000))
    named = PeftLoraConfig(4, 8.0, use_rslora=False, target_modules=(*targets, "q_proj"))
    assert pair_tensors(tensors, named, "x").num_tensors == 600
    stranger = PeftLoraConfig(4, 8.0, use_rslora=False, target_modules=targets)
    with pytest.raises(AdapterFormatError, match="'hostile4' and 49995 more") as caught:
        pair_tensors(tensors, stranger, "x")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "field",
    ["target_modules", "use_rslora", "peft_type", "a_field_of_tomorrow", "x" * 10_000, "bias"],
    ids=lambda field: f"{field:.20}",
)
@pytest.mark.parametrize("value", ["y" * 100_000, [7] * 100_000], ids=["text", "list"])
def test_errors_are_short_however_long_the_value(field: str, value: Any) -> None:
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], field: value}
    with pytest.raises(PagedLoraError) as caught:
        parse_peft_config(fields, "x")
    assert len(str(caught.value)) < 500


# ---- unsupported fields -------------------------------------------------------------------------

UNSUPPORTED: dict[str, Any] = {
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "layer_replication": [[0, 2], [1, 3]],
    "target_parameters": ["experts.w1"],
    "trainable_token_indices": [1, 2],
    "init_lora_weights": "pissa",
    "megatron_config": {"a": 1},
    "velora_config": {"num_groups": 4},
    "monteclora_config": {"a": 1},
    "kasa_config": {"beta": 1.0},
    "use_bdlora": {"nblocks": 2},
    "runtime_config": {"a_field_of_tomorrow": 1},
    "alora_invocation_tokens": [5],
    "use_qalora": True,
    "arrow_config": {"top_k": 1},
    "ensure_weight_tying": True,
    "peft_type": "LOHA",
    "a_field_of_tomorrow": 0,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(
    small_cache: Cache, tmp_path: Path, field: str
) -> None:
    fields = {field: UNSUPPORTED[field]}
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache), **fields)
    error = refuse(small_cache, directory, UnsupportedAdapterError)
    expected = "runtime_config.a_field_of_tomorrow" if field == "runtime_config" else field
    assert error.field == expected
    assert expected in str(error)
    assert "Way out: " in str(error)
    with pytest.raises(UnsupportedAdapterError):
        probe_adapter(directory)


BASE_CHANGING = ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "lora_ga", "x", 1]


@pytest.mark.parametrize("value", BASE_CHANGING)
def test_initialisations_that_change_the_base_are_refused(
    small_cache: Cache, tmp_path: Path, value: Any
) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache), init_lora_weights=value)
    error = refuse(small_cache, directory, UnsupportedAdapterError)
    assert error.field == "init_lora_weights"
    assert "path_initial_model_for_weight_conversion" in str(error)


HARMLESS = {
    "lora_dropout": 0.5,
    "inference_mode": True,
    "base_model_name_or_path": "meta-llama/x",
    "revision": "abc",
    "task_type": "CAUSAL_LM",
    "peft_version": "0.99.0",
    "auto_mapping": {"base_model_class": "X"},
    "a_field_of_tomorrow": False,
    "rank_pattern": {},
    "modules_to_save": [],
}


@pytest.mark.parametrize("field", HARMLESS)
def test_harmless_fields_load(small_cache: Cache, tmp_path: Path, field: str) -> None:
    directory = write_adapter(tmp_path, good_tensors(small_cache), **{field: HARMLESS[field]})
    small_cache.adapters.register("a", directory)


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"(": 4}},
        {"exclude_modules": "("},
        {"target_modules": "("},
    ],
    ids=["pattern", "excluded", "targets"],
)
def test_what_is_wrong_with_a_configuration_names_its_file(
    small_cache: Cache, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Also where it shows only when modules are looked for: not that of the weights."""
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache), **{**PLAIN, **fields})
    error = refuse(small_cache, directory, AdapterFormatError)
    assert error.path == str(directory / CONFIG_FILE)
    assert error.tensor == ""
