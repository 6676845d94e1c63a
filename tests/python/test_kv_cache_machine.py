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

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE, NUM_REQUESTS = 8, 6, 3, 4

picks = st.integers(0, NUM_REQUESTS - 1)
states = st.sampled_from(("none", "allocated", "suspended", "resuming"))
tokens = st.integers(0, 4 * BLOCK_SIZE)


@dataclass
class Expected:
    """What a request must read: one value per block, on the device and as it was suspended."""

    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)

    @property
    def state(self) -> str:
        if self.host:
            return "resuming" if self.device else "suspended"
        return "allocated" if self.device else "none"


anybody_has_blocks = precondition(lambda self: self.used("device") + self.used("host") > 0)


class KvCacheMachine(RuleBasedStateMachine):
    """The manager with a recording copier, beside what each request wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.copier = RecordingCopier(NUM_BLOCKS, NUM_HOST_BLOCKS)
        self.kv = KVCacheManager(
            NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=NUM_HOST_BLOCKS, copier=self.copier
        )
        self.model = {number: Expected() for number in range(NUM_REQUESTS)}
        self.last_value = 0
        self.num_copies = 0

    def used(self, place: str) -> int:
        return sum(len(getattr(expected, place)) for expected in self.model.values())

    def write(self, number: int, begin: int) -> None:
        """Writes a new value into each block from `begin` on, as a forward would."""
        table = self.kv.block_table(LlmRequest(number))
        for index in range(begin, len(table)):
            self.last_value += 1
            self.copier.device[table[index]] = self.last_value
            self.model[number].device[index:] = [self.last_value]

    def one_in(self, state: str, pick: int) -> int:
        """A request in the state if there is one, else any."""
        found = [number for number, expected in self.model.items() if expected.state == state]
        return found[pick % len(found)] if found else pick

    def expect_copy(self) -> bool:
        """Counts a copy that the next call must make; whether it was told to fail."""
        self.num_copies += 1
        return self.copier.fail_after is not None

    @rule(pick=picks, state=states, num_tokens=tokens)
    def allocate(self, pick: int, state: str, num_tokens: int) -> None:
        number = self.one_in(state, pick)
        expected, request = self.model[number], LlmRequest(number)
        old = expected.device or expected.host
        count = max(-(-num_tokens // BLOCK_SIZE), len(old))
        fits = count - len(expected.device) <= NUM_BLOCKS - self.used("device")
        if fits and expected.state == "suspended" and self.expect_copy():
            with pytest.raises(CopyFailedError):
                self.kv.try_allocate(request, num_tokens)
            return
        assert self.kv.try_allocate(request, num_tokens) == fits
        if fits:
            expected.device = list(old)
            self.write(number, len(old))

    @rule(pick=picks, back=st.integers(1, 3), state=states)
    def overwrite_the_end(self, pick: int, back: int, state: str) -> None:
        number = self.one_in(state, pick)
        self.write(number, max(0, len(self.model[number].device) - back))

    @anybody_has_blocks
    @rule(pick=picks, state=states)
    def suspend(self, pick: int, state: str) -> None:
        number = self.one_in(state, pick)
        expected, request = self.model[number], LlmRequest(number)
        fits = True
        if expected.state == "allocated":
            fits = len(expected.device) <= NUM_HOST_BLOCKS - self.used("host")
            if fits and self.expect_copy():
                with pytest.raises(CopyFailedError):
                    self.kv.suspend_request(request)
                return
        assert self.kv.suspend_request(request) == fits
        if fits:
            expected.host = expected.host or expected.device
            expected.device = []

    @rule(fail_after=st.integers(0, 3))
    def make_the_next_copy_fail(self, fail_after: int) -> None:
        self.copier.fail_after = fail_after

    @anybody_has_blocks
    @rule(pick=picks, state=states)
    def confirm(self, pick: int, state: str) -> None:
        number = self.one_in(state, pick)
        self.kv.confirm_resume(LlmRequest(number))
        if self.model[number].device:
            self.model[number].host = []

    @anybody_has_blocks
    @rule(pick=picks, state=states)
    def free(self, pick: int, state: str) -> None:
        number = self.one_in(state, pick)
        self.kv.free_resources(LlmRequest(number))
        self.model[number] = Expected()

    @precondition(lambda self: self.last_value > 15)
    @rule()
    def reset(self) -> None:
        self.kv.reset()
        self.model = {number: Expected() for number in range(NUM_REQUESTS)}

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

    @invariant()
    def only_the_two_transitions_copy(self) -> None:
        assert len(self.copier.copies) == self.num_copies

    def teardown(self) -> None:
        """Whatever is still suspended comes back once there is room."""
        self.copier.fail_after = None
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
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestKvCacheMachine.pytestmark = [pytest.mark.slow]
