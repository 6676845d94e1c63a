"""Little room and much to do: suspended, recomputed, evicted, read again, and still PEFT's answers.

60 requests of 8 adapters and the base arrive at random moments, through KV blocks for about two
of them, device room for 2 adapters and host room for 4.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.equality_bench import GREEDY, Bench, open_bench
from tests.support.peft_oracle import (
    AdapterSpec,
    Answer,
    Case,
    PeftOracle,
    assert_follow_peft,
    save_adapters,
)
from tests.support.tiny_models import VOCAB_SIZE

from pagedlora import LlmRequest, SamplingParams

FAMILY = "llama"
# Of about one size, so that room for four is room for any four.
SPECS = {
    f"r{rank}": AdapterSpec(rank, "all-linear", use_rslora=rank % 2 == 0) for rank in range(9, 17)
}
NUM_REQUESTS = 60
SEEDS = (6, 7, 10)
SIZES: dict[str, Any] = {"device_adapters": 2, "host_adapters": 4, "num_blocks": 22}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight saved adapters by name."""
    return save_adapters(tmp_path_factory.mktemp("eight"), FAMILY, SPECS)


@pytest.fixture(scope="module")
def oracle(adapters: dict[str, Path]) -> PeftOracle:
    """PEFT with the eight."""
    return PeftOracle(FAMILY, adapters)


@pytest.fixture(scope="module")
def roomy(adapters: dict[str, Path]) -> Iterator[Bench]:
    """An engine that nobody disturbs, for sampled answers."""
    with open_bench(FAMILY, adapters) as bench:
        yield bench


def draw(seed: int) -> tuple[list[Case], list[SamplingParams], list[int]]:
    """Requests, how their tokens are chosen, and how many steps each comes after the last one."""
    generator = random.Random(seed)
    names = [None, *SPECS]
    cases, params, gaps = [], [], []
    for _ in range(NUM_REQUESTS):
        length = generator.choice((2, 5, 9, 14, 23, 40))
        prompt = tuple(generator.randrange(VOCAB_SIZE) for _ in range(length))
        cases.append(Case(generator.choice(names), prompt))
        params.append(replace(GREEDY, max_tokens=generator.choice((3, 8, 20))))
        gaps.append(generator.choice((0, 0, 0, 1, 2, 5)))
    return cases, params, gaps


def answer_all(
    bench: Bench,
    cases: Sequence[Case],
    params: Sequence[SamplingParams],
    gaps: Sequence[int],
    *,
    settled: bool,
) -> list[Answer]:
    """Feeds the engine step by step and verifies every invariant after each.

    With `settled` loads end between steps, so that what happens is the same in every run.
    """
    parts = bench.llm._parts
    requests: list[LlmRequest] = []
    due = 0
    while len(requests) < len(cases) or parts.core.has_unfinished:
        while len(requests) < len(cases) and due <= 0:
            case, number = cases[len(requests)], len(requests)
            request_id = next(bench.llm._request_ids)
            parts.begin(request_id, list(case.prompt), params[number], case.adapter)
            requests.append(parts.core._live.get(request_id))
            due = gaps[number]
        assert not settled or bench.llm.peft_cache_manager.wait_idle()
        for changed in parts.core.step():
            if changed.has_ended:
                parts.adapters.release(changed)
        due -= 1
        parts.core.check_invariants()
        bench.llm.peft_cache_manager.check_invariants()
    assert [request.error for request in requests] == [None] * len(requests)
    return [Answer(r.output_token_ids, bench.recorder.logits(r.request_id)) for r in requests]


def totals(bench: Bench) -> Counter[str]:
    """Sums over all steps."""
    sums: Counter[str] = Counter()
    for step in bench.llm.get_stats():
        for name in ("numNewlySuspendedRequests", "numRecomputePausedRequests"):
            sums[name] += step[name]
        for name, value in step["peftCacheIterationStats"].items():
            sums[name] += value
    return sums


def assert_under_pressure(bench: Bench, sums: Counter[str], policy: str, host_blocks: int) -> None:
    """What the test is about has happened."""
    stats = bench.llm.peft_cache_manager.stats
    assert stats.source_rereads >= 3
    assert stats.device.tasks_evicted >= 10
    assert stats.host.tasks_evicted >= 5
    suspended, recomputed = sums["numNewlySuspendedRequests"], sums["numRecomputePausedRequests"]
    if policy == "guaranteed_no_evict":
        assert (suspended, recomputed, sums["requestsPaused"]) == (0, 0, 0)
        return
    assert suspended + recomputed >= 10
    assert (suspended >= 5) == (host_blocks > 0)
    assert recomputed >= 3
    assert sums["requestsResumed"] == sums["requestsPaused"] >= 8, "each pause was resumed"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("policy", "host_blocks"),
    [("guaranteed_no_evict", 0), ("max_utilization", 0), ("max_utilization", 12)],
)
def test_sixty_requests_through_little_room_answer_as_peft_does(
    adapters: dict[str, Path], oracle: PeftOracle, seed: int, policy: Any, host_blocks: int
) -> None:
    cases, params, gaps = draw(seed)
    with open_bench(FAMILY, adapters, policy=policy, host_blocks=host_blocks, **SIZES) as bench:
        answers = answer_all(bench, cases, params, gaps, settled=True)
        assert_under_pressure(bench, totals(bench), policy, host_blocks)
    assert_follow_peft(oracle, cases, answers)


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_sampled_answers_are_those_of_an_engine_with_room(
    adapters: dict[str, Path], roomy: Bench, policy: Any
) -> None:
    cases, params, gaps = draw(SEEDS[1])
    params = [
        replace(each, temperature=1.2, top_p=0.9, seed=number) for number, each in enumerate(params)
    ]
    right = [answer.tokens for answer in roomy.ask(cases, params)]
    with open_bench(FAMILY, adapters, policy=policy, host_blocks=12, **SIZES) as bench:
        answers = answer_all(bench, cases, params, gaps, settled=True)
        assert_under_pressure(bench, totals(bench), policy, 12)
    assert [answer.tokens for answer in answers] == right


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_answers_do_not_depend_on_when_loads_end(
    adapters: dict[str, Path], oracle: PeftOracle, policy: Any
) -> None:
    cases, params, gaps = draw(SEEDS[0])
    with open_bench(FAMILY, adapters, policy=policy, host_blocks=12, **SIZES) as bench:
        answers = answer_all(bench, cases, params, gaps, settled=False)
    assert_follow_peft(oracle, cases, answers)
