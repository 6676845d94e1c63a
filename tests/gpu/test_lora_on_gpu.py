"""The LoRA kernels against float64, against the CPU's operator, and inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import write_random_adapter

from pagedlora import (
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    _core,
)
from pagedlora.engine.dtypes import to_core_dtype

RANKS = (1, 7, 8, 16, 33, 64)
SIZES = ((64, 96), (1000, 24), (24, 3000))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Served:
    """A cache with adapters, all of them in a lease.

    Attributes:
        config: Modules `m.0` and so on, of `SIZES`.
        cache: On the GPU.
        lease: Of all requests.
        weights: By request and module: A, B and scale, in float64.
    """

    config: LoraModelConfig
    cache: PeftCacheManager
    lease: Any
    weights: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor, float]]]


@contextmanager
def serve(tmp_path: Path, dtype: torch.dtype) -> Iterator[Served]:
    model = torch.nn.ModuleDict(
        {"m": torch.nn.ModuleList([torch.nn.Linear(i, o, bias=False) for i, o in SIZES])}
    )
    config = LoraModelConfig.from_module(model, dtype=dtype)
    cache = PeftCacheManager(
        config, PeftCacheConfig(device_cache_size="16MiB", host_cache_size="16MiB"), device="cuda"
    )
    adapters = LoraManager(config, cache)
    requests = []
    for number, rank in enumerate(RANKS, start=1):
        name = f"rank-{rank}"
        adapters.register(
            name, write_random_adapter(tmp_path / name, config, rank=rank, seed=number)
        )
        requests.append(LlmRequest(number, lora_task_id=adapters.task_id(name)))
        cache.add_request_peft(requests[-1])
    lease = cache.ensure_batch(requests, [])
    assert not lease.errors
    weights = {}
    for request in requests:
        scales = {entry.module_name: entry.scale for entry in lease[request.request_id]}
        task = request.lora_task_id
        assert task is not None
        weights[request.request_id] = {
            name: (a.double(), b.double(), scales[name])
            for name, (a, b, *_) in cache.task_weights(task, "host").items()
        }
    try:
        yield Served(config, cache, lease, weights)
    finally:
        lease.close()
        cache.close()


def make_operator(
    served: Served, max_rows: int, *, for_graphs: bool = False
) -> _core.GpuLoraOperator:
    return _core.GpuLoraOperator(
        served.config,
        served.cache.core.layout_params,
        max_rows=max_rows,
        max_tasks=8,
        for_graphs=for_graphs,
    )


def draw(rows: int, features: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, features, generator=generator).to(dtype).cuda()


def check(
    served: Served,
    module: str,
    segments: list[tuple[int | None, int]],
    x: torch.Tensor,
    y: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Each output within the rounding of float32 sums and of one store; base rows untouched."""
    before, after = y
    row = 0
    for request, count in segments:
        rows = slice(row, row + count)
        row += count
        if request is None:
            assert torch.equal(after[rows], before[rows])
            continue
        a, b, scale = served.weights[request][module]
        inputs = x[rows].double().cpu()
        right = before[rows].double().cpu() + scale * (inputs @ a.T) @ b.T
        magnitude = (
            before[rows].double().cpu().abs() + abs(scale) * (inputs.abs() @ a.abs().T) @ b.abs().T
        )
        error = (after[rows].double().cpu() - right).abs()
        terms = 8 * -(-a.shape[1] // 1024) + 8 + 5 + -(-a.shape[0] // 8)
        bound = terms * 2.0**-24 * magnitude + ROUNDOFF[x.dtype] * right.abs() * 1.001 + 1e-30
        assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"


BATCHES: list[list[tuple[int | None, int]]] = [
    [(3, 1), (None, 1), (1, 1), (6, 1), (3, 1), (5, 1)],
    [(4, 37), (None, 3), (2, 1), (6, 64), (4, 5)],
    [(None, 4)],
]


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_those_of_float64_but_for_rounding(
    dtype: torch.dtype, weights: torch.dtype, tmp_path: Path
) -> None:
    with serve(tmp_path, weights) as served:
        lora = make_operator(served, 256)
        for segments in BATCHES:
            lora.set_batch(served.lease, segments)
            rows = sum(count for _, count in segments)
            for index, (inputs, outputs) in enumerate(SIZES):
                x = draw(rows, inputs, dtype, index)
                before = draw(rows, outputs, dtype, 100 + index)
                y = before.clone()
                lora.apply(
                    index,
                    x.data_ptr(),
                    y.data_ptr(),
                    rows,
                    inputs,
                    outputs,
                    to_core_dtype(dtype),
                )
                torch.cuda.synchronize()
                check(served, f"m.{index}", segments, x, (before, y))


def test_a_row_does_not_notice_its_neighbours(tmp_path: Path) -> None:
    inputs, outputs = SIZES[0]
    x = draw(1, inputs, torch.float32, 1)
    results = []
    with serve(tmp_path, torch.float32) as served:
        lora = make_operator(served, 256)
        for before, after in ((0, 0), (5, 3), (0, 40)):
            segments = [(2, before), (5, 1), (6, after)]
            rows = before + 1 + after
            lora.set_batch(served.lease, segments)
            row = torch.cat(
                (
                    draw(before, inputs, torch.float32, 2),
                    x,
                    draw(after, inputs, torch.float32, 3),
                )
            )
            y = torch.zeros(rows, outputs, device="cuda")
            lora.apply(0, row.data_ptr(), y.data_ptr(), rows, inputs, outputs, _core.Dtype.float32)
            torch.cuda.synchronize()
            results.append(y[before].clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_captured_graph_follows_the_batch(tmp_path: Path) -> None:
    inputs, outputs = SIZES[0]
    rows = 6
    x = draw(rows, inputs, torch.float32, 1)
    before = draw(rows, outputs, torch.float32, 2)
    y = before.clone()
    with serve(tmp_path, torch.float32) as served:
        lora = make_operator(served, 2 * rows, for_graphs=True)
        stream = torch.cuda.Stream()

        def set_batch(segments: list[tuple[int | None, int]]) -> None:
            lora.set_batch(served.lease, segments, stream.cuda_stream)

        def apply() -> None:
            lora.apply(
                0,
                x.data_ptr(),
                y.data_ptr(),
                rows,
                inputs,
                outputs,
                _core.Dtype.float32,
                stream=stream.cuda_stream,
            )

        set_batch([(None, 6)])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            apply()
        for segments in ([(6, 1), (5, 1), (None, 2), (1, 1), (2, 1)], [(3, 1), (None, 5)]):
            y.copy_(before)
            torch.cuda.synchronize()
            set_batch(segments)
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.synchronize()
            check(served, "m.0", segments, x, (before, y))
