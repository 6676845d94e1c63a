"""What callers of PeftCacheManager rely on: owners, residency, leases and errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    adapter_config,
    adapter_tensors,
    assert_same_weights,
    weights_of,
)
from tests.support.cache_fixtures import (
    Cache,
    add_and_wait,
    carried_weights,
    model_config,
    pages_of_random_adapter,
    register_adapters,
)

from pagedlora import (
    AdapterTooLargeError,
    AdapterWeights,
    InvalidArgumentError,
    LlmRequest,
    LoraCacheFullError,
    PeftCacheConfig,
    PeftCacheManager,
    PeftTaskNotCachedError,
    RequestConflictError,
)

MakeCache = Callable[..., Cache]


# ---- owners ------------------------------------------------------------------------------------


def test_ownership_walk_of_two_requests_of_one_task(small_cache: Cache) -> None:
    peft = small_cache.peft
    other = LlmRequest(1, lora_task_id=0, lora_weights=carried_weights(9))
    peft.mark_request_done(other)
    peft.mark_request_done(other, pause=True)
    assert (peft.active_tasks, peft.paused_tasks) == ({}, {})  # no phantom owners
    for _ in range(2):
        add_and_wait(peft, other)
        assert (peft.active_tasks, peft.paused_tasks) == ({0: {1}}, {})

    sender = LlmRequest(12345, lora_task_id=1234, lora_weights=carried_weights(1))
    follower = LlmRequest(54321, lora_task_id=1234)
    add_and_wait(peft, sender)
    add_and_wait(peft, follower)
    assert peft.active_tasks == {0: {1}, 1234: {12345, 54321}}
    peft.ensure_batch([sender], []).close()

    peft.mark_request_done(follower, pause=True)
    assert (peft.active_tasks[1234], peft.paused_tasks) == ({12345}, {1234: {54321}})
    assert peft.is_task_cached(1234)
    assert not peft.is_task_done(1234)
    assert not peft.is_task_done_device(1234)

    peft.mark_request_done(sender, pause=True)
    assert (peft.active_tasks, peft.paused_tasks) == ({0: {1}}, {1234: {12345, 54321}})
    assert not peft.is_task_done(1234)
    assert peft.is_task_done_device(1234)

    peft.mark_request_done(sender)
    assert peft.paused_tasks == {1234: {54321}}
    assert not peft.is_task_done(1234)
    assert peft.is_task_done_device(1234)

    peft.free_resources(follower)
    assert peft.paused_tasks == {}
    assert peft.is_task_cached(1234)
    assert peft.is_task_done(1234)
    assert peft.is_task_done_device(1234)
    assert peft.active_tasks == {0: {1}}


def test_resume_moves_a_paused_request_back(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a")
    peft, request = small_cache.peft, small_cache.request(7, "a")
    add_and_wait(peft, request)
    peft.mark_request_done(request, pause=True)
    peft.mark_request_done(request, pause=True)
    assert (peft.active_tasks, peft.paused_tasks) == ({}, {request.lora_task_id: {7}})
    add_and_wait(peft, request)
    assert (peft.active_tasks, peft.paused_tasks) == ({request.lora_task_id: {7}}, {})


def test_base_requests_make_no_call(small_cache: Cache) -> None:
    peft, base = small_cache.peft, LlmRequest(3)
    add_and_wait(peft, base)
    peft.mark_request_done(base, pause=True)
    peft.free_resources(base)
    lease = peft.ensure_batch([base], [LlmRequest(4)])
    assert (len(lease), dict(lease), lease.errors) == (0, {}, {})
    assert peft.determine_num_pages(base) == 0
    assert (peft.active_tasks, peft.paused_tasks) == ({}, {})
    assert peft.stats.host.misses == peft.stats.device.misses == 0


def test_a_live_request_cannot_change_its_task(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a", "b")
    peft = small_cache.peft
    add_and_wait(peft, small_cache.request(1, "a"))
    with pytest.raises(RequestConflictError):
        add_and_wait(peft, small_cache.request(1, "b"))
    assert peft.active_tasks == {small_cache.adapters.task_id("a"): {1}}
    assert not peft.is_task_cached(small_cache.adapters.task_id("b"))


def test_a_finished_id_may_come_back_with_another_task(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a", "b")
    peft = small_cache.peft
    add_and_wait(peft, small_cache.request(1, "a"))
    peft.mark_request_done(small_cache.request(1, "a"))
    add_and_wait(peft, small_cache.request(1, "b"))
    assert peft.active_tasks == {small_cache.adapters.task_id("b"): {1}}


# ---- tasks without a source --------------------------------------------------------------------


@pytest.mark.parametrize("task", [0, 1, 2**31, 2**32 - 1, 2**64 - 1])
def test_an_unknown_task_is_that_requests_error_alone(small_cache: Cache, task: int) -> None:
    peft = small_cache.peft
    with pytest.raises(PeftTaskNotCachedError) as caught:
        add_and_wait(peft, LlmRequest(1, lora_task_id=task))
    assert caught.value.task_id == task
    assert isinstance(caught.value, KeyError)
    with pytest.raises(PeftTaskNotCachedError):
        peft.determine_num_pages(LlmRequest(1, lora_task_id=task))
    with pytest.raises(PeftTaskNotCachedError):
        peft.task_weights(task, "host")
    assert not peft.is_task_cached(task)
    assert not peft.is_task_cached_device(task)
    assert peft.is_task_done(task)
    assert peft.active_tasks == {}


def test_carried_weights_live_until_they_are_evicted_unowned(small_cache: Cache) -> None:
    peft, weights = small_cache.peft, carried_weights(5)
    request = LlmRequest(1, lora_task_id=0, lora_weights=weights)
    add_and_wait(peft, request)
    tensors = adapter_tensors(small_cache.config.modules, 4, 5)
    assert_same_weights(peft.task_weights(0, "host"), weights_of(tensors, torch.float32))
    peft.mark_request_done(request)
    add_and_wait(peft, LlmRequest(2, lora_task_id=0))  # still cached: no need to send again
    peft.evict_unowned("host")
    assert peft.is_task_cached(0)
    peft.mark_request_done(LlmRequest(2, lora_task_id=0))
    peft.evict_unowned("host")
    with pytest.raises(PeftTaskNotCachedError):
        add_and_wait(peft, LlmRequest(3, lora_task_id=0))
    add_and_wait(peft, LlmRequest(3, lora_task_id=0, lora_weights=weights))
    assert_same_weights(peft.task_weights(0, "host"), weights_of(tensors, torch.float32))


def test_carried_weights_survive_their_tensors(small_cache: Cache) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 3, 1)
    expected = weights_of({name: t.clone() for name, t in tensors.items()}, torch.float32)
    request = LlmRequest(1, 0, AdapterWeights.from_tensors(tensors, adapter_config(tensors)))
    for tensor in tensors.values():
        tensor.zero_()
    add_and_wait(small_cache.peft, request)
    request.lora_weights = None
    gc.collect()
    assert_same_weights(small_cache.peft.task_weights(0, "host"), expected)


def test_carried_weights_of_mixed_types_at_odd_offsets(make_cache: MakeCache) -> None:
    cache = make_cache(shapes={"a": (5, 7), "b": (7, 3)}, num_layers=3)
    tensors = adapter_tensors(cache.config.modules, 3, 1)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for position, name in enumerate(tensors):
        tensors[name] = tensors[name].to(dtypes[position % 3])
    weights = AdapterWeights.from_tensors(tensors, adapter_config(tensors))
    add_and_wait(cache.peft, LlmRequest(1, 0, weights))
    assert_same_weights(cache.peft.task_weights(0, "host"), weights_of(tensors, torch.float32))


def test_other_weights_under_a_live_id_are_refused(small_cache: Cache, tmp_path: Path) -> None:
    peft = small_cache.peft
    add_and_wait(peft, LlmRequest(1, 0, carried_weights(1)))
    add_and_wait(peft, LlmRequest(2, 0, carried_weights(1)))  # the same content again
    with pytest.raises(RequestConflictError):
        add_and_wait(peft, LlmRequest(3, 0, carried_weights(2)))
    assert peft.active_tasks == {0: {1, 2}}
    for request in (1, 2):
        peft.mark_request_done(LlmRequest(request, 0))
    add_and_wait(peft, LlmRequest(3, 0, carried_weights(2)))
    expected = weights_of(adapter_tensors(small_cache.config.modules, 4, 2), torch.float32)
    assert_same_weights(peft.task_weights(0, "host"), expected)

    register_adapters(small_cache, tmp_path, "a")
    with pytest.raises(RequestConflictError):
        add_and_wait(peft, LlmRequest(4, small_cache.adapters.task_id("a"), carried_weights(1)))


# ---- full tiers --------------------------------------------------------------------------------


def test_a_full_host_tier_says_its_numbers_and_changes_nothing(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    pages = pages_of_random_adapter()
    cache = make_cache(host_pages=2 * pages + 1, device_pages=3 * pages)
    register_adapters(cache, tmp_path, "a", "b", "c", "d")
    peft = cache.peft
    for request, name in enumerate("abc"):
        add_and_wait(peft, cache.request(request, name))
        if name == "b":
            peft.mark_request_done(cache.request(request, name))
    before = (peft.active_tasks, peft.resident_tasks("host"), peft.free_pages("host"))
    with pytest.raises(LoraCacheFullError) as caught:
        add_and_wait(peft, cache.request(9, "d"))
    error = caught.value
    assert (error.tier, error.needed_pages, error.free_pages) == ("host", pages, 1)
    assert error.evictable_pages == 0
    assert isinstance(error, MemoryError)
    assert (peft.active_tasks, peft.resident_tasks("host"), peft.free_pages("host")) == before
    peft.mark_request_done(cache.request(0, "a"))
    add_and_wait(peft, cache.request(9, "d"))
    assert not peft.is_task_cached(cache.adapters.task_id("a"))


def test_eviction_is_all_or_nothing(make_cache: MakeCache, tmp_path: Path) -> None:
    small, large = pages_of_random_adapter(4), pages_of_random_adapter(12)
    total = small + large - 1
    cache = make_cache(host_pages=total, device_pages=total)
    register_adapters(cache, tmp_path, "owned", "idle", rank=4)
    register_adapters(cache, tmp_path, "large", rank=12)
    peft = cache.peft
    for request, name in enumerate(("idle", "owned")):
        add_and_wait(peft, cache.request(request, name))
    peft.ensure_batch([cache.request(0, "idle"), cache.request(1, "owned")], []).close()
    peft.mark_request_done(cache.request(0, "idle"))
    with pytest.raises(LoraCacheFullError) as caught:
        add_and_wait(peft, cache.request(2, "large"))
    error = caught.value
    assert (error.needed_pages, error.evictable_pages) == (large, small)
    assert error.free_pages == total - 2 * small
    assert peft.is_task_cached(cache.adapters.task_id("idle"))
    assert peft.stats.host.tasks_evicted == 0

    peft.mark_request_done(cache.request(1, "owned"))
    add_and_wait(peft, cache.request(2, "large"))  # displaces both, but from the host tier only
    for name in ("idle", "owned"):
        assert cache.adapters.get(name).tiers == ("device",)
    with pytest.raises(LoraCacheFullError):  # neither does the host copy fit beside the large one
        add_and_wait(peft, cache.request(3, "owned"))
    assert cache.adapters.get("large").tiers == ("host",)
    assert cache.adapters.get("owned").owners == frozenset()


def test_an_adapter_that_fits_neither_tier_is_told_at_once(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    pages = pages_of_random_adapter()
    for host, device, tier in ((pages - 1, pages, "host"), (pages, pages - 1, "device")):
        cache = make_cache(host_pages=host, device_pages=device)
        register_adapters(cache, tmp_path / tier, "a")
        with pytest.raises(AdapterTooLargeError) as caught:
            add_and_wait(cache.peft, cache.request(1, "a"))
        error = caught.value
        assert (error.tier, error.needed_pages, error.total_pages) == (tier, pages, pages - 1)
        assert error.page_bytes == cache.peft.page_bytes
        with pytest.raises(AdapterTooLargeError):
            add_and_wait(cache.peft, LlmRequest(2, 5, carried_weights(1)))
        assert cache.peft.active_tasks == {}


def test_least_recently_used_unowned_tasks_go_first(make_cache: MakeCache, tmp_path: Path) -> None:
    pages = pages_of_random_adapter()
    cache = make_cache(host_pages=3 * pages, device_pages=3 * pages)
    register_adapters(cache, tmp_path, *"abcd")
    peft = cache.peft
    for request, name in ((1, "a"), (2, "b"), (3, "c"), (4, "a")):
        add_and_wait(peft, cache.request(request, name))
        peft.mark_request_done(cache.request(request, name))
    add_and_wait(peft, cache.request(5, "d"))
    cached = {name for name in "abcd" if peft.is_task_cached(cache.adapters.task_id(name))}
    assert cached == {"a", "c", "d"}
    assert peft.stats.host.tasks_evicted == 1
    assert peft.stats.host.pages_evicted == pages


def test_device_victims_are_unowned_then_paused_then_active(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    pages = pages_of_random_adapter()
    cache = make_cache(host_pages=9 * pages, device_pages=3 * pages)
    register_adapters(cache, tmp_path, "active", "paused", "gone", "x", "y", "z")
    peft = cache.peft
    first = [cache.request(i, name) for i, name in enumerate(("active", "paused", "gone"))]
    later = [cache.request(i + 10, name) for i, name in enumerate("xyz")]
    for request in (*first, *later):
        add_and_wait(peft, request)
    peft.ensure_batch([], first).close()
    peft.mark_request_done(first[1], pause=True)
    peft.mark_request_done(first[2])
    names = ("gone", "paused", "active")
    for number, survivors in enumerate((names[1:], names[2:], ())):
        peft.ensure_batch(later[: number + 1], []).close()
        there = {n for n in names if peft.is_task_cached_device(cache.adapters.task_id(n))}
        assert there == set(survivors)


# ---- the rest ----------------------------------------------------------------------------------


def test_tiers_are_not_inclusive_and_refill_each_other(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a")
    peft, request = small_cache.peft, small_cache.request(1, "a")
    add_and_wait(peft, request)
    peft.ensure_batch([request], []).close()
    weights = peft.task_weights(request.lora_task_id, "device")
    peft.mark_request_done(request)
    peft.evict_unowned("host")
    assert not peft.is_task_cached(request.lora_task_id)
    assert small_cache.adapters.get("a").tiers == ("device",)
    reads = peft.stats.source_reads
    add_and_wait(peft, request)
    assert peft.stats.source_reads == reads
    assert_same_weights(peft.task_weights(request.lora_task_id, "host"), weights)


def test_unknown_tiers_and_devices_are_refused(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a")
    with pytest.raises(InvalidArgumentError, match="tier"):
        small_cache.peft.evict_unowned("gpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="tpu"):
        PeftCacheManager(small_cache.config, device="tpu")


@pytest.mark.parametrize("page_size", [1024, 4096, 1000 * 64, "auto"])
def test_page_counts_round_down_to_the_budget(page_size: int | str) -> None:
    budget = 1_000_001
    config = PeftCacheConfig(
        host_cache_size=budget, device_cache_size=2 * budget, page_size=page_size
    )
    peft = PeftCacheManager(model_config(), config)
    assert peft.max_host_pages == budget // peft.page_bytes
    assert peft.max_device_pages == 2 * budget // peft.page_bytes
    peft.check_invariants()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "bfloat16"}, "dtype is bfloat16.*is float32"),
        ({"max_lora_rank": 8}, "max_lora_rank is 8.*is 16"),
        ({"max_lora_rank": 32}, "max_lora_rank is 32.*is 16"),
    ],
)
def test_a_configuration_that_contradicts_the_model_configuration_is_refused(
    fields: dict[str, Any], words: str
) -> None:
    model = model_config(torch.float32, max_lora_rank=16)
    with pytest.raises(InvalidArgumentError, match=words):
        PeftCacheManager(model, PeftCacheConfig(**fields))
    same = PeftCacheConfig(
        dtype="float32", max_lora_rank=16, host_cache_size="1MB", device_cache_size="1MB"
    )
    PeftCacheManager(model, same).close()
