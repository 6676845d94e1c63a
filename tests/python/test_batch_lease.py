"""What callers rely on of ensure_batch and of the lease that it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.support.cache_fixtures import (
    Cache,
    add_and_wait,
    pages_of_random_adapter,
    register_adapters,
)

from pagedlora import InvalidArgumentError, LeaseClosedError, LoraCacheFullError, PagedLoraError

MakeCache = Callable[..., Cache]


def test_a_lease_is_a_mapping_with_errors(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a", "b")
    peft = small_cache.peft
    a, b = small_cache.request(1, "a"), small_cache.request(2, "b")
    twin, paused = small_cache.request(3, "a"), small_cache.request(4, "b")
    for request in (a, b, twin, paused):
        add_and_wait(peft, request)
    peft.mark_request_done(paused, pause=True)
    never = small_cache.request(5, "a")
    lease, requests_of_task = peft.ensure_batch_map_task_id([a, never], [twin, b, paused, a])
    assert isinstance(lease, Mapping)
    assert set(lease) == {1, 2, 3} == set(lease.keys())
    assert len(lease) == 3
    assert 1 in lease
    assert 5 not in lease
    assert lease.task_of(3) == a.lora_task_id
    assert {task: sorted(ids) for task, ids in requests_of_task.items()} == {
        a.lora_task_id: [1, 3],
        b.lora_task_id: [2],
    }
    assert set(lease.errors) == {4, 5}
    assert all(isinstance(error, PagedLoraError) for error in lease.errors.values())
    assert "never added" in str(lease.errors[5])
    assert "paused" in str(lease.errors[4])
    with pytest.raises(KeyError):
        lease[5]
    assert {e.module_name for e in lease[1]} == {m.name for m in small_cache.config.modules}


def test_a_closed_lease_refuses_its_entries(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a")
    request = small_cache.request(1, "a")
    add_and_wait(small_cache.peft, request)
    with small_cache.peft.ensure_batch([request], []) as lease:
        assert lease.is_open
        assert lease[1]
    lease.close()
    assert not lease.is_open
    with pytest.raises(LeaseClosedError):
        lease[1]
    with pytest.raises(LeaseClosedError):
        lease.task_of(1)


def test_a_closed_lease_refuses_its_modules(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a")
    request = small_cache.request(1, "a")
    add_and_wait(small_cache.peft, request)
    with small_cache.peft.ensure_batch([request], []) as lease:
        assert lease.touched_modules() == set(range(len(small_cache.config.modules)))
    with pytest.raises(LeaseClosedError):
        lease.touched_modules()


def test_a_lease_has_the_methods_of_a_mapping(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a")
    request = small_cache.request(1, "a")
    add_and_wait(small_cache.peft, request)
    lease = small_cache.peft.ensure_batch([request], [])
    assert lease.get(2) is None
    assert [key for key, _ in lease.items()] == [1]
    assert [len(entries) for entries in lease.values()] == [len(lease[1])]
    assert len(lease.get(1)) == len(lease[1])


def test_the_next_batch_closes_the_previous_lease(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a", "b")
    peft = small_cache.peft
    requests = [small_cache.request(1, "a"), small_cache.request(2, "b")]
    for request in requests:
        add_and_wait(peft, request)
    first = peft.ensure_batch(requests[:1], [])
    second = peft.ensure_batch(requests[1:], [])
    assert not first.is_open
    with pytest.raises(LeaseClosedError):
        first[1]
    assert second[2]
    peft.close()
    assert not second.is_open
    with pytest.raises(InvalidArgumentError):
        add_and_wait(peft, small_cache.request(3, "a"))


def test_leased_copies_stay_and_a_batch_too_large_changes_nothing(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    pages = pages_of_random_adapter()
    cache = make_cache(host_pages=9 * pages, device_pages=2 * pages + 1)
    register_adapters(cache, tmp_path, *"abc")
    peft = cache.peft
    requests = [cache.request(i, name) for i, name in enumerate("abc")]
    for request in requests:
        add_and_wait(peft, request)
    peft.ensure_batch(requests[:2], []).close()
    with pytest.raises(LoraCacheFullError) as caught:
        peft.ensure_batch(requests, [])
    assert caught.value.tier == "device"
    assert (caught.value.needed_pages, caught.value.free_pages) == (pages, 1)
    assert [peft.is_task_cached_device(r.lora_task_id) for r in requests] == [True, True, False]
    lease = peft.ensure_batch(requests[1:], [])
    peft.reset_device_cache()
    peft.evict_unowned("device")
    for request in requests[1:]:
        assert lease[request.request_id]
        assert peft.is_task_cached_device(request.lora_task_id)


def test_a_batch_that_does_not_fit_evicts_nobody(make_cache: MakeCache, tmp_path: Path) -> None:
    small, large = pages_of_random_adapter(4), pages_of_random_adapter(12)
    cache = make_cache(device_pages=small + large - 1)
    register_adapters(cache, tmp_path, "a", "idle", rank=4)
    register_adapters(cache, tmp_path, "large", rank=12)
    peft = cache.peft
    requests = [cache.request(i, name) for i, name in enumerate(("a", "idle", "large"))]
    for request in requests:
        add_and_wait(peft, request)
    peft.ensure_batch(requests[:2], []).close()
    peft.mark_request_done(requests[1])
    with pytest.raises(LoraCacheFullError) as caught:
        peft.ensure_batch([requests[0], requests[2]], [])
    assert (caught.value.needed_pages, caught.value.evictable_pages) == (large, small)
    assert [peft.is_task_cached_device(r.lora_task_id) for r in requests] == [True, True, False]
    assert peft.stats.device.tasks_evicted == 0
    peft.ensure_batch([requests[2]], []).close()
    assert peft.stats.device.tasks_evicted == 2


def test_reset_gives_up_the_device_copies_of_owners_before_the_batch(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    pages = pages_of_random_adapter()
    cache = make_cache(host_pages=9 * pages, device_pages=2 * pages)
    register_adapters(cache, tmp_path, *"abc")
    peft = cache.peft
    requests = [cache.request(i, name) for i, name in enumerate("abc")]
    for request in requests:
        add_and_wait(peft, request)
    peft.ensure_batch(requests[:2], []).close()
    peft.ensure_batch(requests[2:], [], reset_gpu_cache=True).close()
    assert peft.is_task_cached_device(requests[2].lora_task_id)
    peft.ensure_batch(requests[1:], []).close()
    assert [peft.is_task_cached_device(r.lora_task_id) for r in requests] == [False, True, True]
    assert peft.stats.device.hits == 2
