"""Long runs by torch's matrix products, from the GPU's pages, beside short ones by the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.test_lora_on_gpu import DTYPES, ROUNDOFF, SIZES, Served, draw, serve

from pagedlora import _core
from pagedlora.engine.dtypes import to_core_dtype
from pagedlora.engine.gpu_lora import GpuLora, GpuLoraSizes, GpuRowMap
from pagedlora.engine.long_runs import LongRunOptions
from pagedlora.engine.pool_view import PoolView

GPU = torch.device("cuda", 0)
MIXED: list[tuple[int | None, int]] = [
    (4, 70), (None, 3), (2, 1), (6, 64), (4, 33), (1, 100), (None, 5), (5, 2), (6, 40),
]  # fmt: skip


def make_row_map(served: Served, min_rows: int) -> tuple[GpuLora, GpuRowMap]:
    options = LongRunOptions(PoolView(served.cache, GPU), min_rows)
    sizes = GpuLoraSizes(served.cache.core.layout_params, 512, 8, options)
    lora = GpuLora(served.config, sizes, GPU)
    return lora, GpuRowMap(lora)


def apply(lora: GpuLora, row_map: GpuRowMap, module: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """As a hook does."""
    assert row_map.batch is not None
    rows, (inputs, outputs) = len(x), SIZES[module]
    dtype = to_core_dtype(x.dtype)
    lora.apply(row_map.batch, module, x.data_ptr(), y.data_ptr(), rows, inputs, outputs, dtype)
    if row_map.long_runs is not None:
        row_map.long_runs.add(module, x, y, None)


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_those_of_float64_but_for_rounding(
    dtype: torch.dtype, weights: torch.dtype, tmp_path: Path
) -> None:
    rows = sum(count for _, count in MIXED)
    with serve(tmp_path, weights) as served:
        lora, long_map = make_row_map(served, 33)
        kernels, short_map = make_row_map(served, rows + 1)
        long_map.set(served.lease, MIXED)
        short_map.set(served.lease, MIXED)
        assert long_map.long_runs is not None
        assert short_map.long_runs is None
        for index, (inputs, outputs) in enumerate(SIZES):
            x = draw(rows, inputs, dtype, index)
            before = draw(rows, outputs, dtype, 100 + index)
            after, by_kernels = before.clone(), before.clone()
            apply(lora, long_map, index, x, after)
            apply(kernels, short_map, index, x, by_kernels)
            torch.cuda.synchronize()
            _check(served, index, x, before, after, by_kernels)


def _check(  # noqa: PLR0917 - what there is to compare
    served: Served,
    index: int,
    x: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    by_kernels: torch.Tensor,
) -> None:
    """Long runs within the bound of long_runs.py, all others to the bit what they were without."""
    first = 0
    for request, count in MIXED:
        rows = slice(first, first + count)
        first += count
        if request is None or count < 33:
            assert torch.equal(after[rows], by_kernels[rows])
            continue
        a, b, scale = served.weights[request][f"m.{index}"]
        inputs, base = x[rows].double().cpu(), before[rows].double().cpu()
        right = base + scale * (inputs @ a.T) @ b.T
        magnitude = base.abs() + abs(scale) * (inputs.abs() @ a.abs().T) @ b.abs().T
        error = (after[rows].double().cpu() - right).abs()
        bound = 2 * (a.shape[1] + a.shape[0] + 2) * 2.0**-24 * magnitude
        bound += ROUNDOFF[x.dtype] * right.abs() * 1.001 + 2.0**-24 * (x.dtype == torch.float16)
        assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"


def test_tf32_changes_nothing(tmp_path: Path) -> None:
    """Whatever the model's own products are allowed, the adapters' are of float32."""
    results = []
    matmul = torch.backends.cuda.matmul
    with serve(tmp_path, torch.float32) as served:
        lora, row_map = make_row_map(served, 33)
        row_map.set(served.lease, [(4, 64)])
        x, y = draw(64, SIZES[0][0], torch.float32, 1), draw(64, SIZES[0][1], torch.float32, 2)
        before = matmul.fp32_precision
        for precision in ("ieee", "tf32"):
            matmul.fp32_precision = precision
            after = y.clone()
            apply(lora, row_map, 0, x, after)
            results.append(after)
        matmul.fp32_precision = before
    assert torch.equal(*results)


def test_the_view_is_of_the_gpus_pages(tmp_path: Path) -> None:
    with serve(tmp_path, torch.bfloat16) as served:
        pool = PoolView(served.cache, GPU)
        with _core.LeasePages(served.lease) as held:
            for request, modules in served.weights.items():
                for index, (a, b, scale) in enumerate(modules.values()):
                    (pages,) = held.rows(request, index)
                    row = pool.row(pages)
                    assert row.a.device == GPU
                    assert torch.equal(row.a.double().cpu(), a)
                    assert torch.equal(row.b.double().cpu(), b)
                    assert pages.scale == scale
