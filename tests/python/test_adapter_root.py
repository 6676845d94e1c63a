"""Adapters must lie in `adapter_root`, whatever a path, a name or a link says (design 3.5)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterPathError,
    InvalidArgumentError,
    LlmRequest,
    LoraManager,
    PagedLoraError,
    UnsupportedAdapterError,
)
from pagedlora.engine.adapter_names import AdapterNames
from pagedlora.requests import LoRARequest

INSIDE, OUTSIDE = 1, 2


@pytest.fixture
def root(small_cache: Cache, tmp_path: Path) -> Path:
    """A directory with the adapter `a`; beside it lies `outside`, of other content."""
    write(small_cache, tmp_path / "root" / "a", INSIDE)
    write(small_cache, tmp_path / "outside", OUTSIDE)
    return tmp_path / "root"


def write(cache: Cache, directory: Path, seed: int) -> Path:
    return write_adapter(directory, adapter_tensors(cache.config.modules, 4, seed))


@pytest.fixture
def manager(small_cache: Cache, root: Path) -> LoraManager:
    return LoraManager(small_cache.config, small_cache.peft, adapter_root=root)


def check_content(cache: Cache, manager: LoraManager, name: str, seed: int) -> None:
    request = LlmRequest(99, lora_task_id=manager.task_id(name))
    add_and_wait(cache.peft, request)
    actual = cache.peft.task_weights(request.lora_task_id, "host")
    cache.peft.mark_request_done(request)
    expected = adapter_tensors(cache.config.modules, 4, seed)
    assert_same_weights(actual, weights_of(expected, torch.float32))


@pytest.mark.parametrize("source", ["a", "./a/", "a/../a", "{root}/a", "{root}/./a"])
def test_sources_are_relative_to_the_root_or_absolute_and_inside(
    small_cache: Cache, manager: LoraManager, root: Path, source: str
) -> None:
    info = manager.register("x", source.format(root=root))
    assert os.path.samefile(info.path, root / "a")
    check_content(small_cache, manager, "x", INSIDE)
    assert manager.load("x", root / "a").name == "x"


def link(path: Path, target: str) -> None:
    path.symlink_to(target)


OUT: dict[str, tuple[str, Callable[[Path], None]]] = {
    "absolute": ("{root}/../outside", lambda _: None),
    "elsewhere": ("{outside}", lambda _: None),
    "up": ("../outside", lambda _: None),
    "up from below": ("a/../../outside", lambda _: None),
    "zero byte": ("a\0", lambda _: None),
    "link to a directory": ("out", lambda root: link(root / "out", "../outside")),
    "absolute link": ("out", lambda root: link(root / "out", str(root.parent / "outside"))),
    "chain of links": (
        "first",
        lambda root: (link(root / "first", "second"), link(root / "second", "../outside"))[0],
    ),
    "link to the configuration": ("a", lambda root: replace_by_link(root, CONFIG_FILE)),
    "link to the weights": ("a", lambda root: replace_by_link(root, WEIGHTS_FILE)),
}


def replace_by_link(root: Path, file: str) -> None:
    (root / "a" / file).unlink()
    (root / "a" / file).symlink_to(f"../../outside/{file}")


@pytest.mark.parametrize("how", OUT)
@pytest.mark.parametrize("call", ["register", "load", "reload"])
def test_what_leaves_the_root_is_refused(
    small_cache: Cache, manager: LoraManager, root: Path, how: str, call: str
) -> None:
    write(small_cache, root / "other", INSIDE)
    if call == "reload":
        manager.register("x", "other")
    source, prepare = OUT[how]
    prepare(root)
    with pytest.raises(AdapterPathError) as caught:
        getattr(manager, call)("x", source.format(root=root, outside=root.parent / "outside"))
    assert isinstance(caught.value, PermissionError)
    assert (caught.value.code, caught.value.root) == ("adapter_path", str(root))
    assert "adapter_root" in str(caught.value)
    assert str(caught.value.path) in str(caught.value) or "\0" in caught.value.path
    assert len(manager) == (call == "reload")
    small_cache.peft.check_invariants()
    if call == "reload":
        check_content(small_cache, manager, "x", INSIDE)


def test_weights_outside_are_not_looked_at_for_a_message_either(
    small_cache: Cache, manager: LoraManager, root: Path
) -> None:
    """Whole modules are refused with their tensors' names and sizes, read from the weights."""
    tensors = adapter_tensors(small_cache.config.modules, 4, INSIDE)
    for directory in (root / "a", root.parent / "outside"):
        write_adapter(directory, tensors, modules_to_save=["lm_head"])
    with pytest.raises(UnsupportedAdapterError) as caught:
        manager.register("x", "a")
    assert caught.value.field == "modules_to_save"
    replace_by_link(root, WEIGHTS_FILE)
    with pytest.raises(AdapterPathError):
        manager.register("x", "a")


def test_links_that_stay_inside_are_followed(
    small_cache: Cache, manager: LoraManager, root: Path
) -> None:
    (root / "snapshot").mkdir()
    for file in (CONFIG_FILE, WEIGHTS_FILE):  # as in the cache of the Hugging Face hub
        (root / "snapshot" / file).symlink_to(f"../a/{file}")
    (root / "current").symlink_to(root / "snapshot")
    manager.register("x", "current")
    check_content(small_cache, manager, "x", INSIDE)


def test_a_root_may_itself_be_a_link_and_given_as_a_relative_path(
    small_cache: Cache, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root.parent / "alias").symlink_to("root")
    monkeypatch.chdir(root.parent)
    manager = LoraManager(small_cache.config, small_cache.peft, adapter_root="alias")
    monkeypatch.chdir("/")
    manager.register("x", "a")
    manager.register("y", root / "a")
    check_content(small_cache, manager, "x", INSIDE)


def test_a_root_that_does_not_exist(small_cache: Cache, root: Path) -> None:
    for bad, error in ((root / "none", AdapterNotFoundError), (5, InvalidArgumentError)):
        with pytest.raises(error):
            LoraManager(small_cache.config, small_cache.peft, adapter_root=bad)  # type: ignore[arg-type]


def test_what_is_not_there_is_not_found(manager: LoraManager) -> None:
    for call in (manager.register, manager.load):
        with pytest.raises(AdapterNotFoundError):
            call("x", "none")
    assert manager.names == ()


def test_a_read_after_eviction_is_confined_too(
    small_cache: Cache, manager: LoraManager, root: Path
) -> None:
    """The same file, moved out and linked to: its identity alone would let it pass."""
    manager.register("x", "a")
    manager.register("y", write(small_cache, root / "b", OUTSIDE))
    check_content(small_cache, manager, "x", INSIDE)
    (root / "a").rename(root.parent / "moved")
    (root / "a").symlink_to("../moved")
    for tier in ("host", "device"):
        small_cache.peft.evict_unowned(tier)
    with pytest.raises(AdapterPathError):
        check_content(small_cache, manager, "x", INSIDE)
    assert small_cache.peft.active_tasks == {}
    with pytest.raises(AdapterPathError):
        manager.cache_salt("x")  # reads from Python
    with pytest.raises(AdapterPathError):
        manager.pin("x")
    check_content(small_cache, manager, "y", OUTSIDE)


def test_a_path_that_a_request_names_is_confined(
    small_cache: Cache, manager: LoraManager, root: Path
) -> None:
    names = AdapterNames(manager)
    task = names.resolve(LoRARequest("x", lora_path="a"))
    assert task == names.resolve(LoRARequest("x", lora_path=root / "a")) == names.resolve("x")
    assert names.load("x", root / "a").task_id == task
    for path in ("../outside", root.parent / "outside", "a\0"):
        for name in ("x", "y"):
            with pytest.raises(AdapterPathError):
                names.resolve(LoRARequest(name, lora_path=path))
    assert manager.names == ("x",)


@contextmanager
def swapping(name: Path, other: Path) -> Iterator[list[int]]:
    """Lets a name be now what it is, now what another one is; counts how often."""
    spare, count, stop = name.with_name("spare"), [0], threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for there, back in ((spare, other), (other, spare)):
                name.rename(there)
                back.rename(name)
                count[0] += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("what", ["directory", "weights"])
def test_a_link_swapped_in_while_registering_never_leads_outside(
    small_cache: Cache, manager: LoraManager, root: Path, what: str
) -> None:
    name = root / "a" if what == "directory" else root / "a" / WEIGHTS_FILE
    other = name.with_name("other")
    outside = root.parent / "outside"
    other.symlink_to(outside if what == "directory" else outside / WEIGHTS_FILE)
    outcomes = {"loaded": 0, "refused": 0}
    with swapping(name, other) as swaps:
        while swaps[0] < 300 or not all(outcomes.values()):
            try:
                manager.load("x", "a")
                weights = small_cache.peft.task_weights(manager.task_id("x"), "host")
            except AdapterPathError:
                outcomes["refused"] += 1
            except (KeyError, PagedLoraError):  # between two renames, or evicted meanwhile
                pass
            else:
                expected = adapter_tensors(small_cache.config.modules, 4, INSIDE)
                assert_same_weights(weights, weights_of(expected, torch.float32))
                outcomes["loaded"] += 1
            if "x" in manager.names:
                manager.unload("x", timeout_s=0)
    assert all(outcomes.values())


def test_a_link_that_is_gone_while_it_is_followed(
    small_cache: Cache, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "link").symlink_to("a")
    manager = LoraManager(small_cache.config, small_cache.peft)

    def gone(path: object, **_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", gone)
        for call in (manager.register, manager.load):
            with pytest.raises(AdapterNotFoundError, match="changed while it was looked at"):
                call("x", root / "link")
    assert manager.names == ()
    manager.load("x", root / "link")
    check_content(small_cache, manager, "x", INSIDE)


def test_a_directory_whose_name_is_no_text(small_cache: Cache, root: Path) -> None:
    """File names are bytes; fields of errors have them as Python spells them, messages escaped."""
    manager = LoraManager(small_cache.config, small_cache.peft)
    name = os.fsdecode(os.fsencode(root) + b"/\xff")
    (root / "a").rename(name)
    manager.register("x", name)
    check_content(small_cache, manager, "x", INSIDE)
    os.truncate(f"{name}/{WEIGHTS_FILE}", 3)
    with pytest.raises(AdapterFormatError) as caught:
        manager.register("y", name)
    assert caught.value.path.startswith(name)
    assert "xff" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["", "store"])
def test_whoever_names_a_path_is_told_nothing_of_what_lies_in_the_root(
    small_cache: Cache, manager: LoraManager, root: Path, path: str
) -> None:
    """A request may have named it: what others have is none of its business."""
    write(small_cache, root / "store" / "tenant", INSIDE)
    with pytest.raises(AdapterNotFoundError) as refused:
        manager.register("x", root / path)
    assert f"there is no adapter_config.json in '{root / path}': give the" in str(refused.value)
    anywhere = LoraManager(small_cache.config, small_cache.peft)
    with pytest.raises(AdapterNotFoundError, match="below it: give one of these"):
        anywhere.register("x", root / path)
