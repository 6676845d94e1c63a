"""Adapters that must be refused: a typed error with the numbers, and nothing left behind."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Tensors,
    write_adapter,
)
from tests.support.cache_fixtures import Cache
from tests.support.refusals import Q_A, Q_B, Q, good_tensors, refuse

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterReadError,
    UnsupportedAdapterError,
)

# ---- files -------------------------------------------------------------------------------------


def test_a_missing_directory(small_cache: Cache, tmp_path: Path) -> None:
    error = refuse(small_cache, tmp_path / "none", AdapterNotFoundError)
    assert f"'{tmp_path / 'none'}' does not exist: give the directory" in str(error)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file(small_cache: Cache, tmp_path: Path, file: str) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    (directory / file).unlink()
    error = refuse(small_cache, directory, AdapterNotFoundError)
    assert f"there is no {file} in '{directory}': give " in str(error)


def test_a_file_instead_of_a_directory(small_cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    error = refuse(small_cache, tmp_path / "a", AdapterNotFoundError)
    assert f"'{tmp_path / 'a'}' is a file: give the directory" in str(error)


def test_a_file_of_an_adapter_instead_of_its_directory(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", good_tensors(small_cache))
    error = refuse(small_cache, directory / WEIGHTS_FILE, AdapterNotFoundError)
    assert f"is a file: give its directory, '{directory}'" in str(error)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([100], "but in 'checkpoint-100' below it: give one"),
        ([1000, 900, 2000, 800], "'checkpoint-800', 'checkpoint-900', 'checkpoint-1000' and 1 oth"),
    ],
)
def test_a_directory_of_checkpoints(
    small_cache: Cache, tmp_path: Path, steps: list[int], words: str
) -> None:
    for step in steps:
        write_adapter(tmp_path / "run" / f"checkpoint-{step}", good_tensors(small_cache))
    (tmp_path / "run" / "logs").mkdir()
    assert words in str(refuse(small_cache, tmp_path / "run", AdapterNotFoundError))


def test_a_directory_of_very_many_files_is_looked_at_in_part(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    scandir = os.scandir

    def take(entry: os.DirEntry[str]) -> os.DirEntry[str]:
        taken.append(entry.name)
        return entry

    @contextmanager
    def watched(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(path) as entries:
            yield map(take, entries)

    (tmp_path / "run").mkdir()
    for number in range(1000):
        (tmp_path / "run" / str(number)).write_bytes(b"")
    monkeypatch.setattr(os, "scandir", watched)
    refuse(small_cache, tmp_path / "run", AdapterNotFoundError)
    assert 0 < len(taken) < 500


def test_a_model_instead_of_an_adapter(small_cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    error = refuse(small_cache, tmp_path / "model", AdapterNotFoundError)
    assert "which has a model's config.json" in str(error)


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
    assert str(error).startswith(f"'{directory}' has its weights in adapter_model.bin")
    assert "safetensors" in str(error)


def test_whole_modules_that_the_file_lacks(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_adapter(
        tmp_path / "a", good_tensors(small_cache), modules_to_save=["lm_head"]
    )
    error = refuse(small_cache, directory, UnsupportedAdapterError)
    assert str(error).endswith(
        "has no such tensors: if these modules were not trained, remove "
        "modules_to_save from the configuration"
    )


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
