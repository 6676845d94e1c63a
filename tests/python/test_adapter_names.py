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
from pagedlora.paths import is_possible_path
from pagedlora.requests import LlmRequest, LoRARequest


@dataclass(frozen=True)
class Info:
    name: str
    task_id: int
    path: str


class Registry:
    """Registers whatever path does not end in 'bad'."""

    def __init__(self) -> None:
        self.infos: dict[str, Info] = {}
        self.users: dict[int, str] = {}

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

    def real_path(self, name: str) -> str:
        return os.path.realpath(self.get(name).path)

    def resolve_source(self, source: str) -> str:
        if not is_possible_path(source):
            raise InvalidArgumentError(f"{source!r} is no possible path")
        return os.path.realpath(source)

    def acquire(self, name: str, request: LlmRequest) -> int:
        request.lora_task_id = self.task_id(name)
        self.users.setdefault(request.request_id, name)
        return request.lora_task_id

    def release(self, request: LlmRequest) -> None:
        self.users.pop(request.request_id, None)


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
    with pytest.raises(InvalidArgumentError, match=r"'/a/sql', not from '/a/other'"):
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


@pytest.mark.parametrize(
    "path", [7, None, b"/a/sql", pytest.param(BytesPath(), id="BytesPath")], ids=repr
)
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


def test_the_number_of_an_unloaded_name_is_free(names: AdapterNames) -> None:
    registry: Any = names._registry
    names.resolve(LoRARequest("a", 1, "/a"))
    del registry.infos["a"]
    task = names.resolve(LoRARequest("b", 1, "/b"))
    assert names.resolve("b") == task
    with pytest.raises(InvalidArgumentError, match="lora_int_id 1 of adapter 'a'"):
        names.resolve(LoRARequest("a", 1, "/a"))


def test_an_unloaded_name_can_come_back_from_another_path(names: AdapterNames) -> None:
    registry: Any = names._registry
    names.load("a", "/a")
    del registry.infos["a"]
    assert names.load("a", "/b").path == "/b"
    with pytest.raises(InvalidArgumentError, match="'/b', not from '/a'"):
        names.load("a", "/a")


def test_requests_have_their_adapter_until_they_are_released(names: AdapterNames) -> None:
    registry: Any = names._registry
    task = names.load("a", "/a").task_id
    requests = [LlmRequest(number) for number in range(4)]
    for request, lora in zip(requests, ["a", LoRARequest("a"), None, "a"], strict=True):
        names.acquire(lora, request)
    assert [request.lora_task_id for request in requests] == [task, task, None, task]
    assert registry.users == {0: "a", 1: "a", 3: "a"}
    for _ in range(2):
        names.release(requests[0])
        assert registry.users == {1: "a", 3: "a"}
    for _ in range(2):
        names.release_all()
        assert registry.users == {}


def test_a_name_unloaded_between_resolving_and_acquiring_is_an_error(names: AdapterNames) -> None:
    with pytest.raises(AdapterNotFoundError):
        names.acquire("gone", LlmRequest(1))
    names.release_all()
