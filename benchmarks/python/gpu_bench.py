"""What a GPU does with adapters, as ratios: copies, scatters, loads beside a step, kernels.

    python -m benchmarks.python.gpu_bench [--output FILE.json]

Times are of the wall, with the GPU synchronised; the shapes are those of an 8B Llama in bfloat16.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.python.gpu_fleet import (
    BIG,
    ROUNDS,
    SMALL,
    TINY,
    Fleet,
    by_wall,
    milliseconds,
    open_fleet,
)
from benchmarks.python.gpu_kernels import captured, measure_early_starts, measure_kernels
from benchmarks.python.gpu_prefill import measure_prefill
from benchmarks.python.gpu_scatter import measure_scatter
from benchmarks.python.harness import Case, Result, run_rounds, show_table, write_json

CHURN_CYCLES = 10_000


# ---- copies ------------------------------------------------------------------------------------


def measure_copies() -> list[Result]:
    """One adapter, host tier to GPU, against one pinned copy of as many bytes."""
    results: list[Result] = []
    shapes = {"84 MB": BIG, "6.8 MB": SMALL} | {f"tiny {n}": TINY for n in range(64)}
    with open_fleet(shapes, host="1GiB", device="1GiB") as fleet:
        fleet.add(["84 MB", "6.8 MB"])
        results += _copies_of(fleet, "84 MB", 0.95, "")
        results += _copies_of(fleet, "6.8 MB", 0.80, "")
        fleet.evict(["84 MB", "6.8 MB"])  # else they would keep the pages that they had at first
        _churn(fleet, [name for name in shapes if name.startswith("tiny")])
        after = f", after {CHURN_CYCLES} cycles"
        results += _copies_of(fleet, "84 MB", 0.95, after)
        results += _copies_of(fleet, "6.8 MB", 0.80, after)
        _check_pages(fleet, list(shapes))
    return results


def _copies_of(fleet: Fleet, name: str, goal: float, suffix: str) -> list[Result]:
    num_bytes = fleet.num_bytes(name)
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    task = fleet.requests[name].lora_task_id
    assert task is not None
    tensors = [
        tensor.clone()
        for matrices in fleet.cache.task_weights(task, "host").values()
        for tensor in matrices
    ]

    def evict() -> None:
        fleet.evict([name])
        torch.cuda.synchronize()
        assert task is not None
        assert not fleet.cache.is_task_cached_device(task)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def one_by_one() -> None:
        on_gpu = [tensor.to("cuda") for tensor in tensors]
        torch.cuda.synchronize()
        del on_gpu

    timings = run_rounds(
        {
            "ours": Case(lambda: fleet.lease([name]).close(), prepare=evict),
            "pinned copy": Case(copy),
            "tensor by tensor": Case(one_by_one),
        },
        ROUNDS,
    )
    speed = num_bytes / timings.median("ours").wall / 1e9
    detail = f"{milliseconds(timings, 'ours', 'pinned copy')}, {speed:.1f} GB/s"
    return [
        by_wall(
            timings.result(
                f"host -> GPU {name}{suffix} / pinned copy", "pinned copy", "ours", goal, detail
            )
        ),
        by_wall(
            timings.result(
                f"host -> GPU {name}{suffix} / .to('cuda') per tensor",
                "tensor by tensor",
                "ours",
                None,
                milliseconds(timings, "tensor by tensor"),
            )
        ),
    ]


def _check_pages(fleet: Fleet, names: Sequence[str]) -> None:
    """Every matrix on the GPU has the host copy's bytes."""
    fleet.lease(names).close()
    for name in names:
        task = fleet.requests[name].lora_task_id
        assert task is not None
        host, device = (fleet.cache.task_weights(task, tier) for tier in ("host", "device"))
        for module, matrices in host.items():
            for ours, copied in zip(matrices, device[module], strict=True):
                assert torch.equal(ours, copied.cpu()), f"{name}, {module}"


def _churn(fleet: Fleet, names: Sequence[str]) -> None:
    """Adapters come and go; in the end the free pages are holes between those that stayed."""
    generator = random.Random(1)
    fleet.add(names)
    for cycle in range(CHURN_CYCLES):
        fleet.lease(generator.sample(list(names), 4)).close()
        if cycle % 20 == 0:  # some go, the others stay where they are
            fleet.evict(generator.sample(list(names), len(names) // 2))
    fleet.lease(names).close()
    fleet.evict(generator.sample(list(names), len(names) // 2))
    fleet.cache.check_invariants()


# ---- loads beside a step -----------------------------------------------------------------------


def measure_overlap() -> list[Result]:
    """A loop like decode steps while adapters are copied to the GPU, against the same alone."""
    shapes = {f"big {n}": BIG for n in range(8)}
    with open_fleet(shapes, host="768MiB", device="384MiB") as fleet:
        names = list(fleet.requests)
        fleet.add(names)
        weights = torch.randn(64, 4096, 4096, dtype=torch.bfloat16, device="cuda") * 0.01
        x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
        copied = []

        def step() -> None:
            y = x
            for weight in weights:
                y = y @ weight

        # In a graph, so that the loader's Python and the launches do not wait for each other.
        graph = captured(torch.cuda.Stream(), step)

        def steps() -> None:
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()

        stop = threading.Event()
        loader: list[threading.Thread] = []

        # Nothing reads the adapters. Closed on the steps' stream, a lease would end with the last
        # step, and copies into its pages would wait for that, not run beside the steps.
        idle = torch.cuda.Stream()

        def load() -> None:
            while not stop.is_set():
                for name in names:
                    fleet.lease([name]).close(idle.cuda_stream)
                    copied.append(name)

        def start() -> None:
            stop.clear()
            loader.append(threading.Thread(target=load))
            loader[-1].start()

        def end() -> None:
            stop.set()
            loader.pop().join()

        timings = run_rounds({"with loads": Case(steps, start, end), "alone": Case(steps)}, ROUNDS)
    detail = f"{milliseconds(timings, 'with loads', 'alone')}, {len(copied)} adapters copied"
    title = "20 steps alone / with loads in flight"
    return [by_wall(timings.result(title, "alone", "with loads", 1 / 1.02, detail))]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/gpu/gpu.json"))
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="after these nothing more is begun"
    )
    arguments = parser.parse_args()
    begin = time.monotonic()
    results: list[Result] = []
    failed = False
    for measure in (
        measure_copies,
        measure_kernels,
        measure_overlap,
        measure_scatter,
        measure_prefill,
        measure_early_starts,
    ):
        name = measure.__name__
        if time.monotonic() - begin > arguments.seconds:
            print(f"{name}: there is no time left")
            failed = True
            continue
        try:
            new = measure()
        except Exception:  # what else there is to measure is measured
            traceback.print_exc()
            failed = True
            continue
        results += new
        write_json(results, arguments.output)
        show_table(new)
        print(f"{name}: {time.monotonic() - begin:.0f} s since the beginning", flush=True)
    print(f"\n{torch.cuda.get_device_name()}: all")
    if results:
        show_table(results)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
