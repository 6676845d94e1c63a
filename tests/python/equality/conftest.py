"""Adapters, judges and engines that the equality suites share; made once per family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from tests.support.equality_bench import Bench, open_bench
from tests.support.peft_oracle import PeftOracle, save_adapters

AdaptersOf = Callable[[str], dict[str, Path]]
OracleOf = Callable[[str], PeftOracle]
RoomyOf = Callable[[str], Bench]


@pytest.fixture(scope="session")
def adapters_of(tmp_path_factory: pytest.TempPathFactory) -> AdaptersOf:
    """Family to its saved adapters."""

    @cache
    def saved(family: str) -> dict[str, Path]:
        return save_adapters(tmp_path_factory.mktemp(family), family)

    return saved


@pytest.fixture(scope="session")
def oracle_of(adapters_of: AdaptersOf) -> OracleOf:
    """Family to PEFT on it, in float32."""

    @cache
    def loaded(family: str) -> PeftOracle:
        return PeftOracle(family, adapters_of(family))

    return loaded


@pytest.fixture(scope="session")
def _roomy_of(adapters_of: AdaptersOf) -> Iterator[RoomyOf]:
    with ExitStack() as benches:

        @cache
        def opened(family: str) -> Bench:
            return benches.enter_context(open_bench(family, adapters_of(family)))

        yield opened


@pytest.fixture
def roomy_of(_roomy_of: RoomyOf) -> Iterator[RoomyOf]:
    """Family to an engine with room for everything, shared: leave it as it was."""
    used: list[Bench] = []

    def lent(family: str) -> Bench:
        used.append(_roomy_of(family))
        return used[-1]

    yield lent
    for bench in used:
        bench.check()
