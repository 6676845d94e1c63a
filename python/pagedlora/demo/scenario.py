"""What the demo runs on: a base model, its adapters, the questions and how much of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


class DemoError(Exception):
    """The demo cannot start or go on; the message says what to do about it."""


@dataclass(frozen=True)
class Workload:
    """How much the demo asks for.

    Attributes:
        answer_tokens: Most tokens of an answer that is shown.
        answer_rounds: How often every shown adapter is asked.
        stream_waves: Waves of the mixed stream; each runs mixed, then on the base alone.
        wave_requests: Requests of a wave, all given at once.
        stream_tokens: Tokens of every answer of the stream.
        check_tokens: Tokens of every answer that PEFT judges.
        checked_generated: Generated adapters that PEFT judges, beside all the shown ones.
        host_adapters: Room of the host tier during the stream, in adapters of average size.
    """

    answer_tokens: int
    answer_rounds: int
    stream_waves: int
    wave_requests: int
    stream_tokens: int
    check_tokens: int
    checked_generated: int
    host_adapters: int


@dataclass(frozen=True)
class Scenario:
    """One setting of the demo.

    Attributes:
        title: The base model, for people.
        load_model: Makes a fresh base model of a dtype on the CPU.
        dtype: In which the answers and the stream are computed.
        encode: A question as the token ids of a whole prompt.
        decode: Token ids as text.
        shown_kind: What the shown adapters are: "trained" or "random".
        shown: Name to directory of the adapters whose answers are shown.
        generated: Name to directory of the adapters that only fill the stream.
        question: What every shown adapter is asked.
        stream_questions: What the stream asks, again and again.
        workload: How much.
        seed: Of the stream and of the choice of adapters to check.
    """

    title: str
    load_model: Callable[[torch.dtype], nn.Module]
    dtype: torch.dtype
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    shown_kind: str
    shown: dict[str, Path]
    generated: dict[str, Path]
    question: str
    stream_questions: Sequence[str]
    workload: Workload
    seed: int

    @property
    def adapters(self) -> dict[str, Path]:
        """All adapters, the shown ones first."""
        return {**self.shown, **self.generated}
