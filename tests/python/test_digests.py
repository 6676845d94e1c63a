"""One content has one digest, whoever computes it, and any other content another one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.adapters import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    Tensors,
    adapter_config,
    adapter_tensors,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, model_config

from pagedlora import (
    AdapterFormatError,
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    AdapterWeights,
    InvalidArgumentError,
    LoraManager,
    _core,
)
from pagedlora.loaders import source_file
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.paths import SourcePath
from pagedlora.registry.content import parse_adapter
from pagedlora.registry.deadline import Deadline

MODEL = model_config()
TABLE = ModuleTable(MODEL)


def digest_of(directory: Path, timeout_s: float | None = None) -> str:
    content, _, _ = parse_adapter(SourcePath(str(directory)), TABLE)
    return content.digest(TABLE, Deadline(timeout_s))


def tensors_of(rank: int = 4, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensors:
    return adapter_tensors(MODEL.modules, rank, seed, dtype=dtype)


def documented_digest(tensors: Tensors, scale: float) -> str:
    """As the module's documentation says, and with none of its code."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    spelled = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    names = sorted(n.removesuffix(".lora_A.weight") for n in tensors if "lora_A" in n)
    head = text("pagedlora adapter 1") + len(names).to_bytes(8, "little")
    body = b""
    for name in names:
        pair = [tensors[f"{name}.lora_{letter}.weight"] for letter in "AB"]
        head += text(name.removeprefix(PREFIX))
        head += struct.pack("<IfI", pair[0].shape[0], scale, 0)
        for matrix in pair:
            head += text(spelled[matrix.dtype]) + struct.pack("<QQ", *matrix.shape)
            body += matrix.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head + body).hexdigest()


def write_in_order(directory: Path, tensors: Tensors, names: list[str]) -> Path:
    """Writes the tensors of a file in another order than safetensors does."""
    write_adapter(directory, tensors)
    offset, header, body = 0, {}, b""
    for name in names:
        data = tensors[name].numpy().tobytes()
        shape = list(tensors[name].shape)
        end = offset + len(data)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset, body = end, body + data
    text = json.dumps(header).encode()
    (directory / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + body)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [16, 3, 0.1])
def test_the_digest_is_the_documented_one(tmp_path: Path, dtype: torch.dtype, alpha: float) -> None:
    tensors = tensors_of(rank=3, dtype=dtype)
    directory = write_adapter(tmp_path, tensors, lora_alpha=alpha)
    assert digest_of(directory) == documented_digest(tensors, alpha / 3)


def test_order_and_prefix_of_the_tensors_do_not_count(tmp_path: Path) -> None:
    tensors = tensors_of()
    expected = digest_of(write_adapter(tmp_path / "a", tensors))
    backwards = write_in_order(tmp_path / "b", tensors, sorted(tensors)[::-1])
    assert digest_of(backwards) == expected
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    assert digest_of(write_adapter(tmp_path / "c", bare)) == expected
    mixed = {
        name if number % 3 else name.removeprefix(PREFIX): tensor
        for number, (name, tensor) in enumerate(tensors.items())
    }
    assert digest_of(write_adapter(tmp_path / "d", mixed)) == expected


def test_what_has_no_effect_in_the_configuration_does_not_count(tmp_path: Path) -> None:
    tensors = tensors_of(rank=4)
    expected = digest_of(write_adapter(tmp_path / "a", tensors, lora_alpha=8))
    same_scale = {"lora_alpha": 4, "use_rslora": True}
    assert digest_of(write_adapter(tmp_path / "b", tensors, **same_scale)) == expected
    fields = {"lora_alpha": 8, "lora_dropout": 0.5, "inference_mode": True}
    assert digest_of(write_adapter(tmp_path / "c", tensors, **fields)) == expected


def test_tensors_in_memory_have_the_digest_of_their_file(tmp_path: Path) -> None:
    tensors = tensors_of(dtype=torch.bfloat16)
    config = adapter_config(tensors, lora_alpha=3)
    expected = digest_of(write_adapter(tmp_path, tensors, lora_alpha=3))
    assert AdapterWeights.from_tensors(tensors, config).digest == expected
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    assert AdapterWeights.from_tensors(bare, config).digest == expected


def test_any_other_content_has_another_digest(tmp_path: Path) -> None:
    tensors = tensors_of()
    names = sorted(tensors)
    flipped = {name: tensor.clone() for name, tensor in tensors.items()}
    flipped[names[-1]].view(torch.int32)[-1, -1] ^= 1
    q, k = ("model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.k_proj")
    swapped = {
        name.replace(q, "x").replace(k, q).replace("x", k): tensor
        for name, tensor in tensors.items()
    }
    variants: list[tuple[Tensors, dict[str, Any]]] = [
        (tensors, {}),
        (tensors, {"lora_alpha": 17}),
        (tensors, {"use_rslora": True}),
        ({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, {}),
        ({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, {}),
        (flipped, {}),
        (swapped, {}),
        ({name: tensors[name] for name in names[2:]}, {}),
        ({name: -tensor for name, tensor in tensors.items()}, {}),
        (tensors_of(rank=5), {"lora_alpha": 20}),
    ]
    digests = [
        digest_of(write_adapter(tmp_path / str(number), content, **fields))
        for number, (content, fields) in enumerate(variants)
    ]
    assert len(set(digests)) == len(variants)


def test_a_file_is_read_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_adapter(tmp_path, tensors_of())
    expected = digest_of(directory)
    monkeypatch.setattr(source_file, "CHUNK_BYTES", 7)
    sizes: list[int] = []
    preadv = os.preadv

    def reading(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(buffers[0].nbytes)
        return preadv(descriptor, [buffers[0][:5]], offset)  # less than was asked for

    monkeypatch.setattr(os, "preadv", reading)
    assert digest_of(directory) == expected
    assert max(sizes) == 7


# ---- files that change or fail -----------------------------------------------------------------


def during_the_read(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Does something once, after the first piece."""
    preadv = os.preadv
    actions = [action]

    def reading(*args: Any) -> int:
        count = preadv(*args)
        if actions:
            actions.pop()()
        return count

    monkeypatch.setattr(os, "preadv", reading)


@pytest.mark.parametrize("change", ["rewritten", "truncated", "touched"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = write_adapter(tmp_path, tensors_of()) / WEIGHTS_FILE
    content = path.read_bytes()
    actions = {
        "rewritten": lambda: path.write_bytes(content[::-1]),
        "truncated": lambda: os.truncate(path, 100),
        "touched": lambda: os.utime(path, ns=(1, 1)),
    }
    during_the_read(monkeypatch, actions[change])
    with pytest.raises(AdapterSourceChangedError, match="changed after it was registered"):
        digest_of(tmp_path)


def replace(path: Path) -> None:
    save_file(tensors_of(seed=2), path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (Path.unlink, AdapterNotFoundError),
        (replace, AdapterSourceChangedError),
        (lambda path: os.truncate(path, 10), AdapterSourceChangedError),
        (lambda path: (path.unlink(), path.mkdir()), AdapterSourceChangedError),
        (lambda path: (path.unlink(), os.mkfifo(path)), AdapterSourceChangedError),
    ],
    ids=["deleted", "replaced", "truncated", "directory", "fifo"],
)
def test_a_file_that_changed_before_it_is_read_is_refused(
    tmp_path: Path, change: Any, error: type[Exception]
) -> None:
    directory = write_adapter(tmp_path, tensors_of())
    content, _, _ = parse_adapter(SourcePath(str(directory)), TABLE)
    change(tmp_path / WEIGHTS_FILE)
    with pytest.raises(error, match=WEIGHTS_FILE):
        content.digest(TABLE, Deadline(None))


def test_what_a_reader_finds_wrong_with_the_content_is_told_as_it_is(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path, tensors_of()) / WEIGHTS_FILE)
    wrong = AdapterFormatError("wrong", path=path, tensor="t")
    with pytest.raises(AdapterFormatError) as caught, source_file.SourceFile.of(path).open():
        raise wrong
    assert caught.value is wrong


def test_an_error_of_the_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path, tensors_of())

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(AdapterReadError) as caught:
        digest_of(tmp_path)
    assert caught.value.errno == errno.EIO
    assert caught.value.path == str(tmp_path / WEIGHTS_FILE)


def test_reading_ends_when_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(AdapterLoadTimeout) as caught:
        digest_of(write_adapter(tmp_path, tensors_of()), timeout_s=0)
    assert caught.value.limit_seconds == 0


# ---- every process -----------------------------------------------------------------------------

_IN_ANOTHER_PROCESS = """
import sys
from tests.support.cache_fixtures import build_cache
from pagedlora import LoraManager
cache = build_cache()
manager = LoraManager(cache.config, cache.peft, base_model_id="base")
manager.register("other name", sys.argv[1])
print(manager.cache_salt("other name", b"tenant").hex())
print(manager.get("other name").generation)
cache.peft.close()
"""


def test_digest_and_cache_salt_are_the_same_in_every_process(
    small_cache: Cache, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path, tensors_of())
    manager = LoraManager(small_cache.config, small_cache.peft, base_model_id="base")
    manager.register("a", directory)
    salt = manager.cache_salt("a", b"tenant")
    result = subprocess.run(
        [sys.executable, "-c", _IN_ANOTHER_PROCESS, str(directory)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert result.stdout.split() == [salt.hex(), manager.get("a").generation]


def test_a_cache_salt_tells_content_model_and_tenant_apart(
    small_cache: Cache, make_cache: Any, tmp_path: Path
) -> None:
    first, second = (write_adapter(tmp_path / str(seed), tensors_of(seed=seed)) for seed in (1, 2))
    modules = MODEL.modules
    modules[-1] = _core.LoraModule("another", modules[-1].in_features, modules[-1].out_features)
    models = [small_cache, make_cache(torch.bfloat16), make_cache(modules=modules)]
    salts = []
    for cache in models:
        for base in ("", "b", "b1"):
            manager = LoraManager(cache.config, cache.peft, base_model_id=base)
            if cache is models[2]:
                reduced = {n: t for n, t in tensors_of().items() if MODEL.modules[-1].name not in n}
                manager.register("a", write_adapter(tmp_path / base / "r", reduced))
                salts.append(manager.cache_salt("a"))
                continue
            for name, directory in (("a", first), ("b", second)):
                manager.register(name, directory)
                salts += [manager.cache_salt(name, tenant) for tenant in (b"", b"1", b"\0")]
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts} == {32}


@pytest.mark.parametrize("base_model_id", ["\ud800", 3, None])
def test_the_base_models_id_must_be_text(small_cache: Cache, base_model_id: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="base_model_id"):
        LoraManager(small_cache.config, small_cache.peft, base_model_id=base_model_id)


def test_a_cache_salt_reads_the_content_once(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    directory = write_adapter(tmp_path, tensors_of())
    manager.register("a", directory)
    assert manager.get("a").generation is None
    salt = manager.cache_salt("a")
    assert manager.get("a").generation == digest_of(directory)
    (directory / WEIGHTS_FILE).unlink()
    (directory / CONFIG_FILE).unlink()
    assert manager.cache_salt("a") == salt
    assert small_cache.peft.stats.source_reads == 0
