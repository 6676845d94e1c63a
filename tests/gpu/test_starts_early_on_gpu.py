"""Kernels that begin while the one before them runs give the bits of those that wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.test_lora_on_gpu import SIZES, Served, draw, serve

from pagedlora import _core

SEGMENTS: list[tuple[int | None, int]] = [(6, 1), (5, 1), (None, 2), (1, 1), (2, 1), (6, 1), (3, 1)]
ROWS = sum(count for _, count in SEGMENTS)
ROUNDS = 40


def outputs_of(served: Served, *, starts_early: bool, in_graph: bool) -> list[torch.Tensor]:
    """Of all modules, added up over rounds: each launch needs what the one before it wrote."""
    lora = _core.GpuLoraOperator(
        served.config,
        served.cache.core.layout_params,
        max_rows=ROWS,
        max_tasks=8,
        for_graphs=in_graph,
        starts_early=starts_early,
    )
    stream = torch.cuda.Stream()
    x = [draw(ROWS, inputs, torch.float32, n) for n, (inputs, _) in enumerate(SIZES)]
    y = [torch.zeros(ROWS, outputs, device="cuda") for _, outputs in SIZES]
    torch.cuda.synchronize()
    lora.set_batch(served.lease, SEGMENTS, stream.cuda_stream)

    def launch() -> None:
        for _ in range(ROUNDS):
            for index, (inputs, outputs) in enumerate(SIZES):
                lora.apply(
                    index,
                    x[index].data_ptr(),
                    y[index].data_ptr(),
                    ROWS,
                    inputs,
                    outputs,
                    _core.Dtype.float32,
                    stream=stream.cuda_stream,
                )

    if in_graph:
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        with torch.cuda.stream(stream):
            graph.replay()
    else:
        launch()
    torch.cuda.synchronize()
    return y


@pytest.mark.parametrize("in_graph", [False, True])
def test_the_bits_are_those_of_kernels_in_order(in_graph: bool, tmp_path: Path) -> None:
    with serve(tmp_path, torch.bfloat16) as served:
        in_order = outputs_of(served, starts_early=False, in_graph=in_graph)
        assert all(y.any() for y in in_order)
        for _ in range(5):
            early = outputs_of(served, starts_early=True, in_graph=in_graph)
            assert all(torch.equal(a, b) for a, b in zip(in_order, early, strict=True))
