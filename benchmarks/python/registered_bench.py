"""What a step costs when 10 and when 10,000 adapters are registered.

A tiny model, so that a step is a few milliseconds of bookkeeping and the cost of anything that
grows with the number of adapters would stand out. That nothing does is counted in
tests/python/test_step_cost.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from benchmarks.python.harness import Case, Result, run_rounds
from transformers import LlamaConfig, LlamaForCausalLM

from pagedlora import LLM, KvCacheConfig, PeftCacheConfig, SamplingParams
from pagedlora.demo.generated_adapters import Q_V, AdapterShape, write_adapters

DIRECTORIES = 200
FEW, MANY = 10, 10_000
STEPS = 64
ROUNDS = 21


class _Engine:
    def __init__(self, num_registered: int, root: Path) -> None:
        self._llm = LLM(
            _tiny_llama(),
            peft_cache_config=PeftCacheConfig(host_cache_size="4MB", device_cache_size="4MB"),
            kv_cache_config=KvCacheConfig(num_blocks=256, block_size=16),
        )
        paths = _write_once(root, self._llm)
        for number in range(num_registered):
            self._llm.load_lora(f"adapter-{number}", paths[number % DIRECTORIES])
        spread = range(0, num_registered, max(num_registered // 8, 1))
        self._names = [f"adapter-{number}" for number in list(spread)[:8]]

    def run(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
        prompts = [[1 + number] * 4 for number in range(len(self._names))]
        outputs = self._llm.generate(prompts, params, self._names)
        assert [output.error for output in outputs] == [None] * len(prompts)

    def close(self) -> None:
        self._llm.close()


def measure() -> list[Result]:
    """The ratio of the step times."""
    with tempfile.TemporaryDirectory() as scratch:
        few, many = (_Engine(count, Path(scratch)) for count in (FEW, MANY))
        timings = run_rounds({"few": Case(few.run), "many": Case(many.run)}, ROUNDS, warm_up=2)
        few.close()
        many.close()
    times = [timings.median(case).cpu / STEPS * 1e3 for case in ("few", "many")]
    detail = f"{times[0]:.2f} ms and {times[1]:.2f} ms a step, 8 requests of a tiny model"
    title = f"step with {FEW} / step with {MANY:,} registered adapters"
    return [timings.result(title, "few", "many", None, detail)]


def _tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def _write_once(root: Path, llm: LLM) -> list[Path]:
    if not any(root.iterdir()):
        named = [(f"{number:04}", AdapterShape(4, Q_V)) for number in range(DIRECTORIES)]
        modules = llm.peft_cache_manager.model_config.modules
        write_adapters(root, named, modules, seed=3, strength=0.1)
    return sorted(root.iterdir())
