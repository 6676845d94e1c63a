"""`adapter_model.bin`: refused by default; where it is allowed, it runs nothing (design 3.5)."""

from __future__ import annotations

import gc
import os
import re
import resource
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    WEIGHTS_FILE,
    Tensors,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait, check_pages

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterPathError,
    LoraManager,
    PagedLoraError,
    UnsupportedAdapterError,
    probe_adapter,
)
from pagedlora.loaders import pickled

BIN = "adapter_model.bin"


@pytest.fixture(autouse=True)
def private_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made in these tests."""
    root = tmp_path / "private"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


@pytest.fixture
def trusting(small_cache: Cache) -> LoraManager:
    """A manager that reads pickles."""
    return LoraManager(small_cache.config, small_cache.peft, allow_pickle=True)


def tensors_of(cache: Cache, seed: int = 1) -> Tensors:
    return adapter_tensors(cache.config.modules, 4, seed, dtype=torch.bfloat16)


def write_bin(path: Path, tensors: Tensors, content: Any = None, **options: Any) -> Path:
    """An adapter with a pickle of `content`, by default its tensors, instead of safetensors."""
    write_adapter(path, tensors)
    (path / WEIGHTS_FILE).unlink()
    torch.save(tensors if content is None else content, path / BIN, **options)
    return path


@pytest.mark.parametrize("zipped", [True, False])
def test_it_answers_as_the_safetensors_file_also_when_read_again(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, private_root: Path, zipped: bool
) -> None:
    peft, tensors = small_cache.peft, tensors_of(small_cache)
    path = write_bin(tmp_path / "a", tensors, _use_new_zipfile_serialization=zipped)
    info = trusting.load("a", path)
    (path / BIN).unlink()  # everything is in the private file
    peft.evict_unowned("host")
    assert peft.resident_tasks("host") == 0
    from pagedlora import LlmRequest

    request = LlmRequest(1, lora_task_id=info.task_id)
    add_and_wait(peft, request)
    assert_same_weights(peft.task_weights(info.task_id, "host"), weights_of(tensors, torch.float32))
    peft.mark_request_done(request)
    assert peft.stats.source_rereads == 1
    same = small_cache.adapters.load("b", write_adapter(tmp_path / "b", tensors))
    assert same.generation == info.generation
    [directory] = private_root.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    trusting.unload("a")
    gc.collect()
    assert list(private_root.iterdir()) == []


def test_two_pickles_of_one_content_share_a_task_and_both_files_stay(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, private_root: Path
) -> None:
    tensors = tensors_of(small_cache)
    first = trusting.load("a", write_bin(tmp_path / "a", tensors))
    second = trusting.load("b", write_bin(tmp_path / "b", tensors))
    assert first.task_id == second.task_id
    trusting.unload("a")
    gc.collect()
    assert len(list(private_root.iterdir())) == 2
    small_cache.peft.evict_unowned("host")
    assert trusting.load("b").tiers == ("host",)
    trusting.unload("b")
    gc.collect()
    assert list(private_root.iterdir()) == []


def test_it_is_refused_by_default_and_the_safetensors_file_wins(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, private_root: Path
) -> None:
    tensors = tensors_of(small_cache)
    path = write_bin(tmp_path / "a", tensors)
    with pytest.raises(UnsupportedAdapterError, match="allow_pickle=True") as caught:
        small_cache.adapters.register("a", path)
    assert caught.value.field == BIN
    with pytest.raises(UnsupportedAdapterError):
        probe_adapter(path)
    assert probe_adapter(path, allow_pickle=True).num_tensors == len(tensors)
    gc.collect()
    (path / BIN).write_bytes(b"nobody reads this")
    write_adapter(path, tensors_of(small_cache, seed=2))
    trusting.register("a", path)
    assert list(private_root.iterdir()) == []
    trusting.unload("a")


class Exploit:
    """Unpickled with pickle.load, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


BROKEN: dict[str, Callable[[Tensors, Path], Any]] = {
    "a call": lambda tensors, mark: {**tensors, "x": Exploit(mark)},
    "a call alone": lambda tensors, mark: Exploit(mark),
    "a list": lambda tensors, mark: list(tensors.values()),
    "a tensor": lambda tensors, mark: torch.ones(3),
    "a number as a name": lambda tensors, mark: {**tensors, 7: torch.ones(3)},
    "a number as a tensor": lambda tensors, mark: {**tensors, "x": 7},
    "a sparse tensor": lambda tensors, mark: {**tensors, "x": torch.eye(3).to_sparse()},
    "nested": lambda tensors, mark: {"state_dict": tensors},
    "nothing": lambda tensors, mark: {},
    "a tensor too many": lambda tensors, mark: {**tensors, "x": torch.ones(3)},
    "float64": lambda tensors, mark: {name: each.double() for name, each in tensors.items()},
}


def refuse(manager: LoraManager, path: Path) -> PagedLoraError:
    """Registers, expects a typed error, and that nothing is left."""
    with pytest.raises((AdapterFormatError, UnsupportedAdapterError)) as caught:
        manager.register("a", path)
    assert len(manager) == 0
    check_pages(manager._cache)
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize("name", BROKEN)
def test_a_pickle_of_anything_else_is_refused(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, private_root: Path, name: str
) -> None:
    mark = tmp_path / "mark"
    tensors = tensors_of(small_cache)
    path = write_bin(tmp_path / "a", tensors, BROKEN[name](tensors, mark))
    assert str(path / BIN) in str(refuse(trusting, path))
    assert not mark.exists()
    gc.collect()
    assert list(private_root.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04", b"\x80\x04." * 100, b"x" * 999])
def test_a_file_that_is_no_pickle_is_refused(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, content: bytes
) -> None:
    path = write_bin(tmp_path / "a", tensors_of(small_cache))
    (path / BIN).write_bytes(content)
    assert re.search("is not a pickle of tensors alone: .", str(refuse(trusting, path)))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_a_pickle_that_is_no_regular_file_is_refused_at_once(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = write_bin(tmp_path / "a", tensors_of(small_cache))
    (path / BIN).unlink()
    make(path / BIN)
    with pytest.raises(AdapterFormatError, match="not a regular file"):
        trusting.register("a", path)
    assert len(trusting) == 0


def test_a_pickle_over_the_limit_is_refused(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickled, "MAX_PICKLE_BYTES", 100)
    path = write_bin(tmp_path / "a", tensors_of(small_cache))
    assert "over the limit of 100" in str(refuse(trusting, path))


def rewrite(path: Path, compression: int, **larger: int) -> None:
    """Writes a file of `torch.save` again, some records with more zeros at their ends."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content + bytes(larger.get(name.rsplit(".", 1)[-1], 0)))


def test_records_that_unpack_to_more_than_the_file_are_refused_before_they_are_unpacked(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path
) -> None:
    """A few megabytes can be compressed gigabytes."""
    path = write_bin(tmp_path / "a", tensors_of(small_cache))
    rewrite(path / BIN, zipfile.ZIP_STORED)
    trusting.register("stored", path)
    trusting.unload("stored")
    rewrite(path / BIN, zipfile.ZIP_DEFLATED, pkl=50_000_000)
    size = (path / BIN).stat().st_size
    with limit_of_memory(32 << 20):
        error = refuse(trusting, path)
    assert f"has {size} bytes, which unpack to 50" in str(error)


@contextmanager
def limit_of_memory(more_bytes: int) -> Iterator[None]:
    """Lets the process grow by so much only."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def test_tensors_larger_than_what_they_are_views_of_are_refused(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path
) -> None:
    """A few hundred bytes can be terabytes."""
    tensors = tensors_of(small_cache)
    first = next(iter(tensors))
    large = {**tensors, first: torch.ones(1).as_strided((1 << 20, 1 << 20), (0, 0))}
    path = write_bin(tmp_path / "a", tensors, large)
    assert f"of {1 << 42} bytes, made of 4: save it with contiguous()" in str(
        refuse(trusting, path)
    )


def test_views_of_one_memory_are_counted_each(
    small_cache: Cache, trusting: LoraManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, shared = tensors_of(small_cache), torch.ones(25_000)
    path = write_bin(tmp_path / "a", tensors, {str(number): shared for number in range(20)})
    assert (path / BIN).stat().st_size < 150_000
    monkeypatch.setattr(pickled, "MAX_PICKLE_BYTES", 1_999_999)
    assert "has tensors of 2000000 bytes, over the limit" in str(refuse(trusting, path))


@pytest.mark.parametrize("allow_pickle", [True, False])
@pytest.mark.parametrize("directory", ["adapter_root", "lora_dir"])
def test_a_pickle_outside_of_the_root_is_not_opened(
    small_cache: Cache, tmp_path: Path, private_root: Path, directory: str, allow_pickle: bool
) -> None:
    """By a link, as any other file of an adapter (design 3.5)."""
    outside = write_bin(tmp_path / "outside", tensors_of(small_cache))
    path = write_bin(tmp_path / "root" / "a", tensors_of(small_cache))
    (path / BIN).unlink()
    (path / BIN).symlink_to(outside / BIN)
    options: dict[str, Any] = {directory: tmp_path / "root", "allow_pickle": allow_pickle}
    manager = LoraManager(small_cache.config, small_cache.peft, **options)
    with pytest.raises(AdapterPathError):
        manager.load("a", "a" if directory == "adapter_root" else None)
    assert (len(manager), list(private_root.iterdir())) == (0, [])


@pytest.mark.parametrize("directory", ["adapter_root", "lora_dir"])
def test_the_private_file_of_a_confined_pickle_is_read_again(
    small_cache: Cache, tmp_path: Path, private_root: Path, directory: str
) -> None:
    """It lies outside of the root: nobody else's path leads there."""
    tensors = tensors_of(small_cache)
    path = write_bin(tmp_path / "root" / "a", tensors)
    options: dict[str, Any] = {directory: tmp_path / "root", "allow_pickle": True}
    manager = LoraManager(small_cache.config, small_cache.peft, **options)
    source = "a" if directory == "adapter_root" else None
    info = manager.load("a", source)
    assert info.path == str(path)
    small_cache.peft.evict_unowned("host")
    assert manager.load("a", source).tiers == ("host",)
    assert_same_weights(
        small_cache.peft.task_weights(info.task_id, "host"), weights_of(tensors, torch.float32)
    )
    assert small_cache.peft.stats.source_rereads == 1
    manager.unload("a")
    gc.collect()
    assert list(private_root.iterdir()) == []


def test_without_any_weights_the_safetensors_file_is_missed(
    trusting: LoraManager, small_cache: Cache, tmp_path: Path
) -> None:
    path = write_bin(tmp_path / "a", tensors_of(small_cache))
    (path / BIN).unlink()
    with pytest.raises(AdapterNotFoundError) as caught:
        trusting.register("a", path)
    assert caught.value.name == str(path / WEIGHTS_FILE)
