"""`lora_dir`: a directory of adapters, each parsed by whoever asks for it first (design 3.5, 4)."""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, Call, add_and_wait

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterPathError,
    InvalidArgumentError,
    LlmRequest,
    LoraManager,
    PagedLoraWarning,
    UnsupportedAdapterError,
    _core,
)
from pagedlora.engine.adapter_names import AdapterNames
from pagedlora.registry import parts
from pagedlora.registry.content import parse_adapter
from pagedlora.requests import LoRARequest


def write(cache: Cache, directory: Path, seed: int = 1, **fields: Any) -> Path:
    return write_adapter(directory, adapter_tensors(cache.config.modules, 4, seed), **fields)


def open_manager(cache: Cache, lora_dir: Path) -> LoraManager:
    return LoraManager(cache.config, cache.peft, lora_dir=lora_dir)


def check_content(cache: Cache, manager: LoraManager, name: str, seed: int = 1) -> None:
    request = LlmRequest(99)
    manager.acquire(name, request)
    add_and_wait(cache.peft, request)
    task_id: Any = request.lora_task_id
    actual = cache.peft.task_weights(task_id, "host")
    manager.release(request)
    expected = adapter_tensors(cache.config.modules, 4, seed)
    assert_same_weights(actual, weights_of(expected, torch.float32))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was opened: all go through these two functions."""
    counts: Counter[str] = Counter()
    for function in ("open_file", "open_file_source"):
        original = getattr(_core, function)

        def count(path: str, *args: Any, _original: Any = original) -> Any:
            counts[path] += 1
            return _original(path, *args)

        monkeypatch.setattr(_core, function, count)
    return counts


@pytest.mark.slow
def test_ten_thousand_adapters_are_listed_and_none_is_opened(
    small_cache: Cache, tmp_path: Path, opened: Counter[str]
) -> None:
    for number in range(9_999):
        directory = tmp_path / f"{number:04}"
        directory.mkdir()
        (directory / CONFIG_FILE).touch()
    write(small_cache, tmp_path / "good")
    manager = open_manager(small_cache, tmp_path)
    assert (len(manager.names), len(manager), manager.list()) == (10_000, 0, [])
    assert opened == {}
    check_content(small_cache, manager, "good")
    assert {os.path.dirname(path) for path in opened} == {str(tmp_path / "good")}
    assert [info.name for info in manager.list()] == ["good"]
    before = opened.total()
    with pytest.raises(AdapterFormatError):
        manager.task_id("0007")
    assert opened.total() == before + 1
    assert len(manager.names) == 10_000


def test_every_directory_with_a_configuration_is_a_name(small_cache: Cache, tmp_path: Path) -> None:
    for name in ("sql", "org/sql", "org/deep/er", "sql/checkpoint-5"):
        write(small_cache, tmp_path / name, seed=len(name))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "org" / "link").symlink_to("sql")
    (tmp_path / "loop").symlink_to(".")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), CONFIG_FILE).touch()
    manager = open_manager(small_cache, tmp_path)
    names = ("org/deep/er", "org/sql", "sql", "sql/checkpoint-5")
    assert manager.names == names
    for name in (*names, "org/link"):
        check_content(small_cache, manager, name, seed=len(name) - (name == "org/link"))
    assert manager.names[-1] == "org/link"
    assert {info.name for info in manager.list()} == {*names, "org/link"}


def test_one_adapter_has_one_name(small_cache: Cache, tmp_path: Path) -> None:
    write(small_cache, tmp_path / "org" / "sql")
    manager = open_manager(small_cache, tmp_path)
    others = ["org//sql", "./org/sql", "org/sql/", "org/./sql", "org/../org/sql", "/org/sql"]
    for name in (
        *others,
        str(tmp_path / "org/sql"),
        "..",
        ".",
        "",
        "org/sql\0",
        "x" * 300,
        "x" * 256,
        "org",
    ):
        with pytest.raises(AdapterNotFoundError):
            manager.task_id(name)
    assert manager.names == ("org/sql",)


def test_a_name_leads_nowhere_else(small_cache: Cache, tmp_path: Path) -> None:
    write(small_cache, tmp_path / "outside")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "link").symlink_to("../outside")
    listed = write(small_cache, tmp_path / "dir" / "listed")
    (listed / WEIGHTS_FILE).unlink()
    (listed / WEIGHTS_FILE).symlink_to(f"../../outside/{WEIGHTS_FILE}")
    manager = open_manager(small_cache, tmp_path / "dir")
    assert manager.names == ("listed",)
    for name in ("link", "listed"):
        with pytest.raises(AdapterPathError) as refused:
            manager.task_id(name)
        assert refused.value.root == str(tmp_path / "dir")
    with pytest.raises(AdapterNotFoundError) as caught:
        manager.task_id("../outside")
    assert "lora_dir" in str(caught.value)
    assert len(manager) == 0


def test_adapters_that_come_later_are_found(small_cache: Cache, tmp_path: Path) -> None:
    manager = open_manager(small_cache, tmp_path)
    with pytest.raises(AdapterNotFoundError):
        manager.task_id("new")
    write(small_cache, tmp_path / "new", seed=7)
    check_content(small_cache, manager, "new", seed=7)
    assert manager.names == ("new",)


BREAKS = {
    "configuration": (lambda d: (d / CONFIG_FILE).write_text("{"), AdapterFormatError),
    "weights": (lambda d: os.truncate(d / WEIGHTS_FILE, 5), AdapterFormatError),
    "no weights": (lambda d: (d / WEIGHTS_FILE).unlink(), AdapterNotFoundError),
    "gone": (shutil.rmtree, AdapterNotFoundError),
    "unsupported": (
        lambda d: (d / CONFIG_FILE).write_text('{"peft_type": "VERA", "r": 4, "lora_alpha": 8}'),
        UnsupportedAdapterError,
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_adapter_harms_its_own_requests_only(
    small_cache: Cache, tmp_path: Path, how: str
) -> None:
    """Promise 4."""
    for name in ("bad", "good"):
        write(small_cache, tmp_path / name)
    manager = open_manager(small_cache, tmp_path)
    damage, error = BREAKS[how]
    damage(tmp_path / "bad")
    names = AdapterNames(manager)
    for lora in ("bad", LoRARequest("bad"), LoRARequest("bad", 3)):
        with pytest.raises(error):
            names.resolve(lora)
    assert len(manager) == 0
    small_cache.peft.check_invariants()
    check_content(small_cache, manager, "good")
    if how != "gone":
        shutil.rmtree(tmp_path / "bad")
    write(small_cache, tmp_path / "bad", seed=5)  # repaired
    check_content(small_cache, manager, "bad", seed=5)


def test_every_call_that_takes_a_name_finds_it(small_cache: Cache, tmp_path: Path) -> None:
    calls = {
        "get": lambda m, n: m.get(n),
        "load": lambda m, n: m.load(n),
        "pin": lambda m, n: (m.pin(n), m.unpin(n)),
        "task_id": lambda m, n: m.task_id(n),
        "real_path": lambda m, n: m.real_path(n),
        "cache_salt": lambda m, n: m.cache_salt(n),
        "reload": lambda m, n: m.reload(n, tmp_path / n),
    }
    for name in calls:
        write(small_cache, tmp_path / name, seed=len(name))
    manager = open_manager(small_cache, tmp_path)
    for name, call in calls.items():
        call(manager, name)
        assert manager.get(name).path == str(tmp_path / name)
        with pytest.raises(AdapterNotFoundError):
            call(manager, "none")


def test_a_name_of_the_directory_is_taken(small_cache: Cache, tmp_path: Path) -> None:
    other = write(small_cache, tmp_path / "other", seed=2)
    mine = write(small_cache, tmp_path / "dir" / "sql")
    manager = open_manager(small_cache, tmp_path / "dir")
    names = AdapterNames(manager)
    for call in (manager.register, manager.load, names.load):
        with pytest.raises(InvalidArgumentError, match="sql"):
            call("sql", other)
    with pytest.raises(InvalidArgumentError, match="sql"):
        names.resolve(LoRARequest("sql", lora_path=other))
    assert manager.load("sql", mine).path == str(mine)
    manager.register("mine", other)
    check_content(small_cache, manager, "sql")
    check_content(small_cache, manager, "mine", seed=2)


def test_an_unloaded_name_comes_back_when_it_is_asked_for(
    small_cache: Cache, tmp_path: Path
) -> None:
    write(small_cache, tmp_path / "sql")
    manager = open_manager(small_cache, tmp_path)
    with pytest.raises(AdapterNotFoundError):
        manager.unload("sql")  # nobody has used it
    first = manager.task_id("sql")
    manager.unload("sql")
    assert (len(manager), manager.names) == (0, ("sql",))
    assert manager.task_id("sql") > first
    check_content(small_cache, manager, "sql")


def test_threads_that_ask_first_at_once_share_the_name(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(small_cache, tmp_path / "sql")
    manager = open_manager(small_cache, tmp_path)
    everybody = threading.Barrier(4)

    def parse_together(*args: Any) -> Any:
        parsed = parse_adapter(*args)
        everybody.wait(60)
        return parsed

    monkeypatch.setattr(parts, "parse_adapter", parse_together)
    calls = [Call(manager.task_id, "sql") for _ in range(4)]
    assert {call.result() for call in calls} == {manager.task_id("sql")}
    assert manager.names == ("sql",)


def test_what_is_allowed_goes_for_names_of_the_directory_too(
    small_cache: Cache, tmp_path: Path
) -> None:
    """Strictness and the check of values; pickles are in test_pickled.py."""
    write(small_cache, tmp_path / "later", a_field_of_tomorrow=1)
    bad = adapter_tensors(small_cache.config.modules, 4, seed=1)
    next(iter(bad.values()))[0, 0] = float("nan")
    write_adapter(tmp_path / "bad", bad)
    strict = open_manager(small_cache, tmp_path)
    with pytest.raises(UnsupportedAdapterError, match="a_field_of_tomorrow"):
        strict.load("later")
    with pytest.raises(AdapterFormatError, match="NaN"):
        strict.load("bad")
    options: dict[str, Any] = {"strict": False, "check_values": False}
    lenient = LoraManager(small_cache.config, small_cache.peft, lora_dir=tmp_path, **options)
    with pytest.warns(PagedLoraWarning, match="a_field_of_tomorrow"):
        assert len(lenient.load("later").report.ignored) == 1
    assert lenient.load("bad").tiers == ("host",)


def test_a_directory_that_does_not_exist(small_cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError):
        open_manager(small_cache, tmp_path / "none")
