"""Part 3: PEFT, in float32 and with one adapter at a time, judges the answers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from pagedlora.demo.fleet import Fleet, ask, describe, measure_fleet, open_engine
from pagedlora.demo.report import print_heading
from pagedlora.demo.scenario import DemoError, Scenario

DEVICE_ADAPTERS = 2
HOST_ADAPTERS = 3
PASSES = 2
BATCH_SIZE = 6
TOLERANCE = 1e-4
"""How far PEFT's logit of our token may lie below its largest one: rounding, and nothing else."""
MIN_DISTINCT_TOKENS = 4
_BASE = "base model"


@dataclass(frozen=True)
class OurAnswers:
    """What the engine answered to one question.

    Attributes:
        answers: Name (None: the base) to its answers, one per pass.
        read_again: Names that were in no tier any more when they were asked again.
        summary: How often the cache evicted and read again, for people.
    """

    answers: dict[str | None, list[list[int]]]
    read_again: frozenset[str]
    summary: str


@dataclass(frozen=True)
class Verdict:
    """PEFT's opinion of one adapter's answers.

    Attributes:
        gap: Most that PEFT's logit of our token lies below its largest one.
        fault: What is wrong; "" if nothing is.
    """

    gap: float
    fault: str


def check_against_peft(scenario: Scenario, console: Console) -> bool:
    """Compares the shown adapters and some generated ones with PEFT, most after a re-read.

    Args:
        scenario: What to check.
        console: Where to print.

    Returns:
        Whether every answer is what PEFT gives, and the check could have failed.

    Raises:
        DemoError: No adapter was evicted and read again, so that the check would prove little.
    """
    print_heading(console, "3. Are these the right answers? PEFT decides (float32, one by one)")
    model = scenario.load_model(torch.float32)
    paths = choose_checked(scenario, model)
    fleet = measure_fleet(model, paths, torch.float32)
    prompt = scenario.encode(scenario.question)
    ours = our_answers(scenario, model, fleet, prompt)
    console.print(
        f"Answered {PASSES} times in room for {DEVICE_ADAPTERS} adapters on the device and "
        f"{HOST_ADAPTERS} in host: {ours.summary}."
    )
    del model  # PEFT judges on a model that the engine never touched
    base = scenario.load_model(torch.float32)
    verdicts: dict[str | None, Verdict] = {}
    for name in track([None, *paths], "Asking PEFT", console=console):
        adapter = None if name is None else paths[name]
        verdicts[name] = _judge(base, adapter, prompt, ours.answers[name], scenario)
    _print_verdicts(console, fleet, ours, verdicts)
    faults = [f"{name or _BASE}: {v.fault}" for name, v in verdicts.items() if v.fault]
    faults += blind_spots({name or _BASE: answers[-1] for name, answers in ours.answers.items()})
    for fault in faults:
        console.print(f"MISMATCH  {fault}", style="bold red", markup=False)
    if not faults:
        console.print(
            f"All {len(paths)} adapters and the base answer as PEFT does (each of our tokens is "
            f"PEFT's best within {TOLERANCE:g}), {len(ours.read_again)} of them after they were "
            "evicted from both tiers and read again; no two answers are equal.",
            style="bold green",
        )
    return not faults


def choose_checked(scenario: Scenario, model: nn.Module) -> dict[str, Path]:
    """All shown adapters, then generated ones of shapes as different as there are."""
    names = list(scenario.generated)
    random.Random(scenario.seed).shuffle(names)
    infos = measure_fleet(model, scenario.generated, torch.float32).infos
    by_shape: dict[tuple[str, str], str] = {}
    for name in names:
        by_shape.setdefault(describe(infos[name]), name)
    chosen = sorted(list(by_shape.values())[: scenario.workload.checked_generated])
    return {**scenario.shown, **{name: scenario.generated[name] for name in chosen}}


def our_answers(
    scenario: Scenario, model: nn.Module, fleet: Fleet, prompt: list[int]
) -> OurAnswers:
    """Asks the base and the whole fleet twice, in room for a few of them.

    Raises:
        DemoError: A request failed, or the cache never evicted or never read again.
    """
    names: list[str | None] = [None, *fleet.infos]
    answers: dict[str | None, list[list[int]]] = {name: [] for name in names}
    with open_engine(
        model,
        fleet,
        host_bytes=fleet.room_for_largest(HOST_ADAPTERS),
        device_bytes=fleet.room_for_largest(DEVICE_ADAPTERS),
        batch_size=BATCH_SIZE,
        answer_tokens=scenario.workload.check_tokens,
    ) as llm:
        read_again: set[str] = set()
        batches = [names[at : at + BATCH_SIZE] for at in range(0, len(names), BATCH_SIZE)]
        for batch in batches * PASSES:
            absent = {info.name for info in llm.list_loras() if not info.tiers}
            read_again |= {name for name in batch if name in absent and answers[name]}
            results = ask(
                llm, [prompt] * len(batch), batch, max_tokens=scenario.workload.check_tokens
            )
            for name, tokens in zip(batch, results, strict=True):
                answers[name].append(tokens)
        stats = llm.peft_cache_manager.stats
    evictions = (stats.device.tasks_evicted, stats.host.tasks_evicted)
    if not (all(evictions) and read_again and stats.source_rereads >= len(read_again)):
        raise DemoError(
            f"{evictions[0]} adapters were evicted from the device, {evictions[1]} from host and "
            f"{stats.source_rereads} read again: the check needs all three to happen"
        )
    summary = (
        f"{evictions[0]} evictions from the device, {evictions[1]} from host, "
        f"{stats.source_rereads} re-reads from file"
    )
    return OurAnswers(answers, frozenset(read_again), summary)


def blind_spots(answers: Mapping[str, Sequence[int]]) -> Iterable[str]:
    """Why the comparison could not have failed: equal answers, or answers without variety."""
    seen: dict[tuple[int, ...], str] = {}
    for name, tokens in answers.items():
        twin = seen.setdefault(tuple(tokens), name)
        if twin != name:
            yield f"{name}: answers exactly as {twin} does, so a mix-up of the two would not show"
        if len(set(tokens)) < MIN_DISTINCT_TOKENS:
            yield f"{name}: has only {len(set(tokens))} different tokens in its answer"


def _judge(
    base: nn.Module,
    adapter: Path | None,
    prompt: list[int],
    answers: Sequence[list[int]],
    scenario: Scenario,
) -> Verdict:
    """PEFT's logits along our answers, on the base with or without an adapter."""
    from peft import PeftModel

    model: Any = base
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            model = PeftModel.from_pretrained(base, adapter).eval()
    try:
        verdicts = [_follow(model, prompt, answer, scenario) for answer in _distinct(answers)]
    finally:
        if adapter is not None:
            model.unload()
    return max(verdicts, key=lambda verdict: verdict.gap)


def _distinct(answers: Sequence[list[int]]) -> list[list[int]]:
    return [list(answer) for answer in dict.fromkeys(map(tuple, answers))]


@torch.inference_mode()
def _follow(model: Any, prompt: list[int], answer: list[int], scenario: Scenario) -> Verdict:
    """Feeds our own tokens to PEFT and sees whether it would have chosen each of them."""
    row = torch.tensor([prompt + answer])
    logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
    ours = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    gaps = logits.amax(dim=1) - ours
    gap = float(gaps.max())
    if gap <= TOLERANCE:  # never true for NaN
        return Verdict(gap, "")
    step = int((gaps > TOLERANCE).int().argmax())
    best = int(logits[step].argmax())
    return Verdict(
        gap,
        f"token {step + 1} is {scenario.decode([answer[step]])!r}, but PEFT prefers "
        f"{scenario.decode([best])!r} by {float(gaps[step]):.3g}",
    )


def _print_verdicts(
    console: Console, fleet: Fleet, ours: OurAnswers, verdicts: Mapping[str | None, Verdict]
) -> None:
    table = Table("adapter", box=SIMPLE_HEAD)
    table.add_column("rank", justify="right")
    table.add_column("targets")
    table.add_column("last answer after")
    table.add_column("largest gap", justify="right")
    table.add_column("PEFT")
    for name, verdict in verdicts.items():
        shape = ("", "") if name is None else describe(fleet.infos[name])
        history = "" if name is None else ("re-read" if name in ours.read_again else "cache hit")
        agrees = "differs" if verdict.fault else "agrees"
        table.add_row(name or _BASE, *shape, history, f"{verdict.gap:.1e}", agrees)
    console.print(table)
