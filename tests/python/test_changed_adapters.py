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

from pagedlora import AdapterNotFoundError, AdapterSourceChangedError


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
