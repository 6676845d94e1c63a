"""The demo on a real model: SmolLM2-135M, 8 trained adapters and 200 generated ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from pagedlora.demo.generated_adapters import FLEET_SHAPES, write_adapters
from pagedlora.demo.scenario import DemoError, Scenario, Workload
from pagedlora.demo.smollm2 import DEMO_PROMPT, MODEL_NAME, fetch_smollm2
from pagedlora.model_config import LoraModelConfig
from pagedlora.shown import counted
from pagedlora.sizes import format_size

NUM_TRAINED = 8
NUM_GENERATED = 200
STRENGTH = 1.1
"""Enough that answers differ from the base's, and little enough that they stay words."""
SCRATCH_BYTES = 600 * 2**20
WORKLOAD = Workload(
    answer_tokens=32,
    answer_rounds=2,
    stream_waves=4,
    wave_requests=24,
    stream_tokens=12,
    check_tokens=16,
    checked_generated=8,
    host_adapters=32,
)
STREAM_QUESTIONS = (
    "What should I pack for a trip to the mountains?",
    "Name three fruits that are red.",
    "Why is the sky blue?",
    "Write one line about the sea.",
    "How many days has a week?",
    "What does a librarian do?",
)
_ADAPTERS_PLACE = Path("examples", "adapters")


def smollm2_scenario(
    scratch: Path, console: Console, *, model: Path | None, adapters: Path | None, seed: int
) -> Scenario:
    """Fetches the model the first time, finds the trained adapters and writes the others.

    Args:
        scratch: Gets the generated adapters, about 560 MB.
        console: Where progress goes.
        model: Directory of the model; None: fetched and cached.
        adapters: Directory of the trained adapters; None: see `find_trained_adapters`.
        seed: Of the generated adapters and of the stream.

    Raises:
        DemoError: The trained adapters were not found, the model could not be fetched, or the
            disk is too full.
    """
    from transformers import AutoConfig, AutoTokenizer

    shown = find_trained_adapters(adapters)
    directory = _model_directory(model, console)
    config = LoraModelConfig.from_hf_config(AutoConfig.from_pretrained(directory))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    dtype = quick_dtype()
    type_name = str(dtype).removeprefix("torch.")
    return Scenario(
        title=f"{MODEL_NAME} ({type_name}, dequantised from Q4_1)"
        if model is None
        else f"{model} ({type_name})",
        load_model=lambda dtype: _load_model(directory, dtype),
        dtype=dtype,
        encode=lambda question: _chat_tokens(tokenizer, question),
        decode=lambda tokens: _decode(tokenizer, tokens),
        shown_kind="trained",
        shown=shown,
        generated=_write_generated(scratch, console, config, seed),
        question=DEMO_PROMPT,
        stream_questions=STREAM_QUESTIONS,
        workload=WORKLOAD,
        seed=seed,
    )


def quick_dtype() -> torch.dtype:
    """bfloat16, the model's own, but where torch has no fast products of it on this processor."""
    is_slow = torch.backends.cpu.get_cpu_capability() in {"AVX2", "DEFAULT"}
    return torch.float32 if is_slow else torch.bfloat16


def _model_directory(given: Path | None, console: Console) -> Path:
    """The given directory, or the one that the model is fetched to."""
    if given is None:
        try:
            return fetch_smollm2(console=console)
        except RuntimeError as error:
            raise DemoError(str(error)) from error
    if not (given / "config.json").is_file():
        raise DemoError(f"{given} holds no config.json: name a model directory with --model")
    return given


def _load_model(directory: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return loaded.eval()


def _write_generated(
    scratch: Path, console: Console, config: LoraModelConfig, seed: int
) -> dict[str, Path]:
    """Writes the generated adapters; name to directory."""
    _check_disk(scratch)
    named_shapes = (
        (f"generated-{number:03}", shape)
        for number, shape in enumerate(islice(cycle(FLEET_SHAPES), NUM_GENERATED))
    )
    return write_adapters(
        scratch,
        track(
            named_shapes,
            f"Writing {NUM_GENERATED} adapters of random content",
            total=NUM_GENERATED,
            console=console,
        ),
        config.modules,
        seed=seed,
        strength=STRENGTH,
    )


def _check_disk(scratch: Path) -> None:
    free = shutil.disk_usage(scratch).free
    if free < SCRATCH_BYTES:
        raise DemoError(
            f"{scratch.parent} has {format_size(free)} free and the generated adapters need "
            f"{format_size(SCRATCH_BYTES)}: make room, or set PAGEDLORA_CACHE to another directory"
        )


def find_trained_adapters(given: Path | None) -> dict[str, Path]:
    """The trained adapters by name.

    They are part of the repository, not of the package. They are looked for in `given`, else in
    `examples/adapters` of the current directory, of those above it, and of the checkout that this
    file lies in.

    Raises:
        DemoError: There are not `NUM_TRAINED` of them.
    """
    if given is not None:
        places = [given]
    else:
        here = Path.cwd()
        roots = [here, *here.parents, Path(__file__).resolve().parents[3]]
        places = [root / _ADAPTERS_PLACE for root in roots]
    for place in places:
        found = {path.parent.name: path.parent for path in place.glob("*/adapter_config.json")}
        if len(found) == NUM_TRAINED:
            return dict(sorted(found.items()))
    if given is not None:
        raise DemoError(
            f"{given} has {counted(len(found), 'adapter')}, each a directory with an "
            f"adapter_config.json, and the demo needs {NUM_TRAINED}: leave --adapters out in a "
            "checkout of pagedlora, which has them, or try --tiny, which needs none"
        )
    raise DemoError(
        f"the {NUM_TRAINED} trained adapters are not in {_ADAPTERS_PLACE} here or above: run this "
        "in a checkout of pagedlora, name their directory with --adapters DIR, or try --tiny, "
        "which needs neither files nor network"
    )


def _chat_tokens(tokenizer: Any, question: str) -> list[int]:
    """The prompt as the adapters were trained on it."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text))


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
