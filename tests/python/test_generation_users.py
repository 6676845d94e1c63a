"""Owners, unloading and pins: all per name, on generations that names share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import generations
from tests.support.adapters import WEIGHTS_FILE
from tests.support.cache_fixtures import (
    Cache,
    Call,
    add_and_wait,
    pages_of_random_adapter,
    wait_until,
)
from tests.support.generations import RANK, assert_bytes, is_kept, is_known, write

from pagedlora import (
    AdapterInUseError,
    AdapterLoadTimeout,
    AdapterNotFoundError,
    InvalidArgumentError,
    LlmRequest,
    PagedLoraError,
    RequestConflictError,
    _core,
)
from pagedlora.registry.content import AdapterContent
from pagedlora.registry.reload import Reloader

fakes = generations.fakes


# ---- owners ------------------------------------------------------------------------------------


def test_owners_are_those_acquired_for_the_name(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    for name in ("a", "b"):
        manager.load(name, write(small_cache, tmp_path / name))
    requests = {number: LlmRequest(number) for number in range(1, 5)}
    for number, name in ((1, "a"), (2, "b"), (3, "b")):
        assert manager.acquire(name, requests[number]) == manager.task_id("a")
        assert manager.acquire(name, requests[number]) == requests[number].lora_task_id
    assert manager.get("a").owners == frozenset()  # none was added yet
    for number in (1, 2, 3):
        add_and_wait(peft, requests[number])
    peft.mark_request_done(requests[3], pause=True)
    assert [info.owners for info in manager.list()] == [{1}, {2, 3}]
    peft.mark_request_done(requests[2])
    assert manager.get("b").owners == {3}
    manager.release(requests[3])
    manager.release(requests[3])
    assert manager.get("b").owners == frozenset()
    manager.release(requests[4])  # uses nothing


def test_a_live_request_uses_one_adapter(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    for seed, name in enumerate(("a", "b")):
        manager.load(name, write(small_cache, tmp_path / name, seed=seed))
    request = LlmRequest(1)
    manager.acquire("a", request)
    for other, name in ((request, "b"), (LlmRequest(1), "a")):
        with pytest.raises(RequestConflictError, match="release it first"):
            manager.acquire(name, other)
    assert request.lora_task_id == manager.task_id("a")
    manager.release(LlmRequest(1))  # another request of that id
    with pytest.raises(RequestConflictError):
        manager.acquire("b", request)
    manager.release(request)
    assert manager.acquire("b", request) == request.lora_task_id == manager.task_id("b")


def test_a_request_whose_task_cannot_be_set_is_refused(small_cache: Cache, tmp_path: Path) -> None:
    class Frozen:
        __slots__ = ("request_id",)

    small_cache.adapters.load("a", write(small_cache, tmp_path))
    request = Frozen()
    request.request_id = 1
    with pytest.raises(InvalidArgumentError, match="lora_task_id of request 1"):
        small_cache.adapters.acquire("a", request)
    small_cache.adapters.unload("a", timeout_s=0)


# ---- unload ------------------------------------------------------------------------------------


def test_unloading_the_last_name_forgets_the_task(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    infos = [manager.load(name, write(small_cache, tmp_path / name)) for name in ("a", "b")]
    manager.unload("a", timeout_s=0)
    assert [info.name for info in manager.list()] == ["b"]
    for ask in (manager.get, manager.task_id, manager.load, manager.unload):
        with pytest.raises(AdapterNotFoundError):
            ask("a")
    add_and_wait(peft, small_cache.request(1, "b"))
    assert_bytes(small_cache, infos[1].task_id, 1)
    peft.mark_request_done(LlmRequest(1))
    manager.unload("b", timeout_s=0)
    assert not is_known(small_cache, infos[0].task_id)
    assert peft.free_pages("host") == peft.max_host_pages
    again = manager.load("a", tmp_path / "a")
    assert again.task_id > infos[0].task_id


def test_unload_waits_for_the_names_requests_and_refuses_new_ones(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    info = manager.load("a", write(small_cache, tmp_path))
    owner, waiting = LlmRequest(1), LlmRequest(2)
    for request in (owner, waiting):
        manager.acquire("a", request)
    add_and_wait(peft, owner)
    unloading = Call(lambda: manager.unload("a", timeout_s=60))

    def is_refused() -> bool:
        try:
            manager.task_id("a")
        except AdapterNotFoundError:
            return True
        return False

    assert wait_until(is_refused)
    with pytest.raises(AdapterNotFoundError, match="being unloaded"):
        manager.acquire("a", LlmRequest(3))
    with pytest.raises(AdapterNotFoundError):
        manager.unload("a", timeout_s=0)
    peft.mark_request_done(owner)
    assert not unloading.has_returned
    add_and_wait(peft, waiting)
    assert is_known(small_cache, info.task_id)
    peft.mark_request_done(waiting)
    manager.release(waiting)
    unloading.result()
    assert not is_known(small_cache, info.task_id)


def test_an_unload_that_times_out_lists_the_owners_and_changes_nothing(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    before = manager.load("a", write(small_cache, tmp_path), pinned=True)
    owner, unacquired, waiting = LlmRequest(1), small_cache.request(2, "a"), LlmRequest(3)
    for request in (owner, waiting):
        manager.acquire("a", request)
    for request in (owner, unacquired):
        add_and_wait(peft, request)
    with pytest.raises(AdapterInUseError, match="by 3 requests: 1, 2, 3") as caught:
        manager.unload("a", timeout_s=0)
    assert (caught.value.owners, caught.value.num_owners) == ({1, 2, 3}, 3)
    assert caught.value.task_id == before.task_id
    assert manager.acquire("a", LlmRequest(4)) == before.task_id
    assert manager.get("a").pinned
    assert manager.get("a").owners == {1, 2}


def test_one_names_requests_do_not_keep_another_name(small_cache: Cache, tmp_path: Path) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    for name in ("a", "b"):
        manager.load(name, write(small_cache, tmp_path / name))
    request = LlmRequest(1)
    manager.acquire("b", request)
    add_and_wait(peft, request)
    manager.unload("a", timeout_s=0)
    with pytest.raises(AdapterInUseError):
        manager.unload("b", timeout_s=0)
    assert peft.active_tasks == {manager.task_id("b"): {1}}


def test_a_request_that_keeps_its_adapter_is_waited_for_until_released(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    manager.load("a", write(small_cache, tmp_path))
    request = LlmRequest(1, keeps_adapter=True)
    manager.acquire("a", request)
    add_and_wait(peft, request)
    peft.mark_request_done(request)
    assert manager.get("a").owners == frozenset()
    with pytest.raises(AdapterInUseError):
        manager.unload("a", timeout_s=0)
    manager.release(request)
    manager.unload("a", timeout_s=0)


class StartedRequest(LlmRequest):
    """One that has computed something, elsewhere."""

    has_started = True  # type: ignore[assignment]


@pytest.mark.parametrize("comes_back", [True, False])
def test_o4_a_request_whose_place_was_taken_is_waited_for(
    make_cache: Callable[..., Cache], tmp_path: Path, comes_back: bool
) -> None:
    """It waits for room and is added again, so its name keeps the task until it is marked done."""
    cache = make_cache(host_pages=2 * pages_of_random_adapter(RANK))
    manager, peft = cache.adapters, cache.peft
    for seed, name in enumerate("abc"):
        manager.register(name, write(cache, tmp_path / name, seed))
    waiting, started = LlmRequest(0), [StartedRequest(number) for number in (1, 2)]
    for name, request in zip("abc", (waiting, *started), strict=True):
        manager.acquire(name, request)
        add_and_wait(peft, request)
        with pytest.raises(AdapterInUseError):
            manager.unload(name, timeout_s=0)  # the request is seen to own it
    assert peft.adapter_state(waiting) == "waiting"
    with pytest.raises(AdapterInUseError) as caught:
        manager.unload("a", timeout_s=0)
    assert (caught.value.owners, manager.get("a").owners) == ({0}, frozenset())
    if comes_back:
        manager.release(started[0])
        add_and_wait(peft, waiting)
        assert_bytes(cache, manager.task_id("a"), 0)
    peft.mark_request_done(waiting)
    manager.unload("a", timeout_s=0)


def test_o4_a_request_whose_place_was_taken_moves_with_its_name(
    make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    cache = make_cache(host_pages=pages_of_random_adapter(RANK))
    manager, peft = cache.adapters, cache.peft
    for seed, name in enumerate("ab"):
        manager.register(name, write(cache, tmp_path / name, seed))
    waiting, started = LlmRequest(0), StartedRequest(1)
    manager.acquire("a", waiting)
    add_and_wait(peft, waiting)
    manager.acquire("b", started)
    add_and_wait(peft, started)
    assert peft.adapter_state(waiting) == "waiting"
    manager.reload("a", write(cache, tmp_path / "new", 7))
    manager.release(started)
    add_and_wait(peft, waiting)
    assert waiting.lora_task_id == manager.task_id("a")
    assert_bytes(cache, manager.task_id("a"), 7)


def test_a_name_unloaded_while_it_is_loaded_is_gone(
    small_cache: Cache, tmp_path: Path, fakes: dict[str, _core.FakeSource]
) -> None:
    manager = small_cache.adapters
    directory = write(small_cache, tmp_path)
    task_id = manager.register("a", directory).task_id
    source = fakes[str(directory)]
    source.hold_reads()
    loading = Call(lambda: manager.load("a", pinned=True))
    assert wait_until(lambda: source.num_held == 1)
    manager.unload("a", timeout_s=0)
    source.release_reads()
    with pytest.raises(AdapterNotFoundError):
        loading.result()
    assert (len(manager), manager.retired()) == (0, ())
    assert not is_known(small_cache, task_id)


def test_what_an_open_lease_reads_is_retired_until_it_is_closed(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    task_id = manager.load("a", write(small_cache, tmp_path)).task_id
    request = small_cache.request(1, "a")
    add_and_wait(peft, request)
    lease = peft.ensure_batch([request], [])
    peft.mark_request_done(request)
    manager.unload("a", timeout_s=0)
    assert [info.task_id for info in manager.retired()] == [task_id]
    lease.close()
    assert manager.retired() == ()
    assert not is_known(small_cache, task_id)


# ---- pins --------------------------------------------------------------------------------------


def test_pins_are_counted_per_name(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    for name in ("a", "b"):
        manager.load(name, write(small_cache, tmp_path / name))
    manager.pin("a")
    manager.pin("a")
    manager.load("b", pinned=True)
    assert [info.pinned for info in manager.list()] == [True, True]
    manager.unpin("b")
    with pytest.raises(InvalidArgumentError, match="'b' is not pinned"):
        manager.unpin("b")
    manager.unpin("a")
    assert is_kept(small_cache, "b")
    assert [info.pinned for info in manager.list()] == [True, False]
    manager.unpin("a")
    assert not is_kept(small_cache, "a")


def test_unloading_one_name_does_not_unpin_another(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    for name in ("a", "b"):
        manager.load(name, write(small_cache, tmp_path / name), pinned=True)
    manager.unload("b", timeout_s=0)
    assert is_kept(small_cache, "a")
    manager.load("b", tmp_path / "b")
    manager.unload("a", timeout_s=0)  # its pin goes with it
    assert not is_kept(small_cache, "b")


def test_a_pin_reads_the_adapter_and_shares_it(small_cache: Cache, tmp_path: Path) -> None:
    manager = small_cache.adapters
    for name in ("a", "b"):
        manager.register(name, write(small_cache, tmp_path / name))
        manager.pin(name)
    assert manager.get("a").task_id == manager.get("b").task_id
    assert is_kept(small_cache, "a")
    for name in ("nobody", ""):
        for call in (manager.pin, manager.unpin):
            with pytest.raises(AdapterNotFoundError):
                call(name)


def test_a_pin_that_fails_pins_nothing(
    small_cache: Cache, tmp_path: Path, fakes: dict[str, _core.FakeSource]
) -> None:
    manager = small_cache.adapters
    manager.register("a", write(small_cache, tmp_path))
    fakes[str(tmp_path)].fail_open()
    with pytest.raises(PagedLoraError):
        manager.pin("a")
    assert not manager.get("a").pinned
    manager.unload("a", timeout_s=0)
    assert manager.retired() == ()


def test_many_threads_pin_one_adapter_with_one_load(
    small_cache: Cache, tmp_path: Path, fakes: dict[str, _core.FakeSource]
) -> None:
    manager = small_cache.adapters
    manager.register("a", write(small_cache, tmp_path))
    source = fakes[str(tmp_path)]
    opens = source.num_opens
    source.hold_reads()
    calls = [Call(manager.pin, "a") for _ in range(4)]
    assert wait_until(lambda: source.num_held == 1)
    source.release_reads()
    for call in calls:
        call.result()
    assert source.num_opens == opens + 1
    for _ in range(4):
        assert is_kept(small_cache, "a")
        manager.unpin("a")
    assert not is_kept(small_cache, "a")


class SlowDigest:
    """Digests take until so many calls want one; counts those that read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_callers: int) -> None:
        digest, identify = AdapterContent.digest, Reloader.identify
        self.num_reads = 0
        self.errors: list[Exception] = []
        come, everybody = iter(range(1, num_callers + 1)), threading.Event()

        def count_callers(*args: Any) -> str:
            if next(come) == num_callers:
                everybody.set()
            return identify(*args)

        def read(*args: Any) -> str:
            self.num_reads += 1
            assert everybody.wait(60)
            if self.errors:
                raise self.errors.pop()
            return digest(*args)

        monkeypatch.setattr(Reloader, "identify", count_callers)
        monkeypatch.setattr(AdapterContent, "digest", read)


def test_many_threads_that_want_a_digest_read_once(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = small_cache.adapters
    manager.register("a", write(small_cache, tmp_path))
    slow = SlowDigest(monkeypatch, num_callers=4)
    calls = [Call(manager.cache_salt, "a") for _ in range(4)]
    assert len({call.result() for call in calls}) == 1
    assert slow.num_reads == 1


def test_who_waits_for_a_digest_reads_it_when_the_reader_gives_up(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = small_cache.adapters
    manager.register("a", write(small_cache, tmp_path))
    slow = SlowDigest(monkeypatch, num_callers=2)
    slow.errors = [AdapterLoadTimeout("late", limit_seconds=0.0, stuck_readers=0)]
    outcomes: list[bytes | Exception] = []
    for call in [Call(manager.cache_salt, "a") for _ in range(2)]:
        try:
            outcomes.append(call.result())
        except AdapterLoadTimeout as error:
            outcomes.append(error)
    assert {type(outcome) for outcome in outcomes} == {bytes, AdapterLoadTimeout}
    assert slow.num_reads == 2


def test_no_lock_is_held_while_a_file_is_hashed(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = small_cache.adapters
    started, go_on = threading.Event(), threading.Event()
    digest = AdapterContent.digest

    def slow(*args: Any) -> str:
        started.set()
        assert go_on.wait(60)
        return digest(*args)

    directory = write(small_cache, tmp_path / "a")
    other = write(small_cache, tmp_path / "b")
    monkeypatch.setattr(AdapterContent, "digest", slow)
    loading = Call(manager.load, "a", directory)
    assert started.wait(60)
    manager.register("b", other)
    request = LlmRequest(1)
    manager.acquire("b", request)
    manager.release(request)
    manager.unload("b", timeout_s=0)
    assert len(manager.list()) == 1
    go_on.set()
    assert loading.result().tiers == ("host",)
    assert (tmp_path / "a" / WEIGHTS_FILE).exists()
