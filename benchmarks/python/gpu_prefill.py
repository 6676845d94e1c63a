"""Long runs of rows on a GPU: the kernels of ours against torch's matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.python.gpu_fleet import (
    BIG,
    ROUNDS,
    Fleet,
    by_wall,
    milliseconds,
    open_fleet,
)
from benchmarks.python.harness import Case, Result, run_rounds

from pagedlora import BatchLease, _core
from pagedlora.engine.long_runs import LongRunOptions
from pagedlora.engine.pool_view import PoolView

RUNS = 16
RUN_ROWS = 512
NUM_LAYERS = 2


def measure_prefill() -> list[Result]:
    """Long runs of rows, each with an adapter of its own, on the modules of two layers."""
    shapes = {f"adapter {n}": BIG for n in range(RUNS)}
    with open_fleet(shapes, host="256MiB", device="256MiB", num_layers=NUM_LAYERS) as fleet:
        names = list(fleet.requests)
        fleet.add(names)
        lease = fleet.lease(names)
        segments: list[tuple[int | None, int]] = [
            (request.request_id, RUN_ROWS) for request in fleet.requests.values()
        ]
        by_kernels, by_torch = _prefill_cases(fleet, lease, segments)
        timings = run_rounds({"kernels": Case(by_kernels), "torch": Case(by_torch)}, ROUNDS)
        lease.close()
    title = f"prefill: {RUNS} runs of {RUN_ROWS} rows, our kernels / matrix products"
    detail = milliseconds(timings, "kernels", "torch")
    return [by_wall(timings.result(title, "kernels", "torch", None, detail))]


def _prefill_cases(
    fleet: Fleet, lease: BatchLease, segments: list[tuple[int | None, int]]
) -> tuple[Callable[[], None], Callable[[], None]]:
    rows = RUNS * RUN_ROWS
    modules = list(enumerate(fleet.config.modules))
    widths = {width for _, m in modules for width in (m.in_features, m.out_features)}
    x, y = (
        {n: torch.randn(rows, n, dtype=torch.bfloat16, device="cuda") for n in widths}
        for _ in range(2)
    )
    lora = _core.GpuLoraOperator(
        fleet.config, fleet.cache.core.layout_params, max_rows=rows, max_tasks=RUNS
    )
    lora.set_batch(lease, segments)
    pool = PoolView(fleet.cache, torch.device(fleet.cache.device))
    runs, _ = LongRunOptions(pool, RUN_ROWS).split(lease, segments)
    assert runs is not None

    def by_kernels() -> None:
        for index, m in modules:
            lora.apply(
                index,
                x[m.in_features].data_ptr(),
                y[m.out_features].data_ptr(),
                rows,
                m.in_features,
                m.out_features,
                _core.Dtype.bfloat16,
            )
        torch.cuda.synchronize()

    def by_torch() -> None:
        for index, m in modules:
            runs.add(index, x[m.in_features], y[m.out_features], None)
        torch.cuda.synchronize()

    return by_kernels, by_torch
