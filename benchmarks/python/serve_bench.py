"""Tokens per second of SmolLM2 in bfloat16: our engine, `generate()`, and PEFT's mixed batch."""

from __future__ import annotations

import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from benchmarks.python.harness import Case, Result, run_rounds
from transformers import AutoModelForCausalLM

from pagedlora import LLM, KvCacheConfig, PeftCacheConfig, SamplingParams
from pagedlora.demo.generated_adapters import ALL_LINEAR, Q_V, AdapterShape, write_adapters
from pagedlora.demo.smollm2 import fetch_smollm2

NEW_TOKENS = 32
ROUNDS = 5
PROMPT_LENGTHS = (5, 12, 20, 33, 46, 59, 72, 85, 98, 111, 124, 137, 150, 167, 184, 200)
SHAPES = tuple(
    AdapterShape(rank, targets) for rank in range(8, 65, 8) for targets in (Q_V, ALL_LINEAR)
)
"""16 adapters: ranks 8 to 64, half {q,v}, half all-linear, 209 MB together."""


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Ragged prompts of random tokens, in shuffled order of length."""
    generator = random.Random(0)
    lengths = list(PROMPT_LENGTHS)
    generator.shuffle(lengths)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


class Generate:
    """transformers' `generate()`, with or without PEFT, on a batch padded on the left."""

    def __init__(self, model_dir: Path, prompts: list[list[int]]) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        self.model.generation_config.eos_token_id = None  # every answer has NEW_TOKENS tokens
        longest = max(map(len, prompts))
        rows = [(longest - len(prompt), prompt) for prompt in prompts]
        self._input_ids = torch.tensor([[0] * padding + prompt for padding, prompt in rows])
        self._mask = torch.tensor([[0] * padding + [1] * len(prompt) for padding, prompt in rows])

    def load_adapters(self, paths: dict[str, Path]) -> None:
        """Puts PEFT around the model."""
        from peft import PeftModel

        (first, first_path), *others = paths.items()
        self.model = PeftModel.from_pretrained(
            self.model, first_path, adapter_name=first, autocast_adapter_dtype=False
        )
        for name, path in others:
            self.model.load_adapter(path, adapter_name=name, autocast_adapter_dtype=False)
        self.model.eval()

    def run(self, new_tokens: int = NEW_TOKENS, **adapter_names: Any) -> None:
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=self._input_ids,
                attention_mask=self._mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                **adapter_names,
            )
        assert output.shape[1] == self._input_ids.shape[1] + new_tokens


class Engine:
    """Our engine, with the adapters registered and room on the device for all."""

    def __init__(self, model_dir: Path, prompts: list[list[int]]) -> None:
        self._prompts = prompts
        self.llm = LLM(
            model_dir,
            peft_cache_config=PeftCacheConfig(host_cache_size="256MB", device_cache_size="256MB"),
            kv_cache_config=KvCacheConfig(size="256MB"),
        )

    def run(self, new_tokens: int = NEW_TOKENS, adapters: list[str] | None = None) -> None:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = self.llm.generate(self._prompts, params, adapters)
        assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)


def measure() -> list[Result]:
    """The three ratios, with prefill, and beside them what decoding alone is."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    model_dir = fetch_smollm2()
    prompts = make_prompts(49152)
    engine = Engine(model_dir, prompts)
    base, with_peft = Generate(model_dir, prompts), Generate(model_dir, prompts)
    with engine.llm, tempfile.TemporaryDirectory() as scratch:
        named = [(f"adapter-{number}", shape) for number, shape in enumerate(SHAPES)]
        modules = engine.llm.peft_cache_manager.model_config.modules
        paths = write_adapters(Path(scratch), named, modules, seed=2, strength=0.1)
        for name, path in paths.items():
            engine.llm.load_lora(name, path)
        with_peft.load_adapters(paths)
        names = list(paths)
        timings = run_rounds(
            {
                "generate": Case(base.run),
                "generate first": Case(lambda: base.run(1)),
                "base": Case(engine.run),
                "base first": Case(lambda: engine.run(1)),
                "mixed first": Case(lambda: engine.run(1, names)),
                "mixed": Case(lambda: engine.run(adapters=names)),
                "peft": Case(lambda: with_peft.run(adapter_names=names)),
            },
            ROUNDS,
        )
        assert engine.llm.peft_cache_manager.stats.device.tasks_evicted == 0

    for case in ("generate", "base", "mixed"):
        timings.subtract(f"{case} decode", case, f"{case} first")

    def detail(fast: str, slow: str, new_tokens: int = NEW_TOKENS) -> str:
        speeds = [len(prompts) * new_tokens / timings.median(case).cpu for case in (fast, slow)]
        return f"{speeds[0]:.0f} against {speeds[1]:.0f} new tokens/s"

    return [
        timings.result(
            "base model: engine / generate()", "generate", "base", 1.05, detail("base", "generate")
        ),
        timings.result(
            "  of which decoding, after the first token",
            "generate decode",
            "base decode",
            None,
            detail("base decode", "generate decode", NEW_TOKENS - 1),
        ),
        timings.result(
            "16 adapters / base, both engine", "base", "mixed", 0.75, detail("mixed", "base")
        ),
        timings.result(
            "  of which decoding, after the first token",
            "base decode",
            "mixed decode",
            None,
            detail("mixed decode", "base decode", NEW_TOKENS - 1),
        ),
        timings.result(
            "16 adapters: engine / PEFT mixed batch", "peft", "mixed", 3.0, detail("mixed", "peft")
        ),
    ]
