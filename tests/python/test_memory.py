"""Memory does not grow with the number of registered adapters, but for a bounded record of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedlora import memory

ROOT = Path(__file__).parents[2]
NUM_ADAPTERS = 500
MAX_BYTES_PER_ADAPTER = 64 * 1024


@pytest.mark.slow
def test_500_adapters_through_room_for_8_cost_little_each(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.memory_probe", str(tmp_path), str(NUM_ADAPTERS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    cost: dict[str, Any] = json.loads(result.stdout)
    print(json.dumps(cost, indent=2))
    assert cost["registered"] == NUM_ADAPTERS
    assert cost["modules"] >= 200
    assert cost["bytes_per_adapter"] < MAX_BYTES_PER_ADAPTER
    assert cost["second_pass_bytes_per_adapter"] < 1024
    assert cost["lost_pages"] == 0
    # The cache really was too small: nearly every adapter was evicted and read again.
    assert cost["source_reads"] >= 2 * NUM_ADAPTERS
    assert cost["source_rereads"] >= NUM_ADAPTERS
    assert min(cost["host_evictions"], cost["device_evictions"]) >= NUM_ADAPTERS


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, 8000 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, 8000 * 1024),
        ({"memory.max": "9000", "memory.current": "5000"}, 4000),
        (
            {
                "memory.max": "9000",
                "memory.current": "8900",
                "memory.stat": "anon 6000\nactive_file 100\ninactive_file 2500\nslab 300\n",
            },
            2600,
        ),
        ({"memory.max": "9000", "memory.current": "9500", "memory.stat": "anon 9500\n"}, 0),
        ({"memory.max": "9000000000", "memory.current": "0"}, 8000 * 1024),
    ],
    ids=["no group", "no limit", "no statistics", "page cache", "over the limit", "machine full"],
)
def test_memory_in_a_group_is_its_limit_less_what_cannot_be_dropped(
    group: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000 kB\nMemAvailable:    8000 kB\n")
    for name, text in group.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_memory_bytes() == expected
