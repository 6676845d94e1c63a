"""Interleaved rounds, medians, ratios, and how they are shown.

Only ratios of one run are worth comparing. Every round runs every case once, in rotating order, and
a ratio is the median over the rounds of the ratio within a round: what slows a whole round down
cancels out.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Case:
    """Something to measure: `prepare` and `finish` are not timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    finish: Callable[[], object] = _nothing


class Seconds(NamedTuple):
    """Time of one run: of all threads of the process, and on the wall."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        name: What is compared with what.
        ratio: By CPU time of the process, which is the headline: neighbours do not add to it.
        wall_ratio: By wall time; far from `ratio` when the machine was busy.
        goal: Least ratio wanted; None if the line is for information.
        detail: The times or speeds behind the ratio.
    """

    name: str
    ratio: float
    wall_ratio: float
    goal: float | None = None
    detail: str = ""


@dataclass
class Timings:
    """Times of the cases, round by round."""

    rounds: list[dict[str, Seconds]] = field(default_factory=list)

    def median(self, name: str) -> Seconds:
        """Median times of a case."""
        times = [times[name] for times in self.rounds]
        return Seconds(
            statistics.median(t.cpu for t in times), statistics.median(t.wall for t in times)
        )

    def subtract(self, name: str, whole: str, part: str) -> None:
        """Adds a case: what of `whole` is not `part`."""
        for times in self.rounds:
            pairs = zip(times[whole], times[part], strict=True)
            times[name] = Seconds(*(longer - shorter for longer, shorter in pairs))

    def scale(self, name: str, of: str, factor: float) -> None:
        """Adds a case: a part, or a multiple, of another one."""
        for times in self.rounds:
            times[name] = Seconds(*(seconds * factor for seconds in times[of]))

    def result(
        self, title: str, slow: str, fast: str, goal: float | None = None, detail: str = ""
    ) -> Result:
        """How many times faster `fast` is than `slow`."""
        ratios = [
            Seconds(times[slow].cpu / times[fast].cpu, times[slow].wall / times[fast].wall)
            for times in self.rounds
        ]
        return Result(
            title,
            statistics.median(ratio.cpu for ratio in ratios),
            statistics.median(ratio.wall for ratio in ratios),
            goal,
            detail,
        )


def run_rounds(cases: Mapping[str, Case], rounds: int, warm_up: int = 1) -> Timings:
    """Runs all cases in each of `rounds` rounds, after some that do not count."""
    timings = Timings()
    order = list(cases)
    for number in range(-warm_up, rounds):
        times = {name: _run_once(cases[name]) for name in order}
        order.append(order.pop(0))
        if number >= 0:
            timings.rounds.append(times)
    return timings


def _run_once(case: Case) -> Seconds:
    case.prepare()
    cpu, wall = time.process_time(), time.perf_counter()
    case.run()
    elapsed = Seconds(time.process_time() - cpu, time.perf_counter() - wall)
    case.finish()
    return elapsed


def show_table(results: Sequence[Result]) -> None:
    """Prints the ratios; `ok` and `MISSED` say how they stand to the goals."""
    width = max(len(result.name) for result in results)
    print(f"\n{'ratio (higher is better)':{width}}  CPU   goal          wall  behind it")
    for result in results:
        goal = "" if result.goal is None else f"{result.goal:.2f}"
        verdict = ""
        if result.goal is not None:
            verdict = "ok" if result.ratio >= result.goal else "MISSED"
        print(
            f"{result.name:{width}} {result.ratio:5.2f} {goal:>5} {verdict:6} "
            f"{result.wall_ratio:6.2f}  {result.detail}"
        )
    print("CPU: time of the process, the headline. wall: the same by wall time.")


def write_json(results: Sequence[Result], path: Path) -> None:
    """Writes the table with what is needed to judge it."""
    import torch
    import transformers

    from pagedlora import _core

    document = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "build": _core.build_info(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "results": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
