"""Shrink and expand over all layers in one CUDA graph, against what the memory allows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.python.gpu_fleet import (
    ROUNDS,
    Fleet,
    by_wall,
    milliseconds,
    open_fleet,
)
from benchmarks.python.harness import Case, Result, run_rounds

from pagedlora import BatchLease, _core
from pagedlora.demo.generated_adapters import ALL_LINEAR, AdapterShape

Segments = list[tuple[int | None, int]]

RANKS = (8, 16, 16, 32, 8, 16, 64, 16)
# How often the ranks, and layers. As many bytes both times, many times what a GPU caches; in the
# second, four times as many of them per launch, so that the two tell what a launch costs.
LARGE = ((1, 16), (4, 4))
LARGE_REPLAYS = 4
SMALL_REPLAYS = 20


def measure_kernels() -> list[Result]:
    """Large and small graphs."""
    results = []
    for times, num_layers in LARGE:
        shapes = _shapes(times)
        with open_fleet(shapes, host="768MiB", device="768MiB", num_layers=num_layers) as fleet:
            results += _large_graph(fleet)
    with open_fleet({"small": AdapterShape(8, ("q_proj",))}, host="64MiB", device="64MiB") as fleet:
        results.append(_small_graph(fleet))
    return results


def measure_early_starts() -> list[Result]:
    """Kernels that begin beside the one before them, against the same one after the other."""
    with open_fleet(_shapes(1), host="512MiB", device="512MiB", num_layers=8) as fleet:
        lease = _lease_all(fleet)
        stream = torch.cuda.Stream()
        rows = len(fleet.requests)
        operators = [_operator(fleet, lease, stream, starts_early=early) for early in (False, True)]
        in_order, early = (
            Case(_replay(captured(stream, _apply_all(fleet, lora, stream)), LARGE_REPLAYS))
            for lora in operators
        )
        timings = run_rounds({"in order": in_order, "early": early}, ROUNDS)
        lease.close()
    title = f"shrink + expand of {rows} adapters, kernels one after the other / begun early"
    detail = milliseconds(timings, "in order", "early")
    return [by_wall(timings.result(title, "in order", "early", None, detail))]


def captured(stream: torch.cuda.Stream, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()  # what it reads was made on another stream
    with torch.cuda.stream(stream):
        launch()  # what is made at the first call is made now
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    return graph


def _shapes(times: int) -> dict[str, AdapterShape]:
    return {f"adapter {n}": AdapterShape(rank, ALL_LINEAR) for n, rank in enumerate(RANKS * times)}


def _lease_all(fleet: Fleet) -> BatchLease:
    names = list(fleet.requests)
    fleet.add(names)
    return fleet.lease(names)


def _operator(
    fleet: Fleet, lease: BatchLease, stream: torch.cuda.Stream, *, starts_early: bool = False
) -> _core.GpuLoraOperator:
    """One row per adapter."""
    segments: Segments = [(request.request_id, 1) for request in fleet.requests.values()]
    lora = _core.GpuLoraOperator(
        fleet.config,
        fleet.cache.core.layout_params,
        max_rows=len(segments),
        max_tasks=len(segments),
        for_graphs=True,
        starts_early=starts_early,
    )
    lora.set_batch(lease, segments, stream.cuda_stream)
    stream.synchronize()
    return lora


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()

    return run


def _apply_all(
    fleet: Fleet,
    lora: _core.GpuLoraOperator,
    stream: torch.cuda.Stream,
    num_modules: int | None = None,
) -> Callable[[], None]:
    """One row per adapter; the first modules, or all."""
    rows, widest = len(fleet.requests), _widest(fleet)
    modules = range(len(fleet.config.modules) if num_modules is None else num_modules)
    x = torch.randn(rows, widest, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros(rows, widest, dtype=torch.bfloat16, device="cuda")

    def launch() -> None:
        for index in modules:
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


def _widest(fleet: Fleet) -> int:
    return max(max(m.in_features, m.out_features) for m in fleet.config.modules)


def _large_graph(fleet: Fleet) -> list[Result]:
    """Each byte of the adapters is read once; the limit is half a copy on the GPU of as many."""
    lease = _lease_all(fleet)
    num_bytes = sum(map(fleet.num_bytes, fleet.requests))
    stream = torch.cuda.Stream()
    lora = _operator(fleet, lease, stream)
    graph = captured(stream, _apply_all(fleet, lora, stream))
    by_torch = captured(stream, _multiply_all(fleet, lease))
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(LARGE_REPLAYS):
            target.copy_(source)
        torch.cuda.synchronize()

    cases = {
        "graph": Case(_replay(graph, LARGE_REPLAYS)),
        "copy": Case(copy),
        "torch": Case(_replay(by_torch, LARGE_REPLAYS)),
    }
    timings = run_rounds(cases, ROUNDS)
    timings.scale("limit", "copy", 0.5)
    lease.close()
    speed = LARGE_REPLAYS * num_bytes / timings.median("graph").wall / 1e9
    detail = (
        f"{LARGE_REPLAYS} times {num_bytes / 1e6:.0f} MB: "
        f"{milliseconds(timings, 'graph', 'limit')}, {speed:.0f} GB/s"
    )
    title = f"shrink + expand of {len(fleet.requests)} adapters, "
    title += f"{len(fleet.config.modules)} modules, one graph"
    against_torch = milliseconds(timings, "torch")
    return [
        by_wall(timings.result(f"{title} / bytes limit", "limit", "graph", 0.8, detail)),
        by_wall(
            timings.result(f"{title} / torch by adapter", "torch", "graph", None, against_torch)
        ),
    ]


def _multiply_all(fleet: Fleet, lease: BatchLease) -> Callable[[], None]:
    """One row per adapter, two products of torch per adapter and module, from operands of torch."""
    x = torch.randn(len(fleet.requests), _widest(fleet), dtype=torch.bfloat16, device="cuda")
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


def _small_graph(fleet: Fleet) -> Result:
    lease = _lease_all(fleet)
    stream = torch.cuda.Stream()
    lora = _operator(fleet, lease, stream)
    graph = captured(stream, _apply_all(fleet, lora, stream, num_modules=1))
    scratch = torch.zeros(1, device="cuda")

    def nearly_nothing() -> None:
        with torch.cuda.stream(stream):
            scratch.add_(1.0)
            scratch.add_(1.0)

    empty = captured(stream, nearly_nothing)
    cases = {
        "graph": Case(_replay(graph, SMALL_REPLAYS)),
        "two kernels": Case(_replay(empty, SMALL_REPLAYS)),
    }
    timings = run_rounds(cases, 4 * ROUNDS)
    lease.close()
    title = "two kernels of one number / shrink + expand of one small module, in graphs"
    detail = f"{SMALL_REPLAYS} times: {milliseconds(timings, 'graph', 'two kernels')}"
    return by_wall(timings.result(title, "two kernels", "graph", 1 / 1.3, detail))
