"""Scenarios of the system that this one follows, on its small model and its adapter.

Contents, owners, flags and errors are as there. Pages and slots are ours, sizes of entries count
features (there they count numbers), and what nobody added cannot be paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.adapters import (
    assert_same_weights,
    layered_modules,
    read_matrix,
    same_bits,
)
from tests.support.cache_fixtures import add_and_wait, check_pages
from tests.support.packed_adapters import ROWS, pack, packed_model, reference_matrices

from pagedlora import (
    AdapterWeights,
    InvalidArgumentError,
    LlmRequest,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    PeftTaskNotCachedError,
)
from pagedlora.cache_budgets import cache_budgets
from pagedlora.engine.dtypes import to_core_dtype

MakeManager = Callable[..., PeftCacheManager]

TASK = 1234


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """Caches for 2048 and 1472 module layers, checked at teardown."""
    made: list[PeftCacheManager] = []

    def make(dtype: torch.dtype = torch.float32) -> PeftCacheManager:
        config = PeftCacheConfig(
            num_host_module_layer=2048,
            num_device_module_layer=1472,
            optimal_adapter_size=8,
            max_adapter_size=64,
            max_pages_per_block_host=8,
            max_pages_per_block_device=8,
        )
        made.append(PeftCacheManager(packed_model(dtype), config))
        return made[-1]

    yield make
    for manager in made:
        check_pages(manager)
        manager.close()
        check_pages(manager)


@pytest.fixture
def manager(make_manager: MakeManager) -> PeftCacheManager:
    return make_manager()


def sender(
    manager: PeftCacheManager, request_id: int, task_id: int, *, columns: int = 4, seed: int = 1
) -> LlmRequest:
    """A request that carries the reference's adapter."""
    model = manager.model_config
    dtype = getattr(torch, model.dtype.name)
    packed = pack(model, reference_matrices(model, seed, dtype), columns=columns)
    return LlmRequest(request_id, task_id, AdapterWeights.from_packed(*packed, model))


# ---- requests with and without weights ---------------------------------------------------------


def test_a_request_without_an_adapter_is_welcome(manager: PeftCacheManager) -> None:
    add_and_wait(manager, LlmRequest(0))
    assert (manager.active_tasks, manager.paused_tasks) == ({}, {})


def test_a_missing_task_asks_for_its_weights(manager: PeftCacheManager) -> None:
    with pytest.raises(PeftTaskNotCachedError, match=r"1234.*send its weights with the request"):
        add_and_wait(manager, LlmRequest(1, TASK))
    assert not manager.is_task_cached(TASK)
    assert manager.active_tasks == {}
    add_and_wait(manager, sender(manager, 1, TASK))
    assert manager.active_tasks == {TASK: {1}}
    add_and_wait(manager, LlmRequest(2, TASK))  # the weights are there now
    assert manager.active_tasks == {TASK: {1, 2}}


@pytest.mark.parametrize("columns", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_put_and_get(make_manager: MakeManager, dtype: torch.dtype, columns: int) -> None:
    manager = make_manager(dtype)
    request = sender(manager, 1, TASK, columns=columns)
    add_and_wait(manager, request)
    lease, requests_of_task = manager.ensure_batch_map_task_id([request], [])
    assert requests_of_task == {TASK: [1]}
    entries = {(entry.module_id, entry.layer_id): entry for entry in lease[1]}
    assert len(lease[1]) == len(entries) == ROWS == 26

    matrices = reference_matrices(manager.model_config, dtype=dtype)
    base, size = manager.core.pool_range("device")
    for module in manager.model_config.modules:
        a, b = matrices[module.name]
        entry = entries[module.module_id, module.layer_id]
        assert entry.module_name == module.name
        assert (entry.adapter_size, entry.in_size) == tuple(a.shape)
        assert (entry.out_size, entry.adapter_size) == tuple(b.shape)
        assert (entry.in_offset, entry.out_offset, entry.scale) == (0, 0, 1.0)
        for pointer, matrix in ((entry.weights_in_pointer, a), (entry.weights_out_pointer, b)):
            assert base <= pointer < pointer + matrix.nbytes <= base + size
            assert same_bits(read_matrix(pointer, tuple(matrix.shape), dtype), matrix)
    for tier in ("host", "device"):
        assert_same_weights(manager.task_weights(TASK, tier), matrices)


# ---- owners ------------------------------------------------------------------------------------


def flags(manager: PeftCacheManager) -> tuple[bool, bool, bool]:
    """Of the task: whether the host tier has it, and whether it is done there and on the device."""
    return (
        manager.is_task_cached(TASK),
        manager.is_task_done(TASK),
        manager.is_task_done_device(TASK),
    )


def test_owners_of_one_request(manager: PeftCacheManager) -> None:
    other = sender(manager, 1, 0)
    for pause in (False, True):
        manager.mark_request_done(other, pause=pause)
        assert (manager.active_tasks, manager.paused_tasks) == ({}, {})  # it owns nothing yet
    add_and_wait(manager, other)
    manager.mark_request_done(other, pause=True)
    assert (manager.active_tasks, manager.paused_tasks) == ({}, {0: {1}})
    for _ in range(2):
        add_and_wait(manager, other)
        assert (manager.active_tasks, manager.paused_tasks) == ({0: {1}}, {})


def test_owners_of_one_task_that_pause_and_end(manager: PeftCacheManager) -> None:
    bystander, first = sender(manager, 1, 0), sender(manager, 12345, TASK, seed=2)
    second = LlmRequest(54321, TASK)
    add_and_wait(manager, bystander)
    add_and_wait(manager, first)
    assert (manager.active_tasks, manager.paused_tasks) == ({0: {1}, TASK: {12345}}, {})
    assert flags(manager)[1:] == (False, False)
    add_and_wait(manager, second)
    assert (manager.active_tasks, manager.paused_tasks) == ({0: {1}, TASK: {12345, 54321}}, {})
    assert flags(manager)[1:] == (False, False)
    manager.ensure_batch([first], []).close()
    assert manager.active_tasks == {0: {1}, TASK: {12345, 54321}}
    assert flags(manager) == (True, False, False)

    manager.mark_request_done(second, pause=True)
    assert manager.active_tasks == {0: {1}, TASK: {12345}}
    assert manager.paused_tasks == {TASK: {54321}}
    assert flags(manager) == (True, False, False)

    manager.mark_request_done(first, pause=True)
    assert manager.active_tasks == {0: {1}}
    assert manager.paused_tasks == {TASK: {12345, 54321}}
    assert flags(manager) == (True, False, True)

    manager.mark_request_done(first)
    assert (manager.active_tasks, manager.paused_tasks) == ({0: {1}}, {TASK: {54321}})
    assert flags(manager) == (True, False, True)

    manager.mark_request_done(second)
    assert (manager.active_tasks, manager.paused_tasks) == ({0: {1}}, {})
    assert flags(manager) == (True, True, True)
    assert not manager.is_task_done(0)
    assert not manager.is_task_done_device(0)


# ---- sizes -------------------------------------------------------------------------------------


def model_of(dtype: torch.dtype, smallest: int, largest: int) -> LoraModelConfig:
    """Two modules with so many features, in and out together."""
    shapes = {"small": (smallest // 2, smallest // 2), "large": (largest // 4, largest * 3 // 4)}
    return LoraModelConfig(layered_modules(1, shapes), to_core_dtype(dtype), 64)


def test_module_layers_are_the_same_bytes_as_there() -> None:
    slot_bytes = 256 * 2  # a slot there has the size of the smallest module's rank
    model = model_of(torch.float16, smallest=256, largest=1024)
    config = PeftCacheConfig(num_host_module_layer=65536, num_device_module_layer=16584)
    assert cache_budgets(config, model, 0) == (262144 * slot_bytes, 66336 * slot_bytes)
    config = PeftCacheConfig(host_cache_size=100_000, num_device_module_layer=16584)
    host, device = cache_budgets(config, model, 0)
    assert (host // slot_bytes, device) == (195, 66336 * slot_bytes)


def test_module_layers_are_not_rounded_up_to_whole_slots() -> None:
    slot_bytes = 384 * 4
    model = model_of(torch.float32, smallest=384, largest=4096)
    config = PeftCacheConfig(
        host_cache_size=100_000, num_host_module_layer=0, num_device_module_layer=16584
    )
    host, device = cache_budgets(config, model, 0)
    assert host // slot_bytes == 65
    assert device == 16584 * 4096 * 4
    assert 16584 * 10 < device // slot_bytes < 16584 * 11 == 182424


def test_pages_of_a_given_size_round_down() -> None:
    page = 288 * 24 * 4  # slots, numbers of a slot, bytes: a page of this model, split in two
    sizes = {"page_size": page, "max_pages_per_block_device": 8, "optimal_adapter_size": 8}
    counted = PeftCacheManager(
        packed_model(),
        PeftCacheConfig(num_host_module_layer=65536, num_device_module_layer=16584, **sizes),
    )
    assert counted.max_host_pages == 65536 * (16 + 48) * 4 // page == 606
    assert counted.max_device_pages == 16584 * (16 + 48) * 4 // page == 153
    in_bytes = PeftCacheManager(
        packed_model(),
        PeftCacheConfig(
            host_cache_size=100_000_000,
            num_device_module_layer=16584,
            max_adapter_size=8,
            max_pages_per_block_host=4,
            **sizes,
        ),
    )
    assert in_bytes.max_host_pages == 3616  # 3617 there, over the budget
    assert in_bytes.max_device_pages == 153


def test_a_tier_without_room_for_the_largest_adapter_is_refused() -> None:
    largest = 64 * 2 * 528 * 4  # ranks, layers, features of a layer's modules, bytes
    room = PeftCacheConfig(
        host_cache_size=largest, device_cache_size=largest, page_size=1024, max_adapter_size=64
    )
    PeftCacheManager(packed_model(), room)
    for tier in ("host", "device"):
        small = room.model_copy(update={f"{tier}_cache_size": largest - 1})
        with pytest.raises(InvalidArgumentError, match=f"the {tier} cache .* rank 64"):
            PeftCacheManager(packed_model(), small)


# ---- the manager as Python sees it -------------------------------------------------------------


def test_the_python_manager(make_manager: MakeManager) -> None:
    manager = make_manager(torch.float16)
    assert manager.max_host_pages >= 1
    assert manager.max_device_pages >= 1
    empty = manager.ensure_batch([], [])
    assert (dict(empty), len(empty), empty.errors) == ({}, 0, {})
    with pytest.raises(PeftTaskNotCachedError):
        add_and_wait(manager, LlmRequest(0, 0))
    request = sender(manager, 1, 1)
    add_and_wait(manager, request)
    lease = manager.ensure_batch([request], [])
    assert list(lease) == [1]
    assert len(lease[1]) == 26
    assert not lease.errors
    assert not empty.is_open
