"""Adapters that must be refused: a typed error with the numbers, and nothing left behind."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_tensors,
    assert_same_weights,
    select_modules,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterReadError,
    PagedLoraError,
    UnsupportedAdapterError,
    probe_adapter,
)
from pagedlora.loaders.peft_config import PeftLoraConfig, parse_peft_config
from pagedlora.loaders.rows import pair_tensors
from pagedlora.loaders.stored import StoredTensor

Tensors = dict[str, torch.Tensor]
Q = "base_model.model.model.layers.0.self_attn.q_proj"  # 48 -> 64
Q_A, Q_B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


def good_tensors(cache: Cache, rank: int = 4) -> Tensors:
    return adapter_tensors(cache.config.modules, rank, seed=1)


def refuse(cache: Cache, directory: Path, error: type[PagedLoraError]) -> PagedLoraError:
    """Registers, expects the error, and that nothing is left and a good adapter still works."""
    with pytest.raises(error) as caught:
        cache.adapters.register("a", directory)
    assert type(caught.value) is error
    assert len(cache.adapters) == 0
    cache.peft.check_invariants()
    tensors = good_tensors(cache)
    cache.adapters.register("a", write_adapter(directory.parent / "good", tensors))
    request = cache.request(1, "a")
    add_and_wait(cache.peft, request)
    actual = cache.peft.task_weights(request.lora_task_id, "host")
    assert_same_weights(actual, weights_of(tensors, torch.float32))
    return caught.value


# ---- files -------------------------------------------------------------------------------------


def test_a_missing_directory(small_cache: Cache, tmp_path: Path) -> None:
    error = refuse(small_cache, tmp_path / "none", AdapterNotFoundError)
    assert str(tmp_path / "none") in str(error)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file(small_cache: Cache, tmp_path: Path, file: str) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    (directory / file).unlink()
    assert file in str(refuse(small_cache, directory, AdapterNotFoundError))


def test_a_file_instead_of_a_directory(small_cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    refuse(small_cache, tmp_path / "a", AdapterNotFoundError)


def test_a_path_with_a_zero_byte(small_cache: Cache, tmp_path: Path) -> None:
    refuse(small_cache, tmp_path / "a\0b", AdapterNotFoundError)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_a_file_that_is_not_regular_is_refused_at_once(
    small_cache: Cache, tmp_path: Path, file: str, make: Callable[[Path], None]
) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    (directory / file).unlink()
    make(directory / file)
    assert str(directory / file) in str(refuse(small_cache, directory, AdapterFormatError))


def test_a_file_that_the_system_will_not_open(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    (directory / CONFIG_FILE).unlink()
    (directory / CONFIG_FILE).symlink_to(directory / CONFIG_FILE)
    error = refuse(small_cache, directory, AdapterReadError)
    assert (error.errno, error.path) == (errno.ELOOP, str(directory / CONFIG_FILE))
    assert isinstance(error, OSError)


def test_only_a_pickle(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    (directory / WEIGHTS_FILE).rename(directory / "adapter_model.bin")
    error = refuse(small_cache, directory, UnsupportedAdapterError)
    assert error.field == "adapter_model.bin"
    assert "safetensors" in str(error)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -1])
def test_a_truncated_file(small_cache: Cache, tmp_path: Path, kept: float) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    size = (directory / WEIGHTS_FILE).stat().st_size
    length = int(size * kept) if isinstance(kept, float) else kept % size
    os.truncate(directory / WEIGHTS_FILE, length)
    error = refuse(small_cache, directory, AdapterFormatError)
    assert error.path == str(directory / WEIGHTS_FILE)


def raw_file(directory: Path, header: str, body: bytes = b"") -> None:
    """A weights file of any header."""
    text = header.encode()
    (directory / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(text)) + text + body)


def tensor_entry(shape: list[int], begin: int, end: int) -> str:
    return f'{{"dtype": "F32", "shape": {shape}, "data_offsets": [{begin}, {end}]}}'


RAW_HEADERS: dict[str, tuple[str, int, str]] = {
    "no tensors": ("{}", 0, "has no tensors"),
    "metadata alone": ('{"__metadata__": {"format": "pt"}}', 0, "ZeRO-3"),
    "overlapping": (
        f'{{"{Q_A}": {tensor_entry([4, 48], 0, 768)}, "{Q_B}": {tensor_entry([64, 4], 4, 1028)}}}',
        1028,
        "overlaps",
    ),
    "a name twice": (
        f'{{"x": {tensor_entry([4, 48], 0, 768)}, "x": {tensor_entry([4, 48], 768, 1536)}}}',
        1536,
        "occurs twice",
    ),
    "a hole": (f'{{"{Q_A}": {tensor_entry([4, 48], 8, 776)}}}', 776, "belong to no tensor"),
    "past the end": (f'{{"{Q_A}": {tensor_entry([4, 48], 0, 768)}}}', 700, "has 700"),
    "a list": ("[]", 0, "does not start with"),
    "deep": ('{"x": ' + "[" * 100_000, 0, "not valid"),
    "negative": (f'{{"{Q_A}": {tensor_entry([-4, 48], 0, 768)}}}', 768, "not valid"),
}


@pytest.mark.parametrize("name", RAW_HEADERS)
def test_a_hostile_header(small_cache: Cache, tmp_path: Path, name: str) -> None:
    header, body_bytes, message = RAW_HEADERS[name]
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    raw_file(directory, header, bytes(body_bytes))
    error = refuse(small_cache, directory, AdapterFormatError)
    assert message in str(error)
    assert error.path == str(directory / WEIGHTS_FILE)


def test_a_header_that_claims_too_much(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    with (directory / WEIGHTS_FILE).open("r+b") as file:
        file.write(struct.pack("<Q", 2**63))
    refuse(small_cache, directory, AdapterFormatError)


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


# ---- tensors -----------------------------------------------------------------------------------


def swap(tensors: Tensors) -> None:
    tensors[Q_A], tensors[Q_B] = tensors[Q_A].T.contiguous(), tensors[Q_B].T.contiguous()


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


BROKEN_TENSORS: dict[str, tuple[Callable[[Tensors], Any], str, str]] = {
    "A does not fit": (put(Q_A, torch.ones(4, 49)), Q_A, "[4, 49]; the model needs [4, 48]"),
    "B does not fit": (put(Q_B, torch.ones(63, 4)), Q_B, "[63, 4]; the model needs [64, 4]"),
    "transposed pair": (swap, Q_B, "is transposed, shape [4, 64], and so is lora_A"),
    "A over the rank": (put(Q_A, torch.ones(5, 48)), Q_B, "rank 4"),
    "A without B": (lambda tensors: tensors.pop(Q_B), "lora_B", "is missing"),
    "B without A": (lambda tensors: tensors.pop(Q_A), "lora_A", "is missing"),
    "ranks differ": (put(Q_B, torch.ones(64, 5)), Q_B, "rank 5"),
    "no tensors": (lambda tensors: tensors.clear(), "", "has no tensors"),
    "int tensor": (put(Q_A, torch.ones(4, 48).int()), Q_A, "I32"),
    "float64 tensor": (put(Q_B, torch.ones(64, 4).double()), Q_B, "F64"),
    "int8 tensor": (put(Q_A, torch.ones(4, 48).to(torch.int8)), Q_A, "I8"),
    "fp8 tensor": (put(Q_A, torch.ones(4, 48).to(torch.float8_e4m3fn)), Q_A, "F8_E4M3"),
    "vector": (put(Q_A, torch.ones(4)), Q_A, "[4]"),
    "scalar": (put(Q_B, torch.ones(())), Q_B, "[]"),
    "three dimensions": (put(Q_A, torch.ones(1, 4, 48)), Q_A, "[1, 4, 48]"),
    "no ranks": (put(Q_A, torch.ones(0, 48)), Q_A, "is empty, shape [0, 48]"),
    "empty as ZeRO-3 saves it": (put(Q_B, torch.ones(0)), Q_B, "ZeRO-3"),
    "twice": (put(Q_A.removeprefix("base_model.model."), torch.ones(4, 48)), "q_proj", "twice"),
    "twice, once with the adapter's name": (
        put(f"{Q}.lora_A.default.weight", torch.ones(4, 48)),
        Q_A,
        f"twice, the other time as '{Q}.lora_A.default.weight'",
    ),
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_tensors_that_cannot_be(small_cache: Cache, tmp_path: Path, name: str) -> None:
    change, tensor, message = BROKEN_TENSORS[name]
    tensors = good_tensors(small_cache)
    change(tensors)
    error = refuse(small_cache, write_adapter(tmp_path / "a", tensors, r=4), AdapterFormatError)
    assert tensor in error.tensor
    assert message in str(error)
    assert error.path == str(tmp_path / "a" / WEIGHTS_FILE)


def test_a_module_that_the_model_lacks(small_cache: Cache, tmp_path: Path) -> None:
    tensors = good_tensors(small_cache)
    stranger = "base_model.model.model.layers.2.self_attn.q_proj"
    tensors[f"{stranger}.lora_A.weight"] = torch.ones(4, 48)
    tensors[f"{stranger}.lora_B.weight"] = torch.ones(64, 4)
    error = refuse(small_cache, write_adapter(tmp_path / "a", tensors), AdapterFormatError)
    assert "'model.layers.2.self_attn.q_proj'" in str(error)


def test_a_rank_over_the_maximum(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache, rank=64))
    error = refuse(small_cache, directory, UnsupportedAdapterError)
    assert "LoRA rank 64 is greater than max_lora_rank 16" in str(error)
    assert error.field == "r"


def test_a_configured_rank_that_is_not_the_tensors(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache), r=8)
    error = refuse(small_cache, directory, AdapterFormatError)
    assert "rank 4" in str(error)
    assert "r=8" in str(error)


STRANGE_TENSORS = [
    f"{Q}.lora_A.bias",
    f"{Q}.lora_A.default.bias",
    f"{Q}.modules_to_save.default.weight",
    "base_model.model.model.embed_tokens.weight",
    f"{Q}.lora_velora_embed",
    f"{Q}.base_layer.weight",
    f"{Q}.bias",
    "base_model.model.lm_head.weight",
    "lora_A.weight",
    "x",
]


@pytest.mark.parametrize("name", STRANGE_TENSORS)
def test_a_tensor_that_would_go_unused(small_cache: Cache, tmp_path: Path, name: str) -> None:
    tensors = {**good_tensors(small_cache), name: torch.ones(4, 4)}
    directory = write_adapter(tmp_path / "a", tensors, r=4)
    error = refuse(small_cache, directory, UnsupportedAdapterError)
    assert error.field == name


# ---- configurations ----------------------------------------------------------------------------

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
