"""Sampled answers depend on the request and its seed, not on room, batch or neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.equality_bench import NUM_TOKENS, Bench, make_cases, open_bench
from tests.support.peft_oracle import Case

from pagedlora import SamplingParams

FAMILIES = ("llama", "gemma2")


def sampling(count: int) -> list[SamplingParams]:
    """A different way to choose for each request."""
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=(0.7, 1.0, 2.5)[index % 3],
            top_p=(1.0, 0.9, 0.6)[index // 3 % 3],
            top_k=(0, 20)[index % 2],
            seed=index,
        )
        for index in range(count)
    ]


def tokens(bench: Bench, cases: list[Case], params: list[SamplingParams]) -> list[list[int]]:
    return [answer.tokens for answer in bench.ask(cases, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_pressure_changes_no_sampled_token(
    family: str, adapters_of: Callable[[str], dict[str, Path]], roomy_of: Callable[[str], Bench]
) -> None:
    cases = make_cases(family)
    params = sampling(len(cases))
    calm = tokens(roomy_of(family), cases, params)
    with open_bench(
        family,
        adapters_of(family),
        device_adapters=2,
        host_adapters=2,
        max_batch_size=3,
        num_blocks=24,
    ) as bench:
        assert tokens(bench, cases, params) == calm
        assert tokens(bench, cases[::-1], params[::-1]) == calm[::-1]
        stats = bench.llm.peft_cache_manager.stats
        assert stats.device.tasks_evicted >= 6
        assert stats.host.tasks_evicted >= 3
        assert stats.source_rereads >= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_alone_samples_what_it_samples_in_a_batch(
    family: str, roomy_of: Callable[[str], Bench]
) -> None:
    bench, cases = roomy_of(family), make_cases(family)
    params = sampling(len(cases))
    together = tokens(bench, cases, params)
    alone = [tokens(bench, [case], [how])[0] for case, how in zip(cases, params, strict=True)]
    assert together == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides(family: str, roomy_of: Callable[[str], Bench]) -> None:
    bench, case = roomy_of(family), Case("r33", (1, 2, 3))
    hot = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=2.5, seed=seed) for seed in (1, 2, 3, 1)
    ]
    first, second, third, again = tokens(bench, [case] * 4, hot)
    assert first == again
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
