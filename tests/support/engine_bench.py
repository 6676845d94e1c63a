"""An engine core over blocks of remembered tokens: its answers tell what every step really read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedlora.engine.engine_core import EngineCore
from pagedlora.engine.live_requests import LiveRequests
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.sampling_params import SamplingParams
from pagedlora.scheduler.admission_window import AdmissionWindow
from pagedlora.scheduler.kv_cache_v2 import KVCacheV2Scheduler

VOCABULARY = 97
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def next_token(history: Sequence[int], task: int | None) -> int:
    """The token after these, of which it depends on each and its place, and on the adapter."""
    value = 1 if task is None else task % 1009 + 2
    for token in history:
        value = (value * 31 + token + 7) % 1000003
    return value % VOCABULARY


def answer(prompt: Sequence[int], task: int | None, max_tokens: int) -> list[int]:
    """What a request gets that nobody disturbs."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, task))
    return tokens[len(prompt) :]


@dataclass
class RememberedBlocks:
    """Tokens in the place of keys and values; copies them as a `BlockCopier`.

    Attributes:
        device: Block to its tokens.
        host: Likewise.
        copies: (direction, number of blocks) of each copy so far.
    """

    device: dict[int, list[int | None]] = field(default_factory=dict)
    host: dict[int, list[int | None]] = field(default_factory=dict)
    copies: list[tuple[str, int]] = field(default_factory=list)

    def copy_to_host(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Moves the content, so that nobody can read what was left behind."""
        self.copies.append(("to host", len(host_blocks)))
        for source, target in zip(device_blocks, host_blocks, strict=True):
            self.host[target] = self.device.pop(source)

    def copy_from_host(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        """Copies the content: the resume may be taken back."""
        self.copies.append(("from host", len(host_blocks)))
        for source, target in zip(host_blocks, device_blocks, strict=True):
            self.device[target] = list(self.host[source])


class RememberingRunner:
    """Computes each token from what the blocks of its request hold.

    Attributes:
        blocks: The KV cache.
        steps: The steps so far.
        before: Called with each step and its lease before it is computed.
    """

    stream = None

    def __init__(self, blocks: RememberedBlocks) -> None:
        self.blocks = blocks
        self.steps: list[StepBatch] = []
        self.before: Callable[[StepBatch, Any], None] = lambda step, lease: None
        self.task_of: Callable[[Any, int], int] = lambda lease, request_id: lease.task_of(
            request_id
        )

    def forward(self, step: StepBatch, lease: Any = None) -> torch.Tensor:
        """One row of logits per sampled sequence, with one certain token."""
        self.before(step, lease)
        self.steps.append(step)
        used = [block for sequence in step.sequences for block in sequence.block_table]
        assert len(used) == len(set(used)), "two requests share a block"
        logits = torch.zeros(step.num_sampled, VOCABULARY)
        rows = iter(logits)
        for sequence in step.sequences:
            history = self._write_and_read(sequence)
            task = None
            if sequence.uses_adapter:
                task = self.task_of(lease, sequence.request_id)
            if sequence.sample:
                next(rows)[next_token(history, task)] = 100.0
        return logits

    def _write_and_read(self, sequence: ScheduledSequence) -> list[int]:
        end = sequence.past_tokens + len(sequence.token_ids)
        assert len(sequence.block_table) * BLOCK_SIZE >= end, "the blocks do not hold the tokens"
        for position, token in enumerate(sequence.token_ids, sequence.past_tokens):
            block = sequence.block_table[position // BLOCK_SIZE]
            if position % BLOCK_SIZE == 0:
                self.blocks.device[block] = [None] * BLOCK_SIZE
            self.blocks.device[block][position % BLOCK_SIZE] = token
        history: list[int] = []
        for position in range(end):
            block = sequence.block_table[position // BLOCK_SIZE]
            stored = self.blocks.device[block][position % BLOCK_SIZE]
            assert stored is not None, "a token that nobody computed is read"
            history.append(stored)
        return history


class EngineBench:
    """An engine core with its parts.

    Attributes:
        kv: Blocks of `BLOCK_SIZE` tokens.
        runner: Computes.
        scheduler: Under test.
        live: The engine's live requests.
        window: In front of the adapters; None without them.
        core: Under test.
        outputs: What the scheduler decided so far.
    """

    def __init__(
        self,
        peft: Any,
        *,
        num_blocks: int = 16,
        host_blocks: int = 16,
        window_size: int = 16,
        max_num_tokens: int = 32,
        max_skip_passes: int = 8,
        chunked: bool = True,
        **options: Any,
    ) -> None:
        options = {"policy": "max_utilization", "max_batch_size": 8} | options
        self.peft = peft
        self.runner = RememberingRunner(RememberedBlocks())
        self.kv = KVCacheManager(
            num_blocks, BLOCK_SIZE, num_host_blocks=host_blocks, copier=self.runner.blocks
        )
        self.scheduler = KVCacheV2Scheduler(
            self.kv,
            peft,
            max_num_tokens=max_num_tokens,
            enable_chunked_prefill=chunked,
            max_skip_passes=max_skip_passes,
            **options,
        )
        self.live = LiveRequests(
            self.kv, peft, max_num_tokens=max_num_tokens, enable_chunked_prefill=chunked
        )
        self.window = None
        if peft is not None:
            self.window = AdmissionWindow(peft, size=window_size, max_skip_passes=max_skip_passes)
        self.core = EngineCore(
            self.runner, self.scheduler, self.live, peft, self.window, eos_token_ids=frozenset()
        )
        self.outputs: list[Any] = []
        decide = self.scheduler.schedule_request

        def remember(*args: Any) -> Any:
            self.outputs.append(decide(*args))
            return self.outputs[-1]

        self.scheduler.schedule_request = remember  # type: ignore[method-assign]
        self._ids = iter(range(10**6))

    def use_tasks_of_requests(self) -> None:
        """For leases that do not know the tasks of their requests."""

        def task_of(lease: Any, request_id: int) -> int:
            request = self.live.get(request_id)
            assert request is not None
            assert request.lora_task_id is not None
            return request.lora_task_id

        self.runner.task_of = task_of

    def add(
        self,
        task: int | None = None,
        *,
        prompt: int | Sequence[int] = 4,
        max_tokens: int = 6,
        priority: int = 0,
    ) -> LlmRequest:
        """A new request."""
        request_id = next(self._ids)
        if isinstance(prompt, int):
            prompt = [(7 * request_id + 3 * i) % VOCABULARY for i in range(prompt)]
        request = LlmRequest(
            request_id,
            lora_task_id=task,
            priority=priority,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling_params=GREEDY,
        )
        self.core.add(request)
        return request

    def run(self, limit: int = 1000) -> list[LlmRequest]:
        """Steps until nobody is live; gives the requests in the order in which they ended."""
        ended: list[LlmRequest] = []
        for _ in range(limit):
            if not self.core.has_unfinished:
                assert self.kv.num_used_blocks == self.kv.num_suspended_blocks == 0
                return ended
            ended += [request for request in self.core.step() if request.has_ended]
            self.core.check_invariants()
        raise AssertionError(f"{len(self.live)} requests do not end")


def assert_undisturbed(request: LlmRequest) -> None:
    """The request finished, with the answer that it gets when it is alone."""
    assert request.state is RequestState.FINISHED, request.error
    expected = answer(request.prompt_token_ids, request.lora_task_id, request.max_tokens)
    assert request.output_token_ids == expected
