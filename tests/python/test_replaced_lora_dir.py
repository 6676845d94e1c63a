"""Adapters of `lora_dir` whose files are replaced while they are served (design L6, 3.5)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
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
from tests.support.cache_fixtures import Cache, Call, add_and_wait, pages_of_random_adapter
from tests.support.llm_fixtures import GREEDY, save_adapter, tokens_of
from tests.support.tiny_models import build_tiny_model

from pagedlora import (
    LLM,
    AdapterFormatError,
    AdapterInUseError,
    AdapterNotFoundError,
    AdapterSourceChangedError,
    KvCacheConfig,
    LlmRequest,
    LoraConfig,
    LoraManager,
    PagedLoraError,
)
from pagedlora.lora_manager import MAX_RETIRED


class Fleet:
    """A registry over a directory of adapters, each of one seed."""

    def __init__(self, cache: Cache, directory: Path) -> None:
        self.cache, self.directory, self.peft = cache, directory, cache.peft
        self.manager = LoraManager(cache.config, cache.peft, lora_dir=directory)
        self._next_id = 0

    def write(self, name: str, seed: int, directory: Path | None = None, **fields: Any) -> Path:
        tensors = adapter_tensors(self.cache.config.modules, 4, seed)
        return write_adapter((directory or self.directory) / name, tensors, **fields)

    def begin(self, name: str) -> LlmRequest:
        """A request that owns its adapter, which is in the host tier."""
        self._next_id += 1
        request = LlmRequest(self._next_id, keeps_adapter=True)
        self.manager.acquire(name, request)
        try:
            add_and_wait(self.peft, request)
        except PagedLoraError:
            self.manager.release(request)
            raise
        return request

    def check(self, request: LlmRequest, seed: int) -> None:
        assert request.lora_task_id is not None
        actual = self.peft.task_weights(request.lora_task_id, "host")
        expected = adapter_tensors(self.cache.config.modules, 4, seed)
        assert_same_weights(actual, weights_of(expected, torch.float32))

    def ask(self, name: str, seed: int) -> None:
        """Checks that a new request gets that content, and ends it."""
        request = self.begin(name)
        self.check(request, seed)
        self.manager.release(request)

    def evict(self, *requests: LlmRequest) -> None:
        """Out of both tiers, with requests that give way and go on wanting it."""
        for request in requests:
            self.peft.mark_request_done(request)
        for tier in ("device", "host"):
            self.peft.evict_unowned(tier)  # type: ignore[arg-type]


@pytest.fixture
def fleet(make_cache: Callable[..., Cache], tmp_path: Path) -> Fleet:
    cache = make_cache(host_pages=(MAX_RETIRED + 4) * pages_of_random_adapter())
    for name, seed in (("used", 1), ("unused", 2), ("org/deep", 3)):
        write_adapter(tmp_path / "loras" / name, adapter_tensors(cache.config.modules, 4, seed))
    return Fleet(cache, tmp_path / "loras")


def swap_names(old: Path, new: Path) -> None:
    old.rename(old.with_name("old"))
    new.rename(old)


def remove_first(old: Path, new: Path) -> None:
    shutil.rmtree(old)
    shutil.copytree(new, old)


@pytest.mark.parametrize("replace", [swap_names, remove_first])
def test_another_directory_in_its_place_is_the_one_from_then_on(
    fleet: Fleet, tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    started = fleet.begin("used")
    fleet.check(started, 1)
    for name, seed in (("used", 11), ("unused", 12), ("new", 13)):
        fleet.write(name, seed, tmp_path / "next")
    replace(fleet.directory, tmp_path / "next")
    for name, seed in (("used", 11), ("unused", 12), ("new", 13), ("used", 11)):
        fleet.ask(name, seed)
    with pytest.raises(AdapterNotFoundError, match="lora_dir"):
        fleet.manager.task_id("org/deep")
    assert set(fleet.manager.names) == {"used", "unused", "new"}
    fleet.check(started, 1)
    assert [info.name for info in fleet.manager.retired()] == ["used"]
    fleet.manager.release(started)
    assert fleet.manager.retired() == ()


def test_a_link_that_is_led_elsewhere_is_another_directory(
    small_cache: Cache, tmp_path: Path
) -> None:
    tensors = {seed: adapter_tensors(small_cache.config.modules, 4, seed) for seed in (1, 11)}
    for seed, version in ((1, "v1"), (11, "v2")):
        write_adapter(tmp_path / version / "used", tensors[seed])
    write_adapter(tmp_path / "v2" / "new", tensors[11])
    link = tmp_path / "current"
    link.symlink_to("v1")
    fleet = Fleet(small_cache, link)
    started = fleet.begin("used")
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").rename(link)
    fleet.ask("used", 11)
    fleet.ask("new", 11)
    fleet.evict(started)
    add_and_wait(fleet.peft, started)
    fleet.check(started, 1)


def test_a_request_that_has_the_old_files_reads_them_again_where_they_went(
    fleet: Fleet, tmp_path: Path
) -> None:
    started = fleet.begin("used")
    fleet.write("used", 11, tmp_path / "next")
    swap_names(fleet.directory, tmp_path / "next")
    fleet.ask("used", 11)
    fleet.evict(started)
    add_and_wait(fleet.peft, started)
    fleet.check(started, 1)


def test_a_request_whose_old_files_are_gone_is_told_what_works(
    fleet: Fleet, tmp_path: Path
) -> None:
    """L6: for that task only."""
    started, other = fleet.begin("used"), fleet.begin("unused")
    fleet.manager.load("used")  # its content is known: the digest's reader says the same
    for name in ("used", "unused"):
        fleet.write(name, 11, tmp_path / "next")
    remove_first(fleet.directory, tmp_path / "next")
    fleet.evict(started)
    with pytest.raises(AdapterSourceChangedError) as caught:
        add_and_wait(fleet.peft, started)
    assert caught.value.path == str(fleet.directory / "used" / WEIGHTS_FILE)
    for words in ("was replaced", "reload()", "unload() and load()", "next request"):
        assert words in str(caught.value)
    fleet.check(other, 2)
    fleet.ask("used", 11)


@pytest.mark.parametrize("confined", ["adapter_root", "nowhere"])
def test_a_registered_adapter_below_a_replaced_directory_is_told_the_same(
    small_cache: Cache, tmp_path: Path, confined: str
) -> None:
    root = tmp_path / "root"
    tensors = adapter_tensors(small_cache.config.modules, 4, 1)
    options: Any = {"adapter_root": root} if confined == "adapter_root" else {}
    write_adapter(root / "a", tensors)
    manager = LoraManager(small_cache.config, small_cache.peft, **options)
    manager.register("a", root / "a")
    shutil.copytree(root, tmp_path / "next")
    remove_first(root, tmp_path / "next")
    for _ in range(2):
        with pytest.raises(AdapterSourceChangedError, match=r"reload\(\), or unload\(\) and load"):
            manager.load("a")
        request = LlmRequest(1, lora_task_id=manager.task_id("a"))
        with pytest.raises(AdapterSourceChangedError, match=r"reload\(\), or unload\(\) and load"):
            add_and_wait(small_cache.peft, request)
    shutil.rmtree(root)
    with pytest.raises(AdapterNotFoundError):
        manager.load("a")


def rewrite(fleet: Fleet) -> None:
    """In place, with the old times and size."""
    new = fleet.write("other", 11) / WEIGHTS_FILE
    path = fleet.directory / "used" / WEIGHTS_FILE
    before = path.stat()
    with path.open("r+b") as file:
        file.write(new.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_directory(fleet: Fleet) -> None:
    new = fleet.write("other", 11)
    (fleet.directory / "used").rename(fleet.directory.parent / "used")
    new.rename(fleet.directory / "used")


def replace_by_link(fleet: Fleet) -> None:
    fleet.write("versions/2", 11)
    shutil.rmtree(fleet.directory / "used")
    (fleet.directory / "used").symlink_to("versions/2")


CHANGES = {"in place": rewrite, "directory": replace_directory, "link": replace_by_link}


@pytest.mark.parametrize("change", CHANGES)
def test_new_requests_get_new_files_and_started_ones_keep_theirs(fleet: Fleet, change: str) -> None:
    started = fleet.begin("used")
    first = fleet.manager.load("used").generation
    CHANGES[change](fleet)
    fleet.ask("used", 11)
    fleet.check(started, 1)
    assert fleet.manager.load("used").generation not in (None, first)
    assert fleet.manager.get("used").task_id == fleet.manager.task_id("used")
    fleet.manager.release(started)
    fleet.evict()
    fleet.ask("used", 11)
    assert len(fleet.manager) == 1


def test_another_configuration_is_other_files(fleet: Fleet) -> None:
    fleet.ask("used", 1)
    path = fleet.directory / "used" / CONFIG_FILE
    before = fleet.manager.get("used").scales
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 80}))
    fleet.ask("used", 1)
    after = fleet.manager.get("used").scales
    assert all(after[name] == 20 != scale for name, scale in before.items())


def test_files_that_stay_are_only_looked_at(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.ask("used", 1)
    task_id = fleet.manager.task_id("used")
    parse = fleet.manager._parts.parse
    monkeypatch.setattr(type(fleet.manager._parts), "parse", lambda *_: pytest.fail("parsed"))
    for _ in range(3):
        fleet.ask("used", 1)
    assert fleet.manager.task_id("used") == task_id
    assert callable(parse)


def test_what_is_gone_is_served_as_long_as_it_is_resident(fleet: Fleet) -> None:
    fleet.ask("used", 1)
    shutil.rmtree(fleet.directory)
    fleet.ask("used", 1)
    fleet.evict()
    with pytest.raises(AdapterNotFoundError):
        fleet.begin("used")
    fleet.write("used", 11)
    fleet.ask("used", 11)


def test_half_of_a_copy_is_waited_for_and_a_broken_one_is_refused(fleet: Fleet) -> None:
    """Promise 4, and a failed call changes nothing."""
    started = fleet.begin("used")
    task_id, directory = started.lora_task_id, fleet.directory / "used"
    (directory / WEIGHTS_FILE).unlink()
    (directory / CONFIG_FILE).write_text("{")
    fleet.ask("used", 1)  # no weights yet: no adapter
    (directory / WEIGHTS_FILE).write_bytes(b"half")
    for call in (fleet.begin, fleet.manager.task_id, fleet.manager.load, fleet.manager.pin):
        with pytest.raises(AdapterFormatError):
            call("used")
    assert fleet.manager.get("used").task_id == task_id
    fleet.check(started, 1)
    fleet.ask("unused", 2)
    fleet.write("used", 11)
    fleet.ask("used", 11)
    fleet.peft.check_invariants()


def test_a_pinned_name_has_its_new_files_pinned(fleet: Fleet) -> None:
    fleet.manager.pin("used")
    old = fleet.manager.task_id("used")
    replace_directory(fleet)
    new = fleet.manager.task_id("used")
    assert new != old
    assert fleet.peft.is_task_cached(new)
    assert not fleet.peft.is_task_cached(old)
    fleet.evict()
    assert fleet.peft.is_task_cached(new)
    fleet.manager.unpin("used")
    fleet.evict()
    assert fleet.peft.resident_tasks("host") == 0


def test_as_many_replacements_as_may_be_retired_are_in_use_at_once(fleet: Fleet) -> None:
    requests = []
    for seed in range(MAX_RETIRED + 1):
        fleet.write("used", seed)
        requests.append(fleet.begin("used"))
    fleet.write("used", 99)
    with pytest.raises(AdapterInUseError):
        fleet.begin("used")
    for seed, request in enumerate(requests):
        fleet.check(request, seed)
    fleet.manager.release(requests[0])
    fleet.ask("used", 99)


def test_threads_that_notice_at_once_make_one_generation(fleet: Fleet) -> None:
    fleet.ask("used", 1)
    replace_directory(fleet)
    calls = [Call(fleet.manager.task_id, "used") for _ in range(8)]
    assert {call.result() for call in calls} == {fleet.manager.task_id("used")}
    fleet.ask("used", 11)
    assert fleet.manager.retired() == ()


def test_what_a_reload_says_stays_until_it_is_said_otherwise(fleet: Fleet, tmp_path: Path) -> None:
    elsewhere = fleet.write("b", 21, tmp_path)
    fleet.ask("used", 1)
    fleet.manager.reload("used", elsewhere)
    fleet.write("used", 11)
    fleet.ask("used", 21)
    fleet.manager.reload("used", fleet.directory / "used")
    fleet.ask("used", 11)
    fleet.write("used", 12)
    fleet.ask("used", 12)


def test_unloading_and_asking_again_finds_the_new_files(fleet: Fleet) -> None:
    fleet.ask("used", 1)
    replace_directory(fleet)
    fleet.manager.unload("used")
    fleet.ask("used", 11)


def test_an_engine_answers_new_requests_with_new_files(tmp_path: Path) -> None:
    directory = tmp_path / "loras"
    for seed, path in enumerate((directory, tmp_path / "next")):
        save_adapter(path / "a", "llama", 8, ["q_proj", "o_proj"], seed=seed)
    with LLM(
        build_tiny_model("llama"),
        lora_config=LoraConfig(lora_dir=directory),
        kv_cache_config=KvCacheConfig(num_blocks=32, block_size=4),
    ) as llm:
        first = tokens_of(llm.generate([[1, 2, 3]], GREEDY, "a"))
        llm.load_lora("next", tmp_path / "next" / "a")
        second = tokens_of(llm.generate([[1, 2, 3]], GREEDY, "next"))
        assert first != second
        swap_names(directory, tmp_path / "next")
        assert tokens_of(llm.generate([[1, 2, 3]], GREEDY, "a")) == second
