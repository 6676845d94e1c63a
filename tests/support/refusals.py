"""Adapters that must be refused, and what must be left behind then: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.adapters import (
    Tensors,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import PagedLoraError

Q = "base_model.model.model.layers.0.self_attn.q_proj"  # 48 -> 64
Q_A, Q_B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"


def good_tensors(cache: Cache, rank: int = 4) -> Tensors:
    return adapter_tensors(cache.config.modules, rank, seed=1)


def refuse(cache: Cache, directory: Path, error: type[PagedLoraError]) -> PagedLoraError:
    """Registers, expects the error, and that nothing is left and a good adapter still works."""
    with pytest.raises(error) as caught:
        cache.adapters.register("a", directory)
    assert type(caught.value) is error
    assert len(cache.adapters) == 0
    cache.peft.check_invariants()
    tensors = good_tensors(cache)
    cache.adapters.register("a", write_adapter(directory.parent / "good", tensors))
    request = cache.request(1, "a")
    add_and_wait(cache.peft, request)
    actual = cache.peft.task_weights(request.lora_task_id, "host")
    assert_same_weights(actual, weights_of(tensors, torch.float32))
    return caught.value
