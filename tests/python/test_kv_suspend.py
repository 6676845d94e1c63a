"""Suspending requests to the host and resuming them: the documented states, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.kv_copies import CopyFailedError, RecordingCopier

from pagedlora import kv_cache
from pagedlora.errors import InvalidArgumentError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 6, 4, 4
STATES = ("none", "allocated", "suspended", "resuming")
ONE, OTHER, THIRD = LlmRequest(1), LlmRequest(2), LlmRequest(3)


class Bench:
    """A manager with a copier whose contents can be read."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = NUM_HOST_BLOCKS):
        self.copier = RecordingCopier(num_blocks, num_host_blocks)
        self.kv = KVCacheManager(
            num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks, copier=self.copier
        )

    def allocate(self, request: LlmRequest, num_blocks: int) -> bool:
        return self.kv.try_allocate(request, num_blocks * BLOCK_SIZE)

    def write(self, request: LlmRequest, values: list[Any]) -> None:
        for block, value in zip(self.kv.block_table(request), values, strict=True):
            self.copier.device[block] = value

    def overwrite_free_blocks(self) -> None:
        """Writes garbage into every device block that is free."""
        filler = LlmRequest(99)
        assert self.allocate(filler, self.kv.num_free_blocks)
        for block in self.kv.block_table(filler):
            self.copier.device[block] = "garbage"
        self.kv.free_resources(filler)

    def read(self, request: LlmRequest) -> list[Any]:
        return [self.copier.device[block] for block in self.kv.block_table(request)]

    def bring(self, request: LlmRequest, state: str) -> None:
        """Takes a new request into a state, with three blocks unless it is none."""
        if state == "none":
            return
        assert self.allocate(request, 3)
        self.write(request, ["a", "b", "c"])
        if state == "allocated":
            return
        assert self.kv.suspend_request(request)
        if state == "resuming":
            assert self.allocate(request, 3)

    def state(self, request: LlmRequest) -> str:
        """The state as the public names show it; the only request must be this one."""
        on_device, on_host = len(self.kv.block_table(request)), self.kv.num_suspended_blocks
        assert self.kv.num_used_blocks == on_device
        assert self.kv.is_suspended(request) == (on_host > 0 and not on_device)
        return STATES[(on_device > 0) + 2 * (on_host > 0)]

    def everything(self) -> Any:
        """All that a call that changes nothing must leave alone."""
        tables = [(list(h.device), list(h.host)) for h in self.kv._held.values()]
        free = list(self.kv._device._free), list(self.kv._host._free)
        return tables, free


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches whose invariants are checked after the test."""
    made: list[Bench] = []

    def make(*sizes: int) -> Bench:
        made.append(Bench(*sizes))
        return made[-1]

    yield make
    for bench in made:
        bench.kv.check_invariants()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


def documented_transitions() -> list[tuple[str, str, str]]:
    """State, call and next state, from the table in the module's docstring."""
    lines = [line for line in (kv_cache.__doc__ or "").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header, body = rows[0], rows[2:]
    return [
        (row[0], call, after)
        for row in body
        for call, after in zip(header[1:], row[1:], strict=True)
    ]


def test_the_table_has_every_state_and_every_call() -> None:
    calls = ("try_allocate", "suspend_request", "confirm_resume", "free_resources")
    pairs = [(state, call) for state, call, _ in documented_transitions()]
    assert pairs == [(state, call) for state in STATES for call in calls]


@pytest.mark.parametrize(("state", "call", "after"), documented_transitions())
def test_every_state_and_call_ends_where_the_table_says(
    bench: Bench, state: str, call: str, after: str
) -> None:
    bench.bring(ONE, state)
    bench.overwrite_free_blocks()
    assert bench.state(ONE) == state
    copied = len(bench.copier.copies)
    arguments = (3 * BLOCK_SIZE,) if call == "try_allocate" else ()

    result = getattr(bench.kv, call)(ONE, *arguments)

    assert result is (True if call in ("try_allocate", "suspend_request") else None)
    assert bench.state(ONE) == after
    moved = (state, after) in (("allocated", "suspended"), ("suspended", "resuming"))
    assert len(bench.copier.copies) - copied == moved
    bench.kv.check_invariants()
    if after in ("none", "suspended") or state == "none":
        assert list(bench.kv.block_table(ONE)) == ([0, 1, 2] if after == "allocated" else [])
    if state != "none" and after != "none":
        assert bench.kv.try_allocate(ONE, 0)  # resumes what is suspended
        assert bench.read(ONE) == ["a", "b", "c"]


def test_a_suspended_request_gives_its_device_blocks_to_others(bench: Bench) -> None:
    bench.bring(ONE, "allocated")
    assert not bench.allocate(OTHER, 6)
    assert bench.kv.suspend_request(ONE)
    assert (bench.kv.num_free_blocks, bench.kv.num_used_blocks) == (6, 0)
    assert (bench.kv.num_free_host_blocks, bench.kv.num_suspended_blocks) == (1, 3)
    assert bench.allocate(OTHER, 6)
    bench.write(OTHER, list("uvwxyz"))

    assert not bench.allocate(ONE, 1)
    bench.kv.free_resources(OTHER)
    assert bench.allocate(OTHER, 2)
    assert bench.allocate(ONE, 1)
    assert list(bench.kv.block_table(ONE)) == [2, 3, 4]
    assert bench.read(ONE) == ["a", "b", "c"]


def test_a_resume_may_grow_the_table(bench: Bench) -> None:
    bench.bring(ONE, "suspended")
    assert bench.allocate(ONE, 5)
    assert bench.read(ONE)[:3] == ["a", "b", "c"]
    assert bench.copier.copies[-1] == ("from host", [0, 1, 2], [0, 1, 2])
    bench.kv.confirm_resume(ONE)
    assert len(bench.kv.block_table(ONE)) == 5
    assert bench.kv.num_suspended_blocks == 0


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 4])
def test_a_resume_that_does_not_fit_changes_nothing(bench: Bench, num_blocks: int) -> None:
    bench.bring(ONE, "suspended")
    assert bench.allocate(OTHER, 4 if num_blocks <= 3 else 3)
    before, copies = bench.everything(), list(bench.copier.copies)

    assert not bench.allocate(ONE, num_blocks)

    assert bench.everything() == before
    assert bench.copier.copies == copies
    assert bench.kv.is_suspended(ONE)


def test_a_growth_that_does_not_fit_leaves_a_resume_alone(bench: Bench) -> None:
    bench.bring(ONE, "resuming")
    before, copies = bench.everything(), list(bench.copier.copies)
    assert not bench.allocate(ONE, 7)
    assert bench.everything() == before
    assert bench.allocate(ONE, 5)
    assert bench.state(ONE) == "resuming"
    assert bench.copier.copies == copies


def test_a_full_host_pool_refuses_and_changes_nothing(bench: Bench) -> None:
    bench.bring(ONE, "suspended")
    assert bench.allocate(OTHER, 2)
    before, copies = bench.everything(), list(bench.copier.copies)

    assert not bench.kv.suspend_request(OTHER)

    assert bench.everything() == before
    assert bench.copier.copies == copies
    assert not bench.kv.is_suspended(OTHER)
    assert bench.allocate(THIRD, 1)
    assert bench.kv.suspend_request(THIRD)
    assert bench.kv.num_free_host_blocks == 0


def test_an_unconfirmed_resume_keeps_its_host_blocks_from_others(bench: Bench) -> None:
    bench.bring(ONE, "resuming")
    assert bench.allocate(OTHER, 2)
    assert not bench.kv.suspend_request(OTHER)
    bench.kv.confirm_resume(ONE)
    assert bench.kv.suspend_request(OTHER)


def test_a_resume_taken_back_drops_what_came_after_it(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(6, 3)
    bench.bring(ONE, "resuming")
    assert bench.allocate(ONE, 5)
    bench.write(ONE, ["later"] * 5)
    copies = len(bench.copier.copies)

    assert bench.kv.suspend_request(ONE)  # although the host has no block left

    assert len(bench.copier.copies) == copies
    assert (bench.kv.num_free_blocks, bench.kv.num_suspended_blocks) == (6, 3)
    assert bench.allocate(ONE, 0)
    assert bench.read(ONE) == ["a", "b", "c"]


def test_a_confirmed_resume_is_suspended_anew_with_what_was_added(bench: Bench) -> None:
    bench.bring(ONE, "resuming")
    bench.kv.confirm_resume(ONE)
    assert bench.allocate(ONE, 4)
    bench.write(ONE, ["a", "b", "C", "d"])
    assert bench.kv.suspend_request(ONE)
    bench.overwrite_free_blocks()
    assert bench.allocate(ONE, 4)
    assert bench.read(ONE) == ["a", "b", "C", "d"]


def test_requests_come_back_each_with_its_own(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(6, 6)
    contents = {ONE.request_id: ["a"], OTHER.request_id: ["b", "c"], THIRD.request_id: list("def")}
    requests = (ONE, OTHER, THIRD)
    for request in requests:
        assert bench.allocate(request, len(contents[request.request_id]))
        bench.write(request, contents[request.request_id])
    for request in (OTHER, ONE, THIRD):
        assert bench.kv.suspend_request(request)
    bench.overwrite_free_blocks()
    for request in (THIRD, ONE, OTHER):
        assert bench.allocate(request, 0)
    for request in requests:
        assert bench.read(request) == contents[request.request_id]


@pytest.mark.parametrize("blocks_before_the_error", [0, 1, 3])
def test_an_error_in_a_suspend_changes_nothing(bench: Bench, blocks_before_the_error: int) -> None:
    bench.bring(ONE, "allocated")
    before = bench.everything()
    bench.copier.fail_after = blocks_before_the_error
    with pytest.raises(CopyFailedError):
        bench.kv.suspend_request(ONE)
    assert bench.everything() == before
    assert bench.read(ONE) == ["a", "b", "c"]
    assert bench.kv.suspend_request(ONE)
    bench.overwrite_free_blocks()
    assert bench.allocate(ONE, 0)
    assert bench.read(ONE) == ["a", "b", "c"]


@pytest.mark.parametrize("blocks_before_the_error", [0, 1, 3])
def test_an_error_in_a_resume_changes_nothing(bench: Bench, blocks_before_the_error: int) -> None:
    bench.bring(ONE, "suspended")
    bench.overwrite_free_blocks()
    before = bench.everything()
    bench.copier.fail_after = blocks_before_the_error
    with pytest.raises(CopyFailedError):
        bench.allocate(ONE, 5)
    assert bench.everything() == before
    assert bench.kv.is_suspended(ONE)
    assert bench.allocate(ONE, 5)
    assert bench.read(ONE)[:3] == ["a", "b", "c"]


@pytest.mark.parametrize("state", ["allocated", "suspended"])
def test_a_copy_sees_the_books_as_they_were(bench: Bench, state: str) -> None:
    bench.bring(ONE, state)
    before, seen = bench.everything(), []
    bench.copier.on_copy = lambda: seen.append(bench.everything())
    assert bench.kv.suspend_request(ONE) if state == "allocated" else bench.allocate(ONE, 0)
    assert seen == [before]


def test_a_copier_may_change_its_lists(bench: Bench) -> None:
    bench.bring(ONE, "allocated")

    def clearing(copy: Callable[..., None]) -> Callable[..., None]:
        def copy_and_clear(*lists: list[int]) -> None:
            copy(*lists)
            for blocks in lists:
                blocks.clear()

        return copy_and_clear

    bench.copier.copy_to_host = clearing(bench.copier.copy_to_host)  # type: ignore[method-assign]
    bench.copier.copy_from_host = clearing(  # type: ignore[method-assign]
        bench.copier.copy_from_host
    )
    assert bench.kv.suspend_request(ONE)
    bench.kv.check_invariants()
    assert bench.allocate(ONE, 4)
    assert bench.state(ONE) == "resuming"
    assert bench.read(ONE)[:3] == ["a", "b", "c"]
    bench.kv.check_invariants()


def test_without_a_copier_the_books_are_the_same(bench: Bench) -> None:
    bare = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=NUM_HOST_BLOCKS)
    for kv in (bare, bench.kv):
        assert kv.try_allocate(ONE, 12)
        assert kv.suspend_request(ONE)
        assert kv.is_suspended(ONE)
        assert kv.try_allocate(OTHER, 4)
        assert kv.try_allocate(ONE, 16)
        assert list(kv.block_table(ONE)) == [1, 2, 3, 4]
        assert (kv.num_used_blocks, kv.num_suspended_blocks) == (5, 3)
        kv.confirm_resume(ONE)
        kv.check_invariants()


@pytest.mark.parametrize("state", STATES)
def test_reset_frees_device_and_host(bench: Bench, state: str) -> None:
    bench.bring(ONE, state)
    bench.kv.reset()
    assert bench.state(ONE) == "none"
    assert (bench.kv.num_free_blocks, bench.kv.num_free_host_blocks) == (6, 4)


def test_a_negative_host_pool_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_host_blocks is -1"):
        KVCacheManager(1, 1, num_host_blocks=-1)


@pytest.mark.parametrize("state", ["suspended", "resuming"])
def test_broken_books_are_noticed(state: str) -> None:
    def broken() -> tuple[KVCacheManager, Any]:
        bench = Bench()
        bench.bring(ONE, state)
        return bench.kv, bench.kv._held[1]

    kv, _ = broken()
    kv._host.take(1)
    with pytest.raises(AssertionError, match="host blocks are not each of the 4 blocks once"):
        kv.check_invariants()
    kv, held = broken()
    kv._host.release([held.host[0]])
    with pytest.raises(AssertionError, match="host blocks are not each of the 4 blocks once"):
        kv.check_invariants()
    kv, held = broken()
    held.device[:0] = kv._device.take(1)
    kv._device.release(held.device[1:])
    del held.device[1:]
    with pytest.raises(AssertionError, match="resuming with 1 device blocks for 3 host blocks"):
        kv.check_invariants()
    kv, held = broken()
    kv._device.release(held.device)
    kv._host.release(held.host)
    held.device, held.host = [], []
    with pytest.raises(AssertionError, match="request 1 is remembered without any block"):
        kv.check_invariants()
