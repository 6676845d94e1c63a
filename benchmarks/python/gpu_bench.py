"""What a GPU does with adapters, as ratios: copies, scatters, loads beside a step, kernels.

    python -m benchmarks.python.gpu_bench [--output FILE.json]

Times are of the wall, with the GPU synchronised; the shapes are those of an 8B Llama in bfloat16.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
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
from benchmarks.python.gpu_prefill import measure_prefill
from benchmarks.python.gpu_scatter import measure_scatter
from benchmarks.python.harness import Case, Result, run_rounds, show_table, write_json

from pagedlora import BatchLease, _core
from pagedlora.demo.generated_adapters import ALL_LINEAR, AdapterShape

CHURN_CYCLES = 10_000


# ---- copies ------------------------------------------------------------------------------------


def measure_copies() -> list[Result]:
    """One adapter, host tier to GPU, against one pinned copy of as many bytes."""
    results: list[Result] = []
    shapes = {"84 MB": BIG, "6.8 MB": SMALL} | {f"tiny {n}": TINY for n in range(200)}
    with open_fleet(shapes) as fleet:
        fleet.add(["84 MB", "6.8 MB"])
        results += _copies_of(fleet, "84 MB", 0.95, "")
        results += _copies_of(fleet, "6.8 MB", 0.80, "")
        _churn(fleet, [name for name in shapes if name.startswith("tiny")])
        after = f", after {CHURN_CYCLES} cycles"
        results += _copies_of(fleet, "84 MB", 0.95, after)
        results += _copies_of(fleet, "6.8 MB", 0.80, after)
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


def _churn(fleet: Fleet, names: Sequence[str]) -> None:
    """Adapters come and go, so that free pages lie scattered."""
    generator = random.Random(1)
    fleet.add(names)
    for cycle in range(CHURN_CYCLES):
        fleet.lease(generator.sample(list(names), 4)).close()
        if cycle % 20 == 0:  # some go, the others stay where they are
            fleet.evict(generator.sample(list(names), len(names) // 2))
    fleet.cache.check_invariants()


# ---- loads beside a step -----------------------------------------------------------------------


def measure_overlap() -> list[Result]:
    """A loop like decode steps while adapters are copied to the GPU, against the same alone."""
    with open_fleet({f"big {n}": BIG for n in range(12)}, device="512MiB") as fleet:
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
        graph = _captured(torch.cuda.Stream(), step)

        def steps() -> None:
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()

        stop = threading.Event()
        loader: list[threading.Thread] = []

        def load() -> None:
            while not stop.is_set():
                for name in names:
                    fleet.lease([name]).close(torch.cuda.current_stream().cuda_stream)
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


# ---- kernels -----------------------------------------------------------------------------------


def measure_kernels() -> list[Result]:
    """Shrink and expand over all layers in one CUDA graph."""
    ranks = [8, 16, 16, 32, 8, 16, 64, 16]
    shapes = {f"adapter {n}": AdapterShape(rank, ALL_LINEAR) for n, rank in enumerate(ranks)}
    results = []
    with open_fleet(shapes) as fleet:
        names = list(fleet.requests)
        fleet.add(names)
        lease = fleet.lease(names)
        num_bytes = sum(map(fleet.num_bytes, names))
        results += _large_graph(fleet, lease, num_bytes)
        lease.close()
    with open_fleet({"small": AdapterShape(8, ("q_proj",))}) as fleet:
        fleet.add(["small"])
        lease = fleet.lease(["small"])
        results.append(_small_graph(fleet, lease))
        lease.close()
    return results


def _operator(
    fleet: Fleet,
    lease: BatchLease,
    segments: list[tuple[int | None, int]],
    stream: torch.cuda.Stream,
) -> _core.GpuLoraOperator:
    lora = _core.GpuLoraOperator(
        fleet.config,
        fleet.cache.core.layout_params,
        max_rows=len(segments),
        max_tasks=16,
        for_graphs=True,
    )
    lora.set_batch(lease, segments, stream.cuda_stream)
    stream.synchronize()
    return lora


def _captured(stream: torch.cuda.Stream, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        launch()  # what is made at the first call is made now
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


def _apply_all(
    fleet: Fleet, lora: _core.GpuLoraOperator, rows: int, stream: torch.cuda.Stream, modules: int
) -> Callable[[], None]:
    widest = max(max(m.in_features, m.out_features) for m in fleet.config.modules)
    x = torch.randn(rows, widest, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros(rows, widest, dtype=torch.bfloat16, device="cuda")

    def launch() -> None:
        for index in range(modules):
            lora.apply(
                index,
                x.data_ptr(),
                y.data_ptr(),
                rows,
                widest,
                widest,
                _core.Dtype.bfloat16,
                stream=stream.cuda_stream,
            )

    return launch


def _large_graph(fleet: Fleet, lease: BatchLease, num_bytes: int) -> list[Result]:
    """Each byte of the adapters is read once; the limit is half a copy on the GPU of as many."""
    stream = torch.cuda.Stream()
    segments: list[tuple[int | None, int]] = [
        (request.request_id, 1) for request in fleet.requests.values()
    ]
    lora = _operator(fleet, lease, segments, stream)
    launch = _apply_all(fleet, lora, len(segments), stream, len(fleet.config.modules))
    graph = _captured(stream, launch)
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    by_torch = _captured(stream, _multiply_all(fleet, lease))
    cases = {"graph": Case(_replay(graph)), "copy": Case(copy), "torch": Case(_replay(by_torch))}
    timings = run_rounds(cases, ROUNDS)
    timings.scale("limit", "copy", 0.5)
    speed = num_bytes / timings.median("graph").wall / 1e9
    detail = (
        f"{num_bytes / 1e6:.0f} MB, {milliseconds(timings, 'graph', 'limit')}, {speed:.0f} GB/s"
    )
    title = "shrink + expand of 8 adapters, all layers, one graph"
    against_torch = milliseconds(timings, "torch")
    return [
        by_wall(timings.result(f"{title} / bytes limit", "limit", "graph", 0.8, detail)),
        by_wall(
            timings.result(f"{title} / torch by adapter", "torch", "graph", None, against_torch)
        ),
    ]


def _multiply_all(fleet: Fleet, lease: BatchLease) -> Callable[[], None]:
    """One row per adapter, two products of torch per adapter and module, from operands of torch."""
    widest = max(max(m.in_features, m.out_features) for m in fleet.config.modules)
    x = torch.randn(len(fleet.requests), widest, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros_like(x)
    operands = []
    for row, request in enumerate(fleet.requests.values()):
        task = request.lora_task_id
        assert task is not None
        scales = {entry.module_name: entry.scale for entry in lease[request.request_id]}
        for name, (a, b, *_) in fleet.cache.task_weights(task, "host").items():
            inputs, outputs = x[row : row + 1, : a.shape[1]], y[row : row + 1, : b.shape[0]]
            operands.append((inputs, outputs, a.cuda().T, b.cuda().T, scales[name]))

    def launch() -> None:
        for inputs, outputs, a, b, scale in operands:
            outputs.addmm_(inputs @ a, b, alpha=scale)

    return launch


def _small_graph(fleet: Fleet, lease: BatchLease) -> Result:
    stream = torch.cuda.Stream()
    lora = _operator(fleet, lease, [(0, 1)], stream)
    graph = _captured(stream, _apply_all(fleet, lora, 1, stream, 1))
    scratch = torch.zeros(1, device="cuda")

    def nearly_nothing() -> None:
        with torch.cuda.stream(stream):
            scratch.add_(1.0)
            scratch.add_(1.0)

    empty = _captured(stream, nearly_nothing)
    timings = run_rounds(
        {"graph": Case(_replay(graph)), "two kernels": Case(_replay(empty))}, 10 * ROUNDS
    )
    title = "two kernels of one number / shrink + expand of one small module, in graphs"
    detail = milliseconds(timings, "graph", "two kernels")
    return by_wall(timings.result(title, "two kernels", "graph", 1 / 1.3, detail))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/gpu/gpu.json"))
    arguments = parser.parse_args()
    results: list[Result] = []
    failed = False
    for measure in (
        measure_copies,
        measure_scatter,
        measure_overlap,
        measure_kernels,
        measure_prefill,
    ):
        try:
            results += measure()
        except Exception:  # what else there is to measure is measured
            traceback.print_exc()
            failed = True
        write_json(results, arguments.output)
    print(torch.cuda.get_device_name())
    if results:
        show_table(results)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
