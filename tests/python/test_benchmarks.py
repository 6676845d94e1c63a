"""Benchmarks are run by hand: here that each can still begin."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "python"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.python.{name}")
