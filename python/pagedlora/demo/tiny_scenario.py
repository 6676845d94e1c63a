"""The demo on a tiny random model: nothing is downloaded, and it is over in seconds."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import nn

from pagedlora.demo.generated_adapters import (
    ALL_LINEAR,
    ATTENTION,
    FLEET_SHAPES,
    Q_V,
    AdapterShape,
    write_adapters,
)
from pagedlora.demo.scenario import Scenario, Workload
from pagedlora.model_config import LoraModelConfig

NUM_GENERATED = 40
STRENGTH = 0.8
WORKLOAD = Workload(
    answer_tokens=24,
    answer_rounds=3,
    stream_waves=3,
    wave_requests=24,
    stream_tokens=12,
    check_tokens=12,
    checked_generated=8,
    host_adapters=20,
)
SHOWN_SHAPES = {
    "rank-1": AdapterShape(1, Q_V),
    "rank-3": AdapterShape(3, ATTENTION),
    "rank-4": AdapterShape(4, ALL_LINEAR),
    "rank-8": AdapterShape(8, ("gate_proj", "o_proj")),
    "rank-12": AdapterShape(12, ALL_LINEAR),
    "rank-16": AdapterShape(16, ATTENTION),
    "rank-33": AdapterShape(33, ("down_proj", "v_proj")),
    "rank-64": AdapterShape(64, Q_V),
}
STREAM_QUESTIONS = ("abc", "What is this", "Hello there", "xyz xyz")
ALPHABET = string.ascii_letters + string.digits + " ."
"""One token per character: the model knows these 64 and nothing else."""


def tiny_scenario(scratch: Path, *, seed: int) -> Scenario:
    """Makes the adapters.

    Args:
        scratch: Gets the adapters, under 10 MB.
        seed: Of the adapters and of the stream; the model is always the same.
    """
    config = LoraModelConfig.from_module(tiny_model(torch.float32))
    shown = write_adapters(
        scratch / "shown", SHOWN_SHAPES.items(), config.modules, seed=seed, strength=STRENGTH
    )
    named_shapes = (
        (f"generated-{number:02}", shape)
        for number, shape in enumerate(islice(cycle(FLEET_SHAPES), NUM_GENERATED))
    )
    generated = write_adapters(
        scratch / "generated", named_shapes, config.modules, seed=seed + 1, strength=STRENGTH
    )
    return Scenario(
        title="a tiny random Llama (float32, 3 layers); its answers mean nothing",
        load_model=tiny_model,
        dtype=torch.float32,
        encode=_encode,
        decode=_decode,
        shown_kind="random",
        shown=shown,
        generated=generated,
        question="How do I make a good cup of tea",
        stream_questions=STREAM_QUESTIONS,
        workload=WORKLOAD,
        seed=seed,
    )


def tiny_model(dtype: torch.dtype) -> nn.Module:
    """A Llama with weights drawn so wide that its greedy answers vary; always the same one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                width = 1.0 if "embed" in name else 1.5 / math.sqrt(min(parameter.shape))
                parameter.copy_(width * torch.randn(parameter.shape, generator=generator))
    converted: nn.Module = model.to(dtype).eval()
    return converted


def _encode(question: str) -> list[int]:
    return [ALPHABET.index(character) for character in question]


def _decode(tokens: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)
