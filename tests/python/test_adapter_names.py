"""Names decide; numbers and paths must agree with them."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagedlora.engine.adapter_names import AdapterNames
from pagedlora.errors import AdapterFormatError, AdapterNotFoundError, InvalidArgumentError
from pagedlora.requests import LoRARequest


@dataclass(frozen=True)
class Info:
    name: str
    task_id: int
    path: str


class Registry:
    """Registers whatever path does not end in 'bad'."""

    def __init__(self) -> None:
        self.infos: dict[str, Info] = {}

    def register(self, name: str, source: str) -> Info:
        if source.endswith("bad"):
            raise AdapterFormatError("bad", path=source, tensor="")
        assert name not in self.infos
        self.infos[name] = Info(name, 2**32 + len(self.infos), source)
        return self.infos[name]

    def get(self, name: str) -> Info:
        if name not in self.infos:
            raise AdapterNotFoundError(f"no adapter '{name}'", name=name)
        return self.infos[name]

    def task_id(self, name: str) -> int:
        return self.get(name).task_id


@pytest.fixture
def names() -> AdapterNames:
    return AdapterNames(Registry())


def test_none_is_the_base_model(names: AdapterNames) -> None:
    assert names.resolve(None) is None


def test_a_registered_name_is_its_task_in_every_form(names: AdapterNames) -> None:
    task = names.load("sql", "/a/sql").task_id
    assert names.resolve("sql") == task
    assert names.resolve(LoRARequest("sql")) == task
    assert names.resolve(LoRARequest("sql", 1, "/a/sql")) == task
    assert names.resolve(LoRARequest("sql", 2, "/a/../a/sql")) == task


def test_a_path_registers_once(names: AdapterNames) -> None:
    task = names.resolve(LoRARequest("sql", 1, Path("/a/sql")))
    assert names.resolve(LoRARequest("sql", 1, "/a/sql")) == task
    assert names.resolve("sql") == task


@pytest.mark.parametrize("lora", ["nobody", LoRARequest("nobody"), LoRARequest("nobody", 3)])
def test_an_unknown_name_is_an_error(names: AdapterNames, lora: LoRARequest | str) -> None:
    with pytest.raises(AdapterNotFoundError, match="nobody"):
        names.resolve(lora)


def test_one_name_for_two_paths_is_an_error(names: AdapterNames) -> None:
    names.load("sql", "/a/sql")
    with pytest.raises(InvalidArgumentError, match=r"/a/sql, not from /a/other"):
        names.resolve(LoRARequest("sql", 1, "/a/other"))


def test_a_name_registered_elsewhere_keeps_its_path() -> None:
    registry = Registry()
    names = AdapterNames(registry)
    registry.register("sql", "/a/sql")
    assert names.resolve(LoRARequest("sql", 1, "/a/sql")) == registry.task_id("sql")
    with pytest.raises(InvalidArgumentError, match="/a/other"):
        names.load("sql", "/a/other")


def test_one_number_for_two_names_is_an_error(names: AdapterNames) -> None:
    names.resolve(LoRARequest("a", 1, "/a"))
    with pytest.raises(InvalidArgumentError, match=r"lora_int_id 1 of adapter 'b'.*'a'"):
        names.resolve(LoRARequest("b", 1, "/b"))
    with pytest.raises(AdapterNotFoundError):
        names.resolve("b")


def test_a_request_that_failed_does_not_take_its_number(names: AdapterNames) -> None:
    with pytest.raises(AdapterFormatError):
        names.resolve(LoRARequest("broken", 1, "/bad"))
    with pytest.raises(AdapterNotFoundError):
        names.resolve("broken")
    assert names.resolve(LoRARequest("good", 1, "/good")) is not None


class BytesPath(os.PathLike):  # type: ignore[type-arg]
    """A path object of bytes."""

    def __fspath__(self) -> bytes:
        return b"/a/sql"


@pytest.mark.parametrize("path", [7, None, b"/a/sql", BytesPath()], ids=repr)
def test_what_is_no_path_is_refused(names: AdapterNames, path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="path of adapter 'sql'"):
        names.load("sql", path)
    with pytest.raises(AdapterNotFoundError):
        names.resolve("sql")


@pytest.mark.parametrize("path", ["/a/s\0ql", "/a/\ud800"], ids=ascii)
def test_a_path_that_no_file_can_have_is_another_path(names: AdapterNames, path: str) -> None:
    task = names.resolve(LoRARequest("sql", 1, "/a/sql"))
    with pytest.raises(InvalidArgumentError, match="no possible path"):
        names.resolve(LoRARequest("sql", 1, path))
    assert names.resolve("sql") == task


def test_one_name_loaded_by_two_threads_at_once_is_registered_once() -> None:
    class Slow(Registry):
        """Registering starts a second registration, and gives it time to run beside."""

        other: threading.Thread | None = None

        def register(self, name: str, source: str) -> Info:
            if self.other is None:
                self.other = threading.Thread(target=load)
                self.other.start()
                self.other.join(timeout=0.1)
            return super().register(name, source)

    registry = Slow()
    names = AdapterNames(registry)
    infos: list[Info] = []

    def load() -> None:
        infos.append(names.load("sql", "/a/sql"))

    load()
    assert registry.other is not None
    registry.other.join()
    assert len(infos) == 2
    assert infos[0] is infos[1]
