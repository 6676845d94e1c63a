"""Reloading a name: who moves to the new generation, who stays, and what refuses it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import generations
from tests.support.adapters import (
    WEIGHTS_FILE,
    adapter_tensors,
    assert_same_weights,
    read_matrix,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait
from tests.support.generations import is_kept, is_known, weights

from pagedlora import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterNotFoundError,
    AdapterSourceChangedError,
    GenerationConflictError,
    LlmRequest,
    LoraCacheFullError,
    PagedLoraError,
    UnsupportedAdapterError,
)
from pagedlora.lora_manager import MAX_RETIRED
from pagedlora.registry.content import AdapterContent


def write(cache: Cache, directory: Path, seed: int = 1, **fields: Any) -> Path:
    return generations.write(cache, directory / f"seed{seed}", seed, **fields)


def start(cache: Cache, request: LlmRequest) -> None:
    """Adds the request and puts it in a batch."""
    add_and_wait(cache.peft, request)
    cache.peft.ensure_batch([request], []).close()


def acquired(cache: Cache, number: int, name: str = "a") -> LlmRequest:
    request = LlmRequest(number)
    cache.adapters.acquire(name, request)
    return request


def end(cache: Cache, request: LlmRequest) -> None:
    cache.peft.mark_request_done(request)
    cache.adapters.release(request)


# ---- content -----------------------------------------------------------------------------------


def test_other_content_is_a_new_generation_with_a_new_task(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager = small_cache.adapters
    old = manager.load("a", write(small_cache, tmp_path, 1))
    new = manager.reload("a", write(small_cache, tmp_path, 2))
    assert new.task_id > old.task_id
    assert new.generation not in (None, old.generation)
    assert (new.name, new.path) == ("a", str(tmp_path / "seed2"))
    assert manager.retired() == ()
    assert not is_known(small_cache, old.task_id)
    add_and_wait(small_cache.peft, acquired(small_cache, 1))
    actual = small_cache.peft.task_weights(new.task_id, "host")
    assert_same_weights(actual, weights(small_cache, 2))


def test_another_scale_is_other_content(small_cache: Cache, tmp_path: Path) -> None:
    old = small_cache.adapters.load("a", write(small_cache, tmp_path / "x"))
    new = small_cache.adapters.reload("a", write(small_cache, tmp_path / "y", lora_alpha=17))
    assert new.task_id != old.task_id


@pytest.mark.parametrize("is_read", [True, False])
def test_the_same_content_changes_only_the_source(
    small_cache: Cache, tmp_path: Path, is_read: bool
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    first = write(small_cache, tmp_path / "x")
    old = manager.load("a", first) if is_read else manager.register("a", first)
    request = acquired(small_cache, 1)
    add_and_wait(peft, request)
    new = manager.reload("a", write(small_cache, tmp_path / "y"))
    assert new.task_id == old.task_id == request.lora_task_id
    assert new.path == str(tmp_path / "y" / "seed1")
    assert (manager.retired(), new.owners) == ((), {1})
    end(small_cache, request)
    shutil.rmtree(tmp_path / "x")
    peft.evict_unowned("host")
    assert manager.load("a", tmp_path / "y" / "seed1").tiers == ("host",)


def test_the_same_content_from_ever_new_directories_stays_readable(
    small_cache: Cache, tmp_path: Path
) -> None:
    """As many as a generation keeps sources, and more; each old one is removed."""
    manager, previous = small_cache.adapters, None
    for number in range(20):
        path = generations.write(small_cache, tmp_path / str(number))
        if previous is None:
            manager.load("a", path)
        else:
            manager.reload("a", path)
            shutil.rmtree(previous)
        previous = path
    small_cache.peft.evict_unowned("host")
    assert manager.load("a").tiers == ("host",)
    generations.assert_bytes(small_cache, manager.task_id("a"), 1)


def test_the_same_content_in_another_layout_is_read_from_where_it_still_is(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager = small_cache.adapters
    tensors = adapter_tensors(small_cache.config.modules, 4, 1)
    bare = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    old = manager.load("a", write_adapter(tmp_path / "x", tensors))
    kept = manager.reload("a", write_adapter(tmp_path / "y", bare))
    assert (kept.task_id, kept.path) == (old.task_id, str(tmp_path / "y"))
    shutil.rmtree(tmp_path / "x")
    new = manager.reload("a", tmp_path / "y")
    assert new.task_id != old.task_id
    assert new.generation == old.generation
    small_cache.peft.evict_unowned("host")
    assert manager.load("a").tiers == ("host",)


def test_a_directory_that_was_written_again_is_reloaded_from_itself(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager = small_cache.adapters
    directory = write(small_cache, tmp_path)
    old = manager.register("a", directory)
    write_adapter(directory, adapter_tensors(small_cache.config.modules, 2, 5))
    with pytest.raises(AdapterSourceChangedError):
        manager.load("a")
    new = manager.reload("a", directory)
    assert new.task_id != old.task_id
    assert set(new.ranks.values()) == {2}
    assert manager.load("a", directory).tiers == ("host",)


def test_a_reload_to_a_retired_content_whose_last_request_has_just_ended(
    small_cache: Cache, tmp_path: Path
) -> None:
    """It is forgotten by the very reload that wants it: that gets a task of its own."""
    manager, peft = small_cache.adapters, small_cache.peft
    first, second = (write(small_cache, tmp_path, seed) for seed in (1, 2))
    old = manager.load("a", first)
    request = acquired(small_cache, 1)
    start(small_cache, request)
    manager.reload("a", second)
    peft.mark_request_done(request)  # it stops owning, and nobody has looked since
    new = manager.reload("a", first)
    assert new.generation == old.generation
    assert is_known(small_cache, new.task_id)
    manager.release(request)
    add_and_wait(peft, acquired(small_cache, 2))
    generations.assert_bytes(small_cache, new.task_id, 1)


def test_a_reload_shares_what_another_name_has(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    manager.load("a", write(small_cache, tmp_path / "x", 1))
    b = manager.load("b", write(small_cache, tmp_path / "x", 2))
    assert manager.reload("a", write(small_cache, tmp_path / "y", 2)).task_id == b.task_id
    manager.unload("b", timeout_s=0)
    assert is_known(small_cache, b.task_id)
    other = manager.load("c", tmp_path / "x" / "seed1")
    manager.reload("a", tmp_path / "x" / "seed1")
    assert manager.task_id("a") == other.task_id
    assert not is_known(small_cache, b.task_id)


# ---- requests ----------------------------------------------------------------------------------


def test_started_requests_stay_and_the_others_move(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    old = manager.load("a", write(small_cache, tmp_path, 1))
    in_batch, paused, says_so, added, waiting = (acquired(small_cache, n) for n in range(1, 6))
    start(small_cache, in_batch)
    add_and_wait(peft, paused)
    peft.mark_request_done(paused, pause=True)
    says_so.num_computed_tokens = 3
    for request in (says_so, added):
        add_and_wait(peft, request)
    new = manager.reload("a", write(small_cache, tmp_path, 2))
    assert peft.wait_idle()
    stay, move = (in_batch, paused, says_so), (added, waiting)
    assert {request.lora_task_id for request in stay} == {old.task_id}
    assert {request.lora_task_id for request in move} == {new.task_id}
    assert peft.active_tasks == {old.task_id: {1, 3}, new.task_id: {4}}
    assert peft.paused_tasks == {old.task_id: {2}}
    (retired,) = manager.retired()
    assert (retired.task_id, retired.generation) == (old.task_id, old.generation)
    assert (retired.name, retired.path, retired.owners) == ("a", old.path, {1, 2, 3})
    assert manager.get("a").owners == {1, 2, 3, 4}
    for request in stay:
        assert is_known(small_cache, old.task_id)
        end(small_cache, request)
    assert not is_known(small_cache, old.task_id)
    assert manager.retired() == ()
    assert manager.get("a").owners == {4}


def test_each_request_reads_the_bytes_of_its_generation(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    manager.load("a", write(small_cache, tmp_path, 1))
    running, waiting = acquired(small_cache, 1), acquired(small_cache, 2)
    start(small_cache, running)
    add_and_wait(peft, waiting)
    manager.reload("a", write(small_cache, tmp_path, 2))
    shutil.rmtree(tmp_path / "seed1")
    later = acquired(small_cache, 3)
    add_and_wait(peft, later)
    with peft.ensure_batch([waiting, later], [running]) as lease:
        assert not lease.errors
        for request, seed in ((running, 1), (waiting, 2), (later, 2)):
            assert lease.task_of(request.request_id) == request.lora_task_id
            firsts = {e.module_name: e for e in reversed(lease[request.request_id])}
            expected = weights(small_cache, seed)
            assert firsts.keys() == expected.keys()
            for name, entry in firsts.items():
                start_of_a = read_matrix(entry.weights_in_pointer, (1, 8), torch.float32)
                assert torch.equal(start_of_a, expected[name][0][:1, :8])
    for request, seed in ((running, 1), (waiting, 2)):
        actual = peft.task_weights(request.lora_task_id or 0)
        assert_same_weights(actual, weights(small_cache, seed))


def test_a_request_that_keeps_its_adapter_does_not_move(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    old = manager.load("a", write(small_cache, tmp_path, 1))
    request = LlmRequest(1, keeps_adapter=True)
    manager.acquire("a", request)
    manager.reload("a", write(small_cache, tmp_path, 2))
    assert request.lora_task_id == old.task_id
    assert [info.task_id for info in manager.retired()] == [old.task_id]
    with pytest.raises(AdapterInUseError):
        manager.unload("a", timeout_s=0)
    add_and_wait(peft, request)
    assert_same_weights(peft.task_weights(old.task_id, "host"), weights(small_cache, 1))
    end(small_cache, request)
    assert not is_known(small_cache, old.task_id)


def test_a_request_that_finds_no_room_moves_and_waits(make_cache: Any, tmp_path: Path) -> None:
    pages = make_cache().adapters.register("a", write(make_cache(), tmp_path, 1)).num_pages
    cache = make_cache(host_pages=2 * pages)
    manager, peft = cache.adapters, cache.peft
    manager.load("a", tmp_path / "seed1")
    manager.load("b", write(cache, tmp_path, 3))
    running, moved = acquired(cache, 1), acquired(cache, 2)
    other = acquired(cache, 3, "b")
    start(cache, running)
    for request in (moved, other):
        add_and_wait(peft, request)
    with pytest.raises(AdapterInUseError):  # it is seen to own its task
        manager.unload("a", timeout_s=0)
    manager.reload("a", write(cache, tmp_path, 2))
    assert peft.adapter_state(moved) == "waiting"
    with pytest.raises(LoraCacheFullError):
        peft.add_request_peft(moved)
    with pytest.raises(AdapterInUseError) as refused:
        manager.unload("a", timeout_s=0)
    assert moved.request_id in refused.value.owners  # it owns none now, but it has not ended
    new = manager.reload("a", write(cache, tmp_path, 4))
    assert moved.lora_task_id == new.task_id
    end(cache, running)
    add_and_wait(peft, moved)
    assert_same_weights(peft.task_weights(new.task_id, "host"), weights(cache, 4))


def test_a_failed_request_keeps_its_error(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    directory = write(small_cache, tmp_path, 1)
    manager.register("a", directory)
    request = acquired(small_cache, 1)
    (directory / WEIGHTS_FILE).unlink()
    peft.add_request_peft(request)
    assert peft.wait_idle()
    manager.reload("a", write(small_cache, tmp_path, 2))
    assert isinstance(peft.adapter_error(request), AdapterNotFoundError)
    assert manager.get("a").owners == frozenset()
    end(small_cache, request)


# ---- refusals ----------------------------------------------------------------------------------


def snapshot(cache: Cache) -> Any:
    peft, manager = cache.peft, cache.adapters
    return manager.list(), manager.retired(), peft.active_tasks, peft.paused_tasks


BROKEN: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "parse": ({"bias": "all"}, UnsupportedAdapterError),
    "format": ({"r": 5}, AdapterFormatError),
}


@pytest.mark.parametrize("stage", [*BROKEN, "missing", "hash", "conflict"])
def test_a_reload_that_fails_changes_nothing(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    manager = small_cache.adapters
    manager.load("a", write(small_cache, tmp_path, 1), pinned=True)
    running, waiting = acquired(small_cache, 1), acquired(small_cache, 2)
    start(small_cache, running)
    add_and_wait(small_cache.peft, waiting)
    before = snapshot(small_cache)
    fields, error = BROKEN.get(stage, ({}, PagedLoraError))
    source = write(small_cache, tmp_path, 2, **fields)
    if stage == "missing":
        shutil.rmtree(source)
    if stage == "hash":
        monkeypatch.setattr(AdapterContent, "digest", raise_changed)
    expected = "00" * 32 if stage == "conflict" else None
    with pytest.raises(error):
        manager.reload("a", source, expected_generation=expected)
    assert snapshot(small_cache) == before
    assert waiting.lora_task_id == before[0][0].task_id
    assert not is_known(small_cache, before[0][0].task_id + 1)


def raise_changed(*_: object) -> None:
    raise AdapterSourceChangedError("on command", path="")


def test_the_expected_generation_must_be_the_actual_one(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    old = manager.load("a", write(small_cache, tmp_path, 1))
    new = manager.reload("a", write(small_cache, tmp_path, 2), expected_generation=old.generation)
    third = write(small_cache, tmp_path, 3)
    with pytest.raises(GenerationConflictError, match="somebody else") as caught:
        manager.reload("a", third, expected_generation=old.generation)
    assert isinstance(caught.value, ValueError)
    assert caught.value.name == "a"
    assert (caught.value.expected, caught.value.actual) == (old.generation, new.generation)
    assert manager.get("a") == new
    registered = manager.register("b", tmp_path / "seed1")
    manager.reload("b", third, expected_generation=old.generation)  # read for it
    assert manager.task_id("b") != registered.task_id


@pytest.mark.parametrize("name", ["b", ""])
def test_an_unknown_name_cannot_be_reloaded(small_cache: Cache, tmp_path: Path, name: str) -> None:
    source = write(small_cache, tmp_path)
    with pytest.raises(AdapterNotFoundError):
        small_cache.adapters.reload(name, source)
    assert len(small_cache.adapters) == 0


def test_a_full_list_of_retired_generations_refuses_a_reload(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    manager.load("a", write(small_cache, tmp_path, 0, rank=1))
    requests = [acquired(small_cache, 0)]
    for seed in range(1, MAX_RETIRED + 1):
        start(small_cache, requests[-1])
        manager.reload("a", write(small_cache, tmp_path, seed, rank=1))
        requests.append(acquired(small_cache, seed))
    assert [info.task_id for info in manager.retired()] == [
        request.lora_task_id for request in requests[:-1]
    ]
    last = requests[-1]
    start(small_cache, last)
    before = snapshot(small_cache)
    another = write(small_cache, tmp_path, 99, rank=1)
    with pytest.raises(AdapterInUseError, match=f"{MAX_RETIRED} generations") as caught:
        manager.reload("a", another)
    assert caught.value.owners == set(range(MAX_RETIRED))
    assert snapshot(small_cache) == before
    same = manager.reload("a", write(small_cache, tmp_path / "same", MAX_RETIRED, rank=1))
    assert same.task_id == last.lora_task_id
    peft.mark_request_done(requests[5])  # found out without a release
    assert manager.reload("a", another).task_id != same.task_id
    assert len(manager.retired()) == MAX_RETIRED
    for request in requests:
        end(small_cache, request)
    assert manager.retired() == ()


# ---- pins --------------------------------------------------------------------------------------


def test_pins_go_with_the_name(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    first, second = (write(small_cache, tmp_path, seed) for seed in (1, 2))
    manager.load("a", first, pinned=True)
    manager.pin("a")
    manager.load("b", first)
    manager.reload("a", second)
    assert manager.get("a").pinned
    assert is_kept(small_cache, "a")
    assert not is_kept(small_cache, "b")
    manager.unpin("a")
    assert is_kept(small_cache, "a")
    manager.unpin("a")
    assert not is_kept(small_cache, "a")


def test_a_pinned_name_that_finds_no_room_is_not_reloaded(make_cache: Any, tmp_path: Path) -> None:
    pages = make_cache().adapters.register("a", write(make_cache(), tmp_path, 1)).num_pages
    cache = make_cache(host_pages=2 * pages)
    cache.adapters.load("a", tmp_path / "seed1", pinned=True)
    request = acquired(cache, 1)
    add_and_wait(cache.peft, request)
    before = snapshot(cache)
    with pytest.raises(LoraCacheFullError):
        cache.adapters.reload("a", write(cache, tmp_path, 2))
    assert snapshot(cache) == before
    assert not is_known(cache, before[0][0].task_id + 1)
    assert is_kept(cache, "a")
    cache.adapters.unpin("a")
    cache.adapters.reload("a", tmp_path / "seed2")
