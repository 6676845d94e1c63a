"""The scatter kernel alone, without what is read and uploaded before it, against plain copies."""

from __future__ import annotations

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
from pagedlora.loaders.hf import make_plan, open_peft_directory
from pagedlora.loaders.module_table import ModuleTable

NAME = "84 MB"
PADDING_BYTES = 1 << 20


def measure_scatter() -> list[Result]:
    """One adapter, in both stagings: each byte is read once and written once, as by a copy."""
    with open_fleet({NAME: BIG}, host="256MiB", device="256MiB") as fleet:
        fleet.add([NAME])
        with fleet.lease([NAME]) as lease:
            return [
                _against_copy(fleet, lease, "device", "copy on the GPU", 20, 0.90),
                _against_copy(fleet, lease, "pinned", "pinned copy", 4, None),
            ]


def _against_copy(  # noqa: PLR0917 - one line of the table
    fleet: Fleet, lease: BatchLease, staging: str, copy_name: str, repeats: int, goal: float | None
) -> Result:
    """Several in a row, so that the launch of one is hidden by the one before."""
    table = ModuleTable(fleet.config)
    opened = open_peft_directory(fleet.paths[NAME])
    plan = make_plan(opened.bind(table), table, opened.source)
    scatter = _core.GpuScatter(
        staging_bytes=opened.source.size_bytes + PADDING_BYTES, staging=staging
    )
    (num_bytes,) = scatter.execute(lease, [(fleet.requests[NAME].request_id, plan)])
    assert scatter.num_launches == 1
    where = {"pin_memory": True} if staging == "pinned" else {"device": "cuda"}
    source = torch.empty(num_bytes, dtype=torch.uint8, **where)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def scatters() -> None:
        for _ in range(repeats):
            scatter.repeat()
        torch.cuda.synchronize()

    def copies() -> None:
        for _ in range(repeats):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    timings = run_rounds({"scatters": Case(scatters), "copies": Case(copies)}, ROUNDS)
    speed = repeats * num_bytes / timings.median("scatters").wall / 1e9
    detail = f"{repeats} times: {milliseconds(timings, 'scatters', 'copies')}, {speed:.0f} GB/s"
    title = f"scatter {NAME} from {staging} staging / {copy_name}"
    return by_wall(timings.result(title, "copies", "scatters", goal, detail))
