"""Part 2: a mixed stream over all adapters, and its speed against the base model alone."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from rich.console import Console
from rich.progress import track
from torch import nn

from pagedlora.demo.fleet import ask, measure_fleet, open_engine
from pagedlora.demo.report import print_cache, print_heading
from pagedlora.demo.scenario import Scenario
from pagedlora.engine.llm import LLM
from pagedlora.sizes import format_size

DEVICE_ADAPTERS = 4
BATCH_SIZE = 16
_BASE_SHARE = 0.1
_POPULARITY_EXPONENT = 0.8


@dataclass
class _Speed:
    """Tokens and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run_stream(scenario: Scenario, model: nn.Module, console: Console) -> None:
    """Sends waves of requests for adapters of Zipf-like popularity and prints what happened.

    Every wave runs twice in the same engine, one time mixed and one time on the base model alone,
    by turns, so that both speeds meet the same machine.

    Args:
        scenario: Adapters and amounts.
        model: The base model; given back unchanged.
        console: Where to print.
    """
    work = scenario.workload
    fleet = measure_fleet(model, scenario.adapters, scenario.dtype)
    num_requests = work.stream_waves * work.wave_requests
    device_bytes = fleet.room_for_largest(DEVICE_ADAPTERS)
    host_bytes = fleet.room_for_average(work.host_adapters)
    print_heading(
        console, f"2. A mixed stream: {num_requests} requests over {len(fleet.infos)} adapters"
    )
    console.print(
        f"On the device: room for {DEVICE_ADAPTERS} of the largest ({format_size(device_bytes)}). "
        f"In host: room for about {work.host_adapters} ({format_size(host_bytes)})."
    )
    adapters = choose_adapters(list(fleet.infos), num_requests, scenario.seed)
    prompts = [scenario.encode(question) for question in scenario.stream_questions]
    with open_engine(
        model,
        fleet,
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        batch_size=BATCH_SIZE,
        answer_tokens=work.stream_tokens,
    ) as llm:
        mixed, base = _run_waves(llm, scenario, prompts, adapters, console)
        print_cache(console, llm, fleet, sorted({name for name in adapters if name}))
    console.print(
        f"Speed: {mixed.tokens_per_second:.0f} tokens/s mixed, {base.tokens_per_second:.0f} "
        f"tokens/s on the base model alone (same engine, same prompts, "
        f"{mixed.tokens} tokens each): {mixed.tokens_per_second / base.tokens_per_second:.2f} "
        "of its speed."
    )


def choose_adapters(names: Sequence[str], count: int, seed: int) -> list[str | None]:
    """The adapter of each request: one in ten is None, the base; few adapters are asked often."""
    chooser = random.Random(seed)
    by_popularity = chooser.sample(names, len(names))
    weights = [(place + 1) ** -_POPULARITY_EXPONENT for place in range(len(names))]
    chosen = chooser.choices(by_popularity, weights, k=count)
    return [None if chooser.random() < _BASE_SHARE else name for name in chosen]


def _run_waves(
    llm: LLM,
    scenario: Scenario,
    prompts: Sequence[list[int]],
    adapters: Sequence[str | None],
    console: Console,
) -> tuple[_Speed, _Speed]:
    """Speeds of the mixed stream and of the base alone."""
    work = scenario.workload
    mixed, base = _Speed(), _Speed()
    ask(llm, prompts[:1], [None], max_tokens=2)  # what only the first step costs
    size = work.wave_requests
    for start in track(
        range(0, len(adapters), size),
        f"Serving {work.stream_waves} waves of {size} requests, mixed and on the base alone",
        console=console,
    ):
        wave = adapters[start : start + size]
        wave_prompts = list(islice(cycle(prompts), size))
        for speed, who in ((mixed, wave), (base, [None] * size)):
            began = time.perf_counter()
            answers = ask(llm, wave_prompts, who, max_tokens=work.stream_tokens)
            speed.seconds += time.perf_counter() - began
            speed.tokens += sum(map(len, answers))
    return mixed, base
