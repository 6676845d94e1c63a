"""Loading names, and names that share a generation because their content is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support import generations
from tests.support.adapters import write_adapter
from tests.support.cache_fixtures import Cache, Call, add_and_wait, wait_until
from tests.support.generations import assert_bytes, is_known, tensors_of, write

from pagedlora import (
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterSourceChangedError,
    AdapterTooLargeError,
    InvalidArgumentError,
    LlmRequest,
    LoraCacheFullError,
    PagedLoraError,
    _core,
)
from pagedlora.registry import content as content_module
from pagedlora.registry.content import AdapterContent

fakes = generations.fakes


# ---- load --------------------------------------------------------------------------------------


def test_load_registers_reads_and_waits_until_it_is_there(
    small_cache: Cache, tmp_path: Path
) -> None:
    info = small_cache.adapters.load("a", write(small_cache, tmp_path))
    assert info == small_cache.adapters.get("a")
    assert (info.tiers, info.pinned) == (("host",), False)
    assert info.generation is not None
    assert len(bytes.fromhex(info.generation)) == 32
    assert_bytes(small_cache, info.task_id, 1)
    small_cache.peft.evict_unowned("host")
    assert small_cache.adapters.get("a").tiers == ()


def test_loading_a_registered_name_needs_no_source_and_keeps_its_task(
    small_cache: Cache, tmp_path: Path
) -> None:
    directory = write(small_cache, tmp_path / "a")
    registered = small_cache.adapters.register("a", directory)
    (tmp_path / "link").symlink_to(directory)
    for source in (None, directory, tmp_path / "link", None):
        loaded = small_cache.adapters.load("a", source)
        assert (loaded.task_id, loaded.path) == (registered.task_id, str(directory))
    assert small_cache.peft.stats.source_reads == 1


def test_a_name_loaded_from_another_source_is_told_of_reload(
    small_cache: Cache, tmp_path: Path
) -> None:
    first, second = (write(small_cache, tmp_path / name) for name in ("x", "y"))
    before = small_cache.adapters.load("a", first)
    with pytest.raises(InvalidArgumentError, match=r"x', not from .*y': use reload\(\)"):
        small_cache.adapters.load("a", second)
    assert small_cache.adapters.list() == [before]


def test_a_name_that_is_not_registered_needs_a_source(small_cache: Cache) -> None:
    with pytest.raises(AdapterNotFoundError) as caught:
        small_cache.adapters.load("a")
    assert caught.value.name == "a"


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1", True], ids=repr)
def test_an_impossible_timeout_is_refused(
    small_cache: Cache, tmp_path: Path, timeout_s: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_s"):
        small_cache.adapters.load("a", write(small_cache, tmp_path), timeout_s=timeout_s)
    assert len(small_cache.adapters) == 0


@pytest.mark.parametrize("other", ["the same source", "no source"])
def test_two_threads_that_load_one_name_share_one_load(
    small_cache: Cache, tmp_path: Path, fakes: dict[str, _core.FakeSource], other: str
) -> None:
    directory = write(small_cache, tmp_path)
    manager = small_cache.adapters
    manager.register("a", directory)
    source = fakes[str(directory)]
    opens = source.num_opens
    source.hold_reads()
    first = Call(manager.load, "a", directory)
    assert wait_until(lambda: source.num_held == 1)
    second = Call(manager.load, "a", directory if other == "the same source" else None)
    with pytest.raises(InvalidArgumentError, match="not from"):
        manager.load("a", write(small_cache, tmp_path / "other"))
    with pytest.raises(AdapterLoadTimeout):
        manager.load("a", directory, timeout_s=0)
    source.release_reads()
    assert first.result() == second.result()
    assert source.num_opens == opens + 1
    small_cache.peft.evict_unowned("host")
    assert manager.get("a").tiers == ()  # neither call's pin is left


def test_those_who_wait_for_a_load_get_its_error(
    small_cache: Cache, tmp_path: Path, fakes: dict[str, _core.FakeSource]
) -> None:
    directory = write(small_cache, tmp_path)
    manager = small_cache.adapters
    manager.register("b", directory)  # makes the source
    source = fakes[str(directory)]
    source.hold_reads()
    first = Call(manager.load, "a", directory)
    assert wait_until(lambda: source.num_held == 1)
    second = Call(manager.load, "a", directory)
    flight = manager._loader._flights["a"][1]
    assert wait_until(lambda: bool(flight._over._cond._waiters))  # type: ignore[attr-defined]
    source.fail_read_after(0)
    source.release_reads()
    errors = []
    for call in (first, second):
        with pytest.raises(PagedLoraError) as caught:
            call.result()
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert [info.name for info in manager.list()] == ["b"]


# ---- nothing half done -------------------------------------------------------------------------


def fail_parsing(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    monkeypatch.setattr(content_module, "open_adapter", raising(AdapterNotFoundError))
    return AdapterNotFoundError


def fail_hashing(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    monkeypatch.setattr(AdapterContent, "digest", raising(AdapterSourceChangedError))
    return AdapterSourceChangedError


def raising(error: type[Exception]) -> Any:
    def fail(*_: object) -> None:
        raise error("on command")

    return fail


@pytest.mark.parametrize("fail", [fail_parsing, fail_hashing])
def test_a_load_that_fails_leaves_neither_name_nor_task(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Any
) -> None:
    manager = small_cache.adapters
    kept = manager.load("kept", write(small_cache, tmp_path / "kept"))
    directory = write(small_cache, tmp_path / "a", seed=2)
    with monkeypatch.context() as patch, pytest.raises(fail(patch)):
        manager.load("a", directory)
    assert (manager.list(), manager.retired()) == ([kept], ())
    for task_id in range(kept.task_id + 1, kept.task_id + 4):
        assert not is_known(small_cache, task_id)
    assert manager.load("a", directory).tiers == ("host",)


def test_a_load_whose_source_fails_in_the_core_leaves_nothing(
    small_cache: Cache,
    tmp_path: Path,
    fakes: dict[str, _core.FakeSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = write(small_cache, tmp_path)
    manager = small_cache.adapters
    before = manager.register("registered", directory)
    digest = AdapterContent.digest

    def failing_afterwards(*args: Any) -> str:
        result = digest(*args)
        fakes[str(directory)].fail_open()
        return result

    monkeypatch.setattr(AdapterContent, "digest", failing_afterwards)
    for name in ("a", "registered"):
        with pytest.raises(PagedLoraError):
            manager.load(name, directory, pinned=True)
        assert manager.get("registered").pinned is False
        assert [info.name for info in manager.list()] == ["registered"]
    assert manager.get("registered").task_id == before.task_id
    small_cache.peft.core.unregister_task(before.task_id)  # nothing pins it


def test_a_load_that_takes_too_long_is_given_up(
    small_cache: Cache, tmp_path: Path, fakes: dict[str, _core.FakeSource]
) -> None:
    directory = write(small_cache, tmp_path)
    manager = small_cache.adapters
    manager.register("known", directory)
    manager.cache_salt("known")  # what follows need not be hashed
    with pytest.raises(AdapterLoadTimeout):
        manager.load("new", directory, timeout_s=0)  # while it is hashed
    source = fakes[str(directory)]
    source.hold_reads()
    with pytest.raises(AdapterLoadTimeout) as caught:
        manager.load("known", timeout_s=0)
    assert caught.value.limit_seconds == 0
    source.release_reads()
    assert [info.name for info in manager.list()] == ["known"]
    assert manager.load("known").tiers == ("host",)


def test_what_finds_no_room_is_not_loaded(make_cache: Any, tmp_path: Path) -> None:
    cache = make_cache(host_pages=30)
    with pytest.raises((LoraCacheFullError, AdapterTooLargeError)):
        cache.adapters.load("a", write(cache, tmp_path, rank=16))
    assert len(cache.adapters) == 0


# ---- sharing -----------------------------------------------------------------------------------


def test_names_of_one_content_share_pages_from_the_second_load_on(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager = small_cache.adapters
    first, second = (write(small_cache, tmp_path / name) for name in ("a", "b"))
    a = manager.load("a", first)
    registered = manager.register("b", second)
    assert registered.task_id != a.task_id
    assert registered.generation is None
    b = manager.load("b")
    assert (b.task_id, b.generation) == (a.task_id, a.generation)
    assert (b.name, b.path) == ("b", str(second))
    assert not is_known(small_cache, registered.task_id)
    assert small_cache.peft.resident_tasks("host") == 1
    assert small_cache.peft.stats.source_reads == 1


@pytest.mark.parametrize("other", [{"lora_alpha": 17}, {"seed": 2}, {"rank": 5, "lora_alpha": 20}])
def test_names_of_other_content_or_configuration_share_nothing(
    small_cache: Cache, tmp_path: Path, other: dict[str, Any]
) -> None:
    manager = small_cache.adapters
    a = manager.load("a", write(small_cache, tmp_path / "a"))
    b = manager.load("b", write(small_cache, tmp_path / "b", **other))
    assert a.task_id != b.task_id
    assert a.generation != b.generation


def test_a_duplicate_task_retires_and_goes_with_its_last_owner(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    a = manager.load("a", write(small_cache, tmp_path / "a"))
    old = manager.register("b", write(small_cache, tmp_path / "b"))
    request = LlmRequest(1)
    manager.acquire("b", request)
    add_and_wait(peft, request)
    assert manager.load("b").task_id == a.task_id
    (retired,) = manager.retired()
    assert (retired.task_id, retired.owners, retired.name) == (old.task_id, {1}, "b")
    assert request.lora_task_id == old.task_id
    assert (manager.get("b").owners, manager.get("a").owners) == ({1}, frozenset())
    later = LlmRequest(2)
    assert manager.acquire("b", later) == a.task_id
    peft.mark_request_done(request)
    manager.release(request)
    assert manager.retired() == ()
    assert not is_known(small_cache, old.task_id)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_adapter_is_read_again_when_one_of_its_files_disappears(
    small_cache: Cache, tmp_path: Path, lost: str
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    for name in ("a", "b"):
        manager.load(name, write(small_cache, tmp_path / name))
    shutil.rmtree(tmp_path / lost)
    for tier in ("host", "device"):
        peft.evict_unowned(tier)
    request = small_cache.request(1, "a")
    add_and_wait(peft, request)
    assert_bytes(small_cache, manager.task_id("b"), 1)
    assert peft.stats.source_rereads == 1


def test_nothing_is_shared_with_a_generation_that_could_not_be_read_any_more(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    tensors = tensors_of(small_cache)
    bare = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    a = manager.load("a", write_adapter(tmp_path / "a", tensors))
    shared = manager.load("b", write_adapter(tmp_path / "b", bare))
    assert shared.task_id == a.task_id  # another layout, but a's file is there
    shutil.rmtree(tmp_path / "a")
    c = manager.load("c", write_adapter(tmp_path / "c", bare))
    assert c.task_id != a.task_id
    assert c.generation == a.generation
    peft.evict_unowned("host")
    assert manager.load("c").tiers == ("host",)
    d = manager.load("d", write_adapter(tmp_path / "d", tensors))
    assert d.task_id == c.task_id
    with pytest.raises(AdapterNotFoundError):
        add_and_wait(peft, small_cache.request(1, "b"))


def test_a_content_that_comes_back_is_retired_no_more(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    first, second = (write(small_cache, tmp_path / str(s), seed=s) for s in (1, 2))
    a = manager.load("a", first)
    request = LlmRequest(1)
    manager.acquire("a", request)
    add_and_wait(peft, request)
    peft.ensure_batch([request], []).close()
    manager.reload("a", second)
    assert [info.task_id for info in manager.retired()] == [a.task_id]
    assert manager.load("b", first).task_id == a.task_id
    assert manager.retired() == ()
