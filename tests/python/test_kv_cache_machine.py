"""Random walks: whoever is suspended and resumed, each request reads back what it wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.kv_copies import CopyFailedError, RecordingCopier

from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 8, 6, 3

requests = st.integers(0, 4)
tokens = st.integers(0, 5 * BLOCK_SIZE)


@dataclass
class Expected:
    """What a request must read: one value per block, on the device and as it was suspended."""

    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)


class KvCacheMachine(RuleBasedStateMachine):
    """The manager with a recording copier, beside what each request wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.copier = RecordingCopier(NUM_BLOCKS, NUM_HOST_BLOCKS)
        self.kv = KVCacheManager(
            NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=NUM_HOST_BLOCKS, copier=self.copier
        )
        self.model = {number: Expected() for number in range(5)}
        self.last_value = 0

    def used(self, place: str) -> int:
        return sum(len(getattr(expected, place)) for expected in self.model.values())

    def write(self, number: int, begin: int) -> None:
        """Writes a new value into each block from `begin` on, as a forward would."""
        table = self.kv.block_table(LlmRequest(number))
        for index in range(begin, len(table)):
            self.last_value += 1
            self.copier.device[table[index]] = self.last_value
            self.model[number].device[index:] = [self.last_value]

    @rule(number=requests, num_tokens=tokens, fail_after=st.none() | st.integers(0, 3))
    def allocate(self, number: int, num_tokens: int, fail_after: int | None) -> None:
        expected = self.model[number]
        old = expected.device or expected.host
        count = max(-(-num_tokens // BLOCK_SIZE), len(old))
        missing = count - len(expected.device)
        fits = missing <= NUM_BLOCKS - self.used("device")
        copies = fits and bool(expected.host) and not expected.device
        self.copier.fail_after = fail_after if copies else None
        if copies and fail_after is not None:
            with pytest.raises(CopyFailedError):
                self.kv.try_allocate(LlmRequest(number), num_tokens)
            return
        assert self.kv.try_allocate(LlmRequest(number), num_tokens) == fits
        if fits:
            expected.device = list(old)
            self.write(number, len(old))

    @rule(number=requests, back=st.integers(1, 3))
    def overwrite_the_end(self, number: int, back: int) -> None:
        self.write(number, max(0, len(self.model[number].device) - back))

    @rule(number=requests, fail_after=st.none() | st.integers(0, 3))
    def suspend(self, number: int, fail_after: int | None) -> None:
        expected = self.model[number]
        copies = bool(expected.device) and not expected.host
        fits = not copies or len(expected.device) <= NUM_HOST_BLOCKS - self.used("host")
        if copies and fits and fail_after is not None:
            self.copier.fail_after = fail_after
            with pytest.raises(CopyFailedError):
                self.kv.suspend_request(LlmRequest(number))
            return
        assert self.kv.suspend_request(LlmRequest(number)) == fits
        if fits:
            expected.host = expected.host or expected.device
            expected.device = []

    @rule(number=requests)
    def confirm(self, number: int) -> None:
        self.kv.confirm_resume(LlmRequest(number))
        if self.model[number].device:
            self.model[number].host = []

    @rule(number=requests)
    def free(self, number: int) -> None:
        self.kv.free_resources(LlmRequest(number))
        self.model[number] = Expected()

    @precondition(lambda self: self.last_value > 20)
    @rule()
    def reset(self) -> None:
        self.kv.reset()
        self.model = {number: Expected() for number in range(5)}

    @invariant()
    def everybody_reads_what_they_wrote(self) -> None:
        for number, expected in self.model.items():
            table = self.kv.block_table(LlmRequest(number))
            assert [self.copier.device[block] for block in table] == expected.device
            suspended = bool(expected.host) and not expected.device
            assert self.kv.is_suspended(LlmRequest(number)) == suspended

    @invariant()
    def the_books_are_right(self) -> None:
        kv = self.kv
        kv.check_invariants()
        assert kv.num_used_blocks == self.used("device")
        assert kv.num_suspended_blocks == self.used("host")
        assert kv.num_free_blocks + kv.num_used_blocks == NUM_BLOCKS
        assert kv.num_free_host_blocks + kv.num_suspended_blocks == NUM_HOST_BLOCKS

    def teardown(self) -> None:
        """Whatever is still suspended comes back once there is room."""
        for number in self.model:
            if not self.kv.is_suspended(LlmRequest(number)):
                self.kv.free_resources(LlmRequest(number))
        for number, expected in self.model.items():
            if self.kv.is_suspended(LlmRequest(number)):
                request = LlmRequest(number)
                assert self.kv.try_allocate(request, 0)
                table = self.kv.block_table(request)
                assert [self.copier.device[block] for block in table] == expected.host


TestKvCacheMachine = KvCacheMachine.TestCase
TestKvCacheMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
