"""KV blocks: each block is free or in one table, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedlora.errors import InvalidArgumentError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest


def request(request_id: int = 0) -> LlmRequest:
    return LlmRequest(request_id)


def test_fresh_blocks_come_in_order_and_hold_the_tokens() -> None:
    kv = KVCacheManager(8, 4)
    first, second = request(1), request(2)
    assert kv.try_allocate(first, 9)
    assert kv.try_allocate(second, 4)
    assert list(kv.block_table(first)) == [0, 1, 2]
    assert list(kv.block_table(second)) == [3]
    assert (kv.num_free_blocks, kv.num_used_blocks) == (4, 4)
    kv.check_invariants()


def test_a_table_grows_at_its_end_and_never_shrinks() -> None:
    kv = KVCacheManager(8, 4)
    grown = request()
    assert kv.try_allocate(grown, 4)
    assert kv.try_allocate(grown, 3)
    assert list(kv.block_table(grown)) == [0]
    assert kv.try_allocate(grown, 5)
    assert list(kv.block_table(grown)) == [0, 1]
    assert kv.try_allocate(grown, 1)
    assert list(kv.block_table(grown)) == [0, 1]


def test_what_does_not_fit_changes_nothing() -> None:
    kv = KVCacheManager(3, 4)
    small, large = request(1), request(2)
    assert kv.try_allocate(small, 5)
    assert not kv.try_allocate(large, 8)
    assert list(kv.block_table(large)) == []
    assert not kv.try_allocate(small, 13)
    assert list(kv.block_table(small)) == [0, 1]
    assert kv.num_free_blocks == 1
    kv.check_invariants()


def test_the_host_blocks_of_a_request_are_listed_while_it_has_any() -> None:
    kv = KVCacheManager(4, 4, num_host_blocks=4)
    moved = request()
    assert not kv.host_block_table(moved)
    assert kv.try_allocate(moved, 8)
    assert not kv.host_block_table(moved)
    assert kv.suspend_request(moved)
    assert list(kv.host_block_table(moved)) == [0, 1]
    assert kv.try_allocate(moved, 8)
    assert list(kv.host_block_table(moved)) == [0, 1]
    kv.confirm_resume(moved)
    assert not kv.host_block_table(moved)


def test_released_blocks_are_used_again_in_their_order() -> None:
    kv = KVCacheManager(6, 4)
    old, other, new = request(1), request(2), request(3)
    kv.try_allocate(old, 12)
    kv.try_allocate(other, 4)
    kv.free_resources(old)
    kv.free_resources(old)
    assert list(kv.block_table(old)) == []
    kv.try_allocate(new, 16)
    assert list(kv.block_table(new)) == [0, 1, 2, 4]
    kv.check_invariants()


def test_zero_tokens_need_no_block() -> None:
    kv = KVCacheManager(1, 4)
    assert kv.try_allocate(request(), 0)
    assert kv.num_free_blocks == 1


def test_reset_frees_everything() -> None:
    kv = KVCacheManager(4, 4)
    kv.try_allocate(request(1), 16)
    kv.reset()
    assert kv.num_free_blocks == 4
    kv.check_invariants()


def test_what_is_allocated_needs_no_host_block() -> None:
    kv = KVCacheManager(2, 4)
    assert (kv.num_host_blocks, kv.num_free_host_blocks, kv.num_suspended_blocks) == (0, 0, 0)
    assert kv.try_allocate(request(), 8)
    assert not kv.suspend_request(request())
    assert list(kv.block_table(request())) == [0, 1]
    kv.check_invariants()


def test_zero_tokens_leave_no_trace() -> None:
    kv = KVCacheManager(1, 4, num_host_blocks=1)
    assert kv.try_allocate(request(), 0)
    assert not kv.is_suspended(request())
    assert kv.suspend_request(request())
    assert not kv.is_suspended(request())
    kv.check_invariants()


@pytest.mark.parametrize("sizes", [(0, 16), (4, 0), (-1, 16)])
def test_a_cache_that_holds_nothing_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"at least 1|from 1 to"):
        KVCacheManager(*sizes)


def test_a_lost_block_is_noticed() -> None:
    kv = KVCacheManager(4, 4)
    kv._device.take(1)
    with pytest.raises(AssertionError, match="each of the 4 blocks once"):
        kv.check_invariants()


@given(
    st.lists(
        st.tuples(st.sampled_from(["grow", "free"]), st.integers(0, 4), st.integers(0, 40)),
        max_size=60,
    )
)
def test_blocks_are_conserved(steps: list[tuple[str, int, int]]) -> None:
    kv = KVCacheManager(10, 4)
    model: dict[int, list[int]] = {}
    for action, request_id, num_tokens in steps:
        target = request(request_id)
        if action == "free":
            kv.free_resources(target)
            model.pop(request_id, None)
        else:
            table = model.get(request_id, [])
            need = max(-(-num_tokens // 4), len(table))
            fits = need <= 10 - sum(map(len, model.values())) + len(table)
            assert kv.try_allocate(target, num_tokens) == fits
            grown = list(kv.block_table(target))
            assert grown[: len(table)] == table
            assert len(grown) == (need if fits else len(table))
            model[request_id] = grown
        assert kv.num_used_blocks == sum(map(len, model.values()))
        assert kv.num_free_blocks + kv.num_used_blocks == kv.num_blocks
        kv.check_invariants()
