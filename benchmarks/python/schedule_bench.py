"""What scheduling costs, and what a small device tier costs with it."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.python.harness import Case, Result, run_rounds
from benchmarks.python.serve_bench import SHAPES, make_prompts

from pagedlora import (
    LLM,
    KvCacheConfig,
    KVCacheManager,
    KVCacheV2Scheduler,
    LlmRequest,
    PagedLoraError,
    PeftCacheConfig,
    PeftCacheManager,
    SamplingParams,
    SchedulerConfig,
    probe_adapter,
)
from pagedlora.demo.generated_adapters import Q_V, AdapterShape, write_adapters
from pagedlora.demo.smollm2 import fetch_smollm2

ACTIVE, ADAPTERS, BATCH = 256, 64, 16
PASSES, STEPS = 200, 20
STREAM, STREAM_TOKENS, FEW = 64, 16, 4
ROUNDS = 5


class Passes:
    """Passes over 256 active requests of 64 adapters: 64 decode, the others wait and are ready."""

    def __init__(self, peft: PeftCacheManager, task_ids: Sequence[int]) -> None:
        kv = KVCacheManager(4 * ACTIVE, 16)
        self._requests = [
            LlmRequest(
                number,
                lora_task_id=task_ids[number % len(task_ids)],
                prompt_token_ids=range(30),
                max_tokens=30,
            )
            for number in range(ACTIVE)
        ]
        for request in self._requests:
            peft.add_request_peft(request)
        assert peft.wait_idle()
        for request in self._requests[: ACTIVE // 4]:
            assert kv.try_allocate(request, 60)
            request.num_computed_tokens = 30
            request.output_token_ids = [0]
        self._peft = peft
        self._scheduler = KVCacheV2Scheduler(
            kv, peft, max_batch_size=ACTIVE // 4, max_num_tokens=2048
        )

    def run(self) -> None:
        for _ in range(PASSES):
            output = self._scheduler.schedule_request(self._requests)
            assert len(output.generation) == ACTIVE // 4

    def close(self) -> None:
        for request in self._requests:
            self._peft.mark_request_done(request)


class Steps:
    """Decode steps of SmolLM2 with 16 sequences."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]]) -> None:
        assert llm._parts is not None
        self._core: Any = llm._parts.core
        self._prompts = prompts
        self._ids = itertools.count(10**6)

    def prepare(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=STEPS + 8, ignore_eos=True)
        requests = [
            LlmRequest(
                next(self._ids),
                prompt_token_ids=prompt,
                max_tokens=params.max_tokens,
                sampling_params=params,
            )
            for prompt in self._prompts
        ]
        for request in requests:
            self._core.add(request)
        while not all(request.output_token_ids for request in requests):
            self._core.step()

    def run(self) -> None:
        for _ in range(STEPS):
            self._core.step()

    def finish(self) -> None:
        self._core.abort_all(PagedLoraError("the benchmark has enough"))


class Stream:
    """64 requests of 16 adapters in shuffled order, 16 at a time."""

    def __init__(self, model_dir: Path, paths: dict[str, Path], device_bytes: int) -> None:
        self._llm = LLM(
            model_dir,
            peft_cache_config=PeftCacheConfig(
                host_cache_size="256MB", device_cache_size=device_bytes
            ),
            kv_cache_config=KvCacheConfig(size="256MB"),
            scheduler_config=SchedulerConfig(max_batch_size=BATCH),
        )
        for name, path in paths.items():
            self._llm.load_lora(name, path)
        generator = random.Random(1)
        prompts = make_prompts(49152)
        self._prompts = [prompts[generator.randrange(len(prompts))] for _ in range(STREAM)]
        self._names = [name for name in paths for _ in range(STREAM // len(paths))]
        generator.shuffle(self._names)

    def run(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
        outputs = self._llm.generate(self._prompts, params, self._names)
        assert all(len(output.outputs[0].token_ids) == STREAM_TOKENS for output in outputs)

    def close(self) -> None:
        self._llm.close()


def measure() -> list[Result]:
    """The cost of a pass beside a step's, and the speed of a stream through little room."""
    model_dir = fetch_smollm2()
    with tempfile.TemporaryDirectory() as scratch:
        return [_measure_pass(model_dir, Path(scratch)), _measure_stream(model_dir, Path(scratch))]


def _measure_pass(model_dir: Path, scratch: Path) -> Result:
    with LLM(
        model_dir,
        peft_cache_config=PeftCacheConfig(host_cache_size="256MB", device_cache_size="256MB"),
        kv_cache_config=KvCacheConfig(size="256MB"),
    ) as llm:
        named = [(f"small-{number}", AdapterShape(4, Q_V)) for number in range(ADAPTERS)]
        modules = llm.peft_cache_manager.model_config.modules
        paths = write_adapters(scratch, named, modules, seed=5, strength=0.1)
        task_ids = [llm.load_lora(name, path).task_id for name, path in paths.items()]
        passes = Passes(llm.peft_cache_manager, task_ids)
        steps = Steps(llm, make_prompts(49152))
        timings = run_rounds(
            {
                "steps": Case(steps.run, steps.prepare, steps.finish),
                "passes": Case(passes.run),
            },
            ROUNDS,
        )
        passes.close()
    timings.scale("5 % of a step", "steps", 0.05 / STEPS)
    timings.scale("a pass", "passes", 1 / PASSES)
    times = [timings.median(case).cpu * 1e3 for case in ("a pass", "5 % of a step")]
    return timings.result(
        f"5 % of a decode step of {BATCH} / a pass over {ACTIVE} requests",
        "5 % of a step",
        "a pass",
        1.0,
        f"{times[0]:.2f} ms against {times[1]:.2f} ms",
    )


def _measure_stream(model_dir: Path, scratch: Path) -> Result:
    named = [(f"adapter-{number}", shape) for number, shape in enumerate(SHAPES)]
    probe = LLM(model_dir, kv_cache_config=KvCacheConfig(num_blocks=8))
    modules = probe.peft_cache_manager.model_config.modules
    probe.close()
    paths = write_adapters(scratch, named, modules, seed=2, strength=0.1)
    sizes = sorted(probe_adapter(path).parameters * 2 for path in paths.values())
    little = Stream(model_dir, paths, int(sum(sizes[-FEW:]) * 1.01))
    much = Stream(model_dir, paths, int(sum(sizes) * 1.05))
    timings = run_rounds({"little": Case(little.run), "much": Case(much.run)}, ROUNDS)
    little.close()
    much.close()
    speeds = [STREAM * STREAM_TOKENS / timings.median(case).cpu for case in ("little", "much")]
    return timings.result(
        f"device room for {FEW} adapters / for all {len(SHAPES)}",
        "much",
        "little",
        0.9,
        f"{speeds[0]:.0f} against {speeds[1]:.0f} new tokens/s, {STREAM} requests",
    )
