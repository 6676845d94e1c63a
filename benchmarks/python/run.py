"""Runs the benchmarks, writes their JSON and prints their table last.

python -m benchmarks.python.run [--only load|overlap|serve|schedule|registered ...] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from benchmarks.python import (
    load_bench,
    overlap_bench,
    registered_bench,
    schedule_bench,
    serve_bench,
)
from benchmarks.python.harness import Result, show_table, write_json

BENCHMARKS = {
    "load": load_bench.measure,
    "overlap": overlap_bench.measure,
    "serve": serve_bench.measure,
    "schedule": schedule_bench.measure,
    "registered": registered_bench.measure,
}
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description="Benchmarks of pagedlora, as ratios.")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--output", type=Path, default=RESULTS / "latest.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    for name in arguments.only:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        results += BENCHMARKS[name]()
    write_json(results, arguments.output)
    show_table(results)


if __name__ == "__main__":
    main()
