"""What tests of names and generations have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    Tensors,
    Weights,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache

from pagedlora import PeftTaskNotCachedError, _core

RANK = 4


def tensors_of(cache: Cache, seed: int = 1, rank: int = RANK) -> Tensors:
    """The tensors of an adapter of all modules."""
    return adapter_tensors(cache.config.modules, rank, seed)


def weights(cache: Cache, seed: int) -> Weights:
    """The same as a float32 cache has them."""
    return weights_of(tensors_of(cache, seed), torch.float32)


def write(cache: Cache, directory: Path, seed: int = 1, rank: int = RANK, **fields: Any) -> Path:
    """Writes that adapter; returns the directory."""
    return write_adapter(directory, tensors_of(cache, seed, rank), **fields)


def assert_bytes(cache: Cache, task_id: int, seed: int) -> None:
    """Fails unless the host copy of a task is the adapter of that seed."""
    assert_same_weights(cache.peft.task_weights(task_id, "host"), weights(cache, seed))


def is_known(cache: Cache, task_id: int) -> bool:
    """Whether the cache knows the task."""
    try:
        cache.peft.core.num_pages_of_task(task_id)
    except PeftTaskNotCachedError:
        return False
    return True


def is_kept(cache: Cache, name: str) -> bool:
    """Whether the adapter survives the eviction of all that has no owner and no pin."""
    cache.peft.evict_unowned("host")
    return cache.adapters.get(name).tiers != ()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, _core.FakeSource]]:
    """What the core reads weights files through from now on, by directory."""
    made: dict[str, _core.FakeSource] = {}

    def open_fake(path: str, root: _core.AdapterRoot | None = None) -> _core.FakeSource:
        assert root is None
        content = Path(path).read_bytes()
        return made.setdefault(str(Path(path).parent), _core.FakeSource(content, path))

    monkeypatch.setattr(_core, "open_file_source", open_fake)
    yield made
    for source in made.values():
        source.release_reads()
