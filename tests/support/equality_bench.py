"""Engines for the equality suites: their requests, their room, and the logits they compute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from tests.support.peft_oracle import (
    ADAPTERS,
    Answer,
    Case,
    PeftOracle,
    assert_answers_differ,
    assert_equal_to_peft,
)
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model

from pagedlora import (
    LLM,
    KvCacheConfig,
    LoraConfig,
    PeftCacheConfig,
    RequestOutput,
    SamplingParams,
    SchedulerConfig,
    probe_adapter,
)
from pagedlora.engine.step import StepBatch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")
NUM_TOKENS = 12
PROMPT_LENGTHS = (3, 11, 27)
MAX_NUM_TOKENS = 16
"""Tokens of a step: less than the longest prompt, so that it is computed in chunks."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
_ROOM_FOR_ALL = 2**22
_PROMPT_SEEDS = {"llama": 0, "qwen2": 0, "qwen3": 6, "mistral": 0, "gemma2": 12}
"""Of prompts to which no model repeats itself; `assert_answers_differ` judges that."""


class RecordingRunner:
    """A `ModelRunner` whose steps and logits are kept.

    Attributes:
        steps: In the order in which they were computed.
    """

    def __init__(self, runner: Any) -> None:
        self.steps: list[StepBatch] = []
        self._runner = runner
        self._rows: dict[int, list[torch.Tensor]] = {}

    @property
    def stream(self) -> int | None:
        """As `ModelRunner.stream`."""
        stream: int | None = self._runner.stream
        return stream

    def forward(self, step: StepBatch, lease: Any = None) -> torch.Tensor:
        """As `ModelRunner.forward`."""
        logits: torch.Tensor = self._runner.forward(step, lease)
        self.steps.append(step)
        sampled = [sequence for sequence in step.sequences if sequence.sample]
        for sequence, row in zip(sampled, logits, strict=True):
            self._rows.setdefault(sequence.request_id, []).append(row.clone())
        return logits

    def logits(self, request_id: int) -> torch.Tensor:
        """`[tokens of the answer, vocabulary]`."""
        return torch.stack(self._rows[request_id])


class Bench:
    """An engine under test with its adapters registered by name.

    Attributes:
        llm: The engine.
        recorder: What it computed.
    """

    def __init__(self, llm: LLM, adapters: Mapping[str, Path]) -> None:
        self.llm = llm
        self.recorder = RecordingRunner(llm._parts.core._runner)
        llm._parts.core._runner = self.recorder
        for name, path in adapters.items():
            llm.load_lora(name, path)

    def ask(
        self, cases: Sequence[Case], params: SamplingParams | list[SamplingParams] = GREEDY
    ) -> list[Answer]:
        """Answers all cases in one call; fails if one of them fails."""
        outputs = self.generate(cases, params)
        assert [output.error for output in outputs] == [None] * len(cases)
        return [
            Answer(output.outputs[0].token_ids, self.recorder.logits(output.request_id))
            for output in outputs
        ]

    def generate(
        self, cases: Sequence[Case], params: SamplingParams | list[SamplingParams] = GREEDY
    ) -> list[RequestOutput]:
        """The engine's results for all cases."""
        prompts = [list(case.prompt) for case in cases]
        return self.llm.generate(prompts, params, [case.adapter for case in cases])

    def check(self) -> None:
        """Fails if anything leaked; between calls nothing may be owned."""
        self.llm._parts.core.check_invariants()
        cache = self.llm.peft_cache_manager
        cache.check_invariants()
        assert not cache.active_tasks
        assert not cache.paused_tasks
        assert not self.llm._parts.core.has_unfinished


@contextmanager
def open_bench(
    family: str,
    adapters: Mapping[str, Path],
    *,
    device_adapters: int | None = None,
    host_adapters: int | None = None,
    max_batch_size: int = 8,
    num_blocks: int = 96,
    host_blocks: int = 0,
    policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict",
    dtype: torch.dtype = torch.float32,
    lora_targets: list[str] | Literal["all-linear"] = "all-linear",
    device: str = "cpu",
) -> Iterator[Bench]:
    """An engine on a tiny model, checked and closed at the end.

    Args:
        family: Of the model.
        adapters: Name to directory.
        device_adapters: Room on the device for so many of the largest; None: for all.
        host_adapters: The same for the host tier.
        max_batch_size: Requests that run at once.
        num_blocks: KV blocks of 4 tokens.
        host_blocks: Those for suspended requests.
        policy: Of the scheduler.
        dtype: Of the model.
        lora_targets: Modules that may carry LoRA.
        device: Where the model lies.
    """
    llm = LLM(
        build_tiny_model(family, dtype=dtype).to(device),
        device=device,
        lora_config=LoraConfig(lora_target_modules=lora_targets),
        peft_cache_config=PeftCacheConfig(
            device_cache_size=room_for_largest(adapters, device_adapters, dtype),
            host_cache_size=room_for_largest(adapters, host_adapters, dtype),
        ),
        kv_cache_config=KvCacheConfig(num_blocks=num_blocks, block_size=4, host_blocks=host_blocks),
        scheduler_config=SchedulerConfig(
            policy=policy, max_batch_size=max_batch_size, max_num_tokens=MAX_NUM_TOKENS
        ),
        enable_stats=True,
    )
    with llm:
        bench = Bench(llm, adapters)
        yield bench
        if llm._parts is not None:  # not closed by the test
            bench.check()


def room_for_largest(
    adapters: Mapping[str, Path], count: int | None, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes of the `count` largest of these adapters; None: more than all."""
    if count is None:
        return _ROOM_FOR_ALL
    sizes = sorted(probe_adapter(path).parameters * dtype.itemsize for path in adapters.values())
    return sum(sizes[-count:])


def make_cases(family: str) -> list[Case]:
    """The base and every adapter with the same prompts, in an arbitrary fixed order."""
    generator = random.Random(_PROMPT_SEEDS[family])
    prompts = [
        tuple(generator.randrange(VOCAB_SIZE) for _ in range(length)) for length in PROMPT_LENGTHS
    ]
    cases = [Case(name, prompt) for name in (None, *ADAPTERS) for prompt in prompts]
    generator.shuffle(cases)
    return cases


def assert_answers_as_peft(
    family: str,
    adapters_of: Callable[[str], dict[str, Path]],
    oracle_of: Callable[[str], PeftOracle],
) -> None:
    """An engine with device room for the two largest adapters answers all cases as PEFT does."""
    cases = make_cases(family)
    with open_bench(family, adapters_of(family), device_adapters=2) as bench:
        answers = bench.ask(cases)
    assert_equal_to_peft(oracle_of(family), cases, answers)
    assert_answers_differ(cases, answers)
