"""The whole-request scheduler over the caches of this package: its answers are never refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.cache_fixtures import (
    Cache,
    add_and_wait,
    pages_of_random_adapter,
    register_adapters,
)
from tests.support.whole_request_engine import ids

from pagedlora import CapacityScheduler, KVCacheManager, LlmRequest, PeftTaskNotCachedError
from pagedlora.requests import RequestState

ADAPTERS = ("a", "b", "c")


def make_requests(cache: Cache, *names: str | None) -> list[LlmRequest]:
    requests = [cache.request(number, name) for number, name in enumerate(names)]
    for request in requests:
        request.prompt_token_ids, request.max_tokens = [1] * 6, 6
    return requests


def small_device_cache(
    make_cache: Callable[..., Cache], path: Path, *, adapters: int, batches: int = 1
) -> Cache:
    """A cache whose device tier holds so many of the registered adapters."""
    pages = adapters * pages_of_random_adapter()
    cache = make_cache(device_pages=pages, options={"max_inflight_batches": batches})
    register_adapters(cache, path, *ADAPTERS)
    return cache


def test_leases_of_earlier_batches_count(make_cache: Callable[..., Cache], tmp_path: Path) -> None:
    cache = small_device_cache(make_cache, tmp_path, adapters=2, batches=2)
    scheduler = CapacityScheduler("max_utilization", 8, KVCacheManager(20, 4), cache.peft)
    first, second, third = make_requests(cache, *ADAPTERS)
    for request in (first, second, third):
        add_and_wait(cache.peft, request)
    lease = cache.peft.ensure_batch([first], [])
    assert ids(scheduler.schedule_request([second, third]).scheduled) == [1]
    assert ids(scheduler.schedule_request([first, third]).scheduled) == [0, 2]
    lease.close()
    assert ids(scheduler.schedule_request([second, third]).scheduled) == [1, 2]


def test_an_unknown_task_is_the_error_of_its_request(small_cache: Cache) -> None:
    scheduler = CapacityScheduler("max_requests", 8, None, small_cache.peft)
    decision = scheduler.schedule_request([LlmRequest(0, lora_task_id=404), LlmRequest(1)])
    assert ids(decision.scheduled) == [1]
    assert isinstance(decision.errors[0], PeftTaskNotCachedError)


@pytest.mark.parametrize(
    "policy", ["max_requests", "guaranteed_no_evict", "max_utilization", "static_batch"]
)
def test_every_request_finishes_and_every_batch_gets_its_lease(
    make_cache: Callable[..., Cache], tmp_path: Path, policy: str
) -> None:
    cache = small_device_cache(make_cache, tmp_path, adapters=1)
    kv = KVCacheManager(7, 4)
    scheduler = CapacityScheduler(policy, 3, kv, cache.peft)  # type: ignore[arg-type]
    active = make_requests(cache, "a", "b", "a", None, "c", "b")
    finished: list[LlmRequest] = []
    added: set[LlmRequest] = set()
    for _ in range(200):
        if not active:
            break
        decision = scheduler.schedule_request(active)
        assert not decision.errors
        for request in decision.paused:
            kv.free_resources(request)
            request.num_computed_tokens = 0
            cache.peft.mark_request_done(request, pause=True)
            added.discard(request)
        for request in decision.scheduled:
            if policy != "max_requests":
                assert kv.try_allocate(request, scheduler.tokens_to_allocate(request))
            if request not in added:
                cache.peft.add_request_peft(request)
                added.add(request)
        lease = cache.peft.ensure_batch(decision.scheduled, [])
        assert not lease.errors
        for request in decision.scheduled:
            request.num_computed_tokens = request.num_prompt_tokens + len(request.output_token_ids)
            request.output_token_ids.append(0)
            if request.state is RequestState.WAITING:
                request.advance_to(RequestState.PREFILLING)
                request.advance_to(RequestState.DECODING)
            if len(request.output_token_ids) == request.max_tokens:
                request.advance_to(RequestState.FINISHED)
                kv.free_resources(request)
                cache.peft.mark_request_done(request)
                active.remove(request)
                finished.append(request)
        lease.close()
        kv.check_invariants()
    assert len(finished) == 6
    assert kv.num_used_blocks == 0
