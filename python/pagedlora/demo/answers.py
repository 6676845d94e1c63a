"""Part 1: every shown adapter answers the same question, from room for four of them."""

from __future__ import annotations

from rich.console import Console
from rich.progress import track
from torch import nn

from pagedlora.demo.fleet import ask, measure_fleet, open_engine
from pagedlora.demo.report import print_answers, print_cache, print_heading
from pagedlora.demo.scenario import Scenario

DEVICE_ADAPTERS = 4
HOST_ADAPTERS = 5


def show_answers(scenario: Scenario, model: nn.Module, console: Console) -> None:
    """Asks the base and all shown adapters in one batch, several times, and prints the answers.

    The device tier has room for the 4 largest of them and the host tier for the 5 largest, so
    that later rounds find adapters evicted and read them again, from the host or from the file.

    Args:
        scenario: What to ask whom.
        model: The base model; given back unchanged.
        console: Where to print.
    """
    work = scenario.workload
    names: list[str | None] = [None, *scenario.shown]
    print_heading(
        console,
        f"1. {len(scenario.shown)} {scenario.shown_kind} adapters and the base in one batch, "
        f"in room for {DEVICE_ADAPTERS} of them",
    )
    fleet = measure_fleet(model, scenario.shown, scenario.dtype)
    prompt = scenario.encode(scenario.question)
    with open_engine(
        model,
        fleet,
        host_bytes=fleet.room_for_largest(HOST_ADAPTERS),
        device_bytes=fleet.room_for_largest(DEVICE_ADAPTERS),
        batch_size=len(names),
        answer_tokens=work.answer_tokens,
    ) as llm:
        rounds = [
            ask(
                llm,
                [prompt] * len(names),
                names,
                max_tokens=work.answer_tokens,
                ignore_eos=False,
            )
            for _ in track(
                range(work.answer_rounds),
                f"Asking everyone {work.answer_rounds} times",
                console=console,
            )
        ]
        texts = {
            name or "base model": scenario.decode(tokens)
            for name, tokens in zip(names, rounds[0], strict=True)
        }
        print_answers(console, scenario.question, texts)
        print_cache(console, llm, fleet, list(scenario.shown))
