"""These tests need a GPU: tests/gpu/run.sh builds for it and runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.python.equality.conftest import adapters_of, oracle_of

from pagedlora import _core

__all__ = ["adapters_of", "oracle_of"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    support = _core.gpu_support()
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue  # of other directories that are run together with this one
        item.add_marker(pytest.mark.gpu)
        if support["state"] != "available":
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {support['state']}"))
