"""Part 3: PEFT, in float32 and with one adapter at a time, judges the answers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
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
        control: The same for the answer of another adapter; the check can fail if it is large.
        fault: What is wrong; "" if nothing is.
    """

    gap: float
    control: float
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
    verdicts = peft_verdicts(scenario, paths, prompt, ours, console)
    _print_verdicts(console, fleet, ours, verdicts)
    mismatches = [f"{name or _BASE}: {v.fault}" for name, v in verdicts.items() if v.fault]
    undecided = list(blind_spots(ours, verdicts, {None, *scenario.shown}))
    for label, faults in (("MISMATCH", mismatches), ("UNDECIDED", undecided)):
        for fault in faults:
            console.print(f"{label}  {fault}", style="bold red", markup=False)
    if mismatches or undecided:
        return False
    console.print(
        f"All {len(paths)} adapters and the base answer as PEFT does (each of our tokens is "
        f"PEFT's best within {TOLERANCE:g}), {len(ours.read_again)} of them after they were "
        "evicted from both tiers and read again. No two answers are equal, and PEFT refused "
        "every swapped answer.",
        style="bold green",
    )
    return True


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


def peft_verdicts(
    scenario: Scenario,
    paths: Mapping[str, Path],
    prompt: list[int],
    ours: OurAnswers,
    console: Console,
) -> dict[str | None, Verdict]:
    """PEFT's opinion of the base and of every adapter, each alone on a fresh base model."""
    base = scenario.load_model(torch.float32)
    names: list[str | None] = [None, *paths]
    verdicts: dict[str | None, Verdict] = {}
    for number, name in enumerate(track(names, "Asking PEFT", console=console)):
        swapped = ours.answers[names[number - 1]][-1]
        with _with_adapter(base, None if name is None else paths[name]) as model:
            verdicts[name] = _judge(model, prompt, ours.answers[name], swapped, scenario.decode)
    return verdicts


def blind_spots(
    ours: OurAnswers, verdicts: Mapping[str | None, Verdict], varied: Set[str | None]
) -> Iterator[str]:
    """Why the comparison could not have failed: answers that are equal, poor or fit others too.

    Args:
        ours: The answers.
        verdicts: PEFT's opinion of them.
        varied: Whose answers must have variety; one of random content may well stammer.
    """
    seen: dict[tuple[int, ...], str] = {}
    for name, answers in ours.answers.items():
        who = name or _BASE
        tokens = tuple(answers[-1])
        twin = seen.setdefault(tokens, who)
        if twin != who:
            yield f"{who}: answers exactly as {twin} does, so a mix-up of the two would not show"
        elif verdicts[name].control <= TOLERANCE:
            yield f"{who}: PEFT accepts the answer of another adapter as well"
        if name in varied and len(set(tokens)) < MIN_DISTINCT_TOKENS:
            yield f"{who}: has only {len(set(tokens))} different tokens in its answer"


@contextmanager
def _with_adapter(base: nn.Module, adapter: Path | None) -> Iterator[Any]:
    """The base model with an adapter in PEFT's hands, or alone; as it was before, afterwards."""
    if adapter is None:
        yield base
        return
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model: Any = PeftModel.from_pretrained(base, adapter).eval()
    try:
        yield model
    finally:
        model.unload()


@torch.inference_mode()
def _judge(
    model: Any,
    prompt: list[int],
    answers: Sequence[list[int]],
    swapped: list[int],
    decode: Callable[[Sequence[int]], str],
) -> Verdict:
    """Feeds tokens to PEFT and sees whether it would have chosen each of them itself.

    Args:
        model: Of PEFT.
        prompt: Comes before every answer.
        answers: What we answered with this adapter.
        swapped: What we answered with another one, of the same length.
        decode: Tokens to text.
    """
    ours = [list(answer) for answer in dict.fromkeys(map(tuple, answers))]
    rows = torch.tensor([*ours, swapped])
    context = torch.tensor([prompt]).expand(len(rows), -1)
    logits = model(input_ids=torch.cat([context, rows], dim=1), use_cache=False).logits
    logits = logits[:, len(prompt) - 1 : -1]
    gaps = logits.amax(dim=2) - logits.gather(2, rows.unsqueeze(2)).squeeze(2)
    fault = ""
    for row, answer in enumerate(ours):
        wrong = [step for step, gap in enumerate(gaps[row].tolist()) if not gap <= TOLERANCE]
        if wrong and not fault:
            step = wrong[0]
            best = int(logits[row, step].argmax())
            fault = (
                f"token {step + 1} is {decode([answer[step]])!r}, but PEFT prefers "
                f"{decode([best])!r} by {float(gaps[row, step]):.3g}"
            )
    return Verdict(float(gaps[:-1].max()), float(gaps[-1].max()), fault)


def _print_verdicts(
    console: Console, fleet: Fleet, ours: OurAnswers, verdicts: Mapping[str | None, Verdict]
) -> None:
    table = Table("adapter", box=SIMPLE_HEAD)
    table.add_column("rank", justify="right")
    table.add_column("targets", no_wrap=True)
    table.add_column("cache", no_wrap=True)
    table.add_column("gap", justify="right")
    table.add_column("gap if swapped", justify="right")
    table.add_column("PEFT")
    for name, verdict in verdicts.items():
        shape = ("", "") if name is None else describe(fleet.infos[name])
        history = "" if name is None else ("re-read" if name in ours.read_again else "hit")
        agrees = "differs" if verdict.fault else "agrees"
        table.add_row(
            Text(name or _BASE),
            *shape,
            history,
            f"{verdict.gap:.1g}",
            f"{verdict.control:.1f}",
            agrees,
        )
    console.print(table)
