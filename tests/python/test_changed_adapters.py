"""Files that change after registration: only the requests of that adapter fail."""

from __future__ import annotations

import json
import os
import shutil
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

from pagedlora import AdapterNotFoundError, AdapterSourceChangedError, _core


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def rewrite(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


CHANGES = {
    "truncated": (truncate, AdapterSourceChangedError),
    "rewritten": (rewrite, AdapterSourceChangedError),
    "replaced": (replace, AdapterSourceChangedError),
    "grown": (lambda path: os.truncate(path, 10**6), AdapterSourceChangedError),
    "deleted": (Path.unlink, AdapterNotFoundError),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_changed_after_registration_fails_its_own_requests_only(
    small_cache: Cache, tmp_path: Path, change: str
) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 4, seed=1)
    bad, good = (write_adapter(tmp_path / name, tensors) for name in ("bad", "good"))
    cache, peft = small_cache, small_cache.peft
    for name, directory in (("bad", bad), ("good", good)):
        cache.adapters.register(name, directory)
    add_and_wait(peft, cache.request(1, "good"))
    apply, expected = CHANGES[change]
    apply(bad / WEIGHTS_FILE)
    for attempt in range(2):
        with pytest.raises(expected) as caught:
            add_and_wait(peft, cache.request(2, "bad"))
        assert str(bad / WEIGHTS_FILE) in str(caught.value)
        assert peft.active_tasks == {cache.adapters.task_id("good"): {1}}
        assert not peft.is_task_cached(cache.adapters.task_id("bad"))
        assert peft.stats.failed_loads == attempt + 1
        peft.check_invariants()
    lease = peft.ensure_batch([cache.request(1, "good"), cache.request(2, "bad")], [])
    assert set(lease) == {1}
    assert set(lease.errors) == {2}
    cache.adapters.register("again", write_adapter(bad, tensors))
    add_and_wait(peft, cache.request(3, "again"))
    actual = peft.task_weights(cache.adapters.task_id("again"), "host")
    assert_same_weights(actual, weights_of(tensors, torch.float32))


def test_a_resident_adapter_does_not_need_its_file(small_cache: Cache, tmp_path: Path) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 4, seed=1)
    directory = write_adapter(tmp_path, tensors)
    small_cache.adapters.register("a", directory)
    add_and_wait(small_cache.peft, small_cache.request(1, "a"))
    shutil.rmtree(directory)
    add_and_wait(small_cache.peft, small_cache.request(2, "a"))
    small_cache.peft.ensure_batch([small_cache.request(2, "a")], [])
    actual = small_cache.peft.task_weights(small_cache.adapters.task_id("a"))
    assert_same_weights(actual, weights_of(tensors, torch.float32))


def test_a_changed_configuration_changes_nothing_that_is_registered(
    small_cache: Cache, tmp_path: Path
) -> None:
    directory = write_adapter(
        tmp_path, adapter_tensors(small_cache.config.modules, 4, seed=1), lora_alpha=8
    )
    small_cache.adapters.register("a", directory)
    fields = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps({**fields, "lora_alpha": 80}))
    request = small_cache.request(1, "a")
    add_and_wait(small_cache.peft, request)
    entries = small_cache.peft.ensure_batch([request], [])[1]
    assert {entry.scale for entry in entries} == {2.0}


def change_unseen(path: Path) -> None:
    """One byte in place, with the old size and modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("is_identified", [False, True], ids=["registered", "loaded"])
def test_evicted_everywhere_then_changed_fails_at_the_next_use_and_alone(
    small_cache: Cache, tmp_path: Path, is_identified: bool
) -> None:
    """L6. It was read rightly before; the next read is refused, in the cache and for its digest."""
    manager, peft = small_cache.adapters, small_cache.peft
    tensors = {
        name: adapter_tensors(small_cache.config.modules, 4, seed)
        for seed, name in enumerate(("bad", "good"))
    }
    for name, content in tensors.items():
        directory = write_adapter(tmp_path / name, content)
        info = (manager.load if is_identified else manager.register)(name, directory)
        assert (info.generation is not None) == is_identified
    requests = [small_cache.request(number, name) for number, name in enumerate(tensors)]
    for request in requests:
        add_and_wait(peft, request)
    peft.ensure_batch(requests, []).close()
    for request in requests:
        peft.mark_request_done(request)
    for tier in ("host", "device"):
        peft.evict_unowned(tier)
    assert peft.resident_tasks("host") == peft.resident_tasks("device") == 0

    change_unseen(tmp_path / "bad" / WEIGHTS_FILE)
    for request in requests:
        peft.add_request_peft(request)
    lease = peft.ensure_batch(requests, [])
    assert (set(lease), set(lease.errors)) == ({1}, {0})
    assert isinstance(lease.errors[0], AdapterSourceChangedError)
    lease.close()
    actual = peft.task_weights(manager.task_id("good"), "host")
    assert_same_weights(actual, weights_of(tensors["good"], torch.float32))
    with pytest.raises(AdapterSourceChangedError):
        manager.load("bad")
    before = manager.get("bad").generation
    after = manager.reload("bad", tmp_path / "bad")
    assert after.generation not in (None, before)
    assert after.generation != manager.load("good").generation
    for request in requests:
        peft.mark_request_done(request)
    add_and_wait(peft, small_cache.request(2, "bad"))


def test_one_changed_byte_anywhere_in_the_tensors_changes_the_generation(
    small_cache: Cache, tmp_path: Path
) -> None:
    tensors = adapter_tensors(small_cache.config.modules[:2], 2, seed=1)
    manager = small_cache.adapters
    generations = {manager.load("as it was", write_adapter(tmp_path / "0", tensors)).generation}
    content = (tmp_path / "0" / WEIGHTS_FILE).read_bytes()
    headers = _core.read_safetensors_header(
        _core.open_file_source(str(tmp_path / "0" / WEIGHTS_FILE))
    )
    ends = [(header.offset, header.offset + header.num_bytes - 1) for header in headers]
    offsets = [offset for pair in ends for offset in pair]
    for offset in offsets:
        changed = bytearray(content)
        changed[offset] ^= 1
        directory = write_adapter(tmp_path / str(offset), tensors)
        (directory / WEIGHTS_FILE).write_bytes(changed)
        generations.add(manager.load(f"byte {offset}", directory).generation)
    assert None not in generations
    assert len(generations) == 1 + len(offsets) == 9
