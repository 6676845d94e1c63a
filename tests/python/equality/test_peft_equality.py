"""Promise 1: whatever is evicted and read again, each request gets what PEFT gives alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.equality_bench import (
    FAMILIES,
    PROMPT_LENGTHS,
    Bench,
    RecordingRunner,
    make_cases,
    open_bench,
)
from tests.support.peft_oracle import (
    TOLERANCE,
    Case,
    PeftOracle,
    assert_answers_differ,
    assert_equal_to_peft,
)
from tests.support.tiny_models import tiny_config

AdaptersOf = Callable[[str], dict[str, Path]]
OracleOf = Callable[[str], PeftOracle]
RoomyOf = Callable[[str], Bench]


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_under_pressure_answer_as_peft_does(
    family: str, adapters_of: AdaptersOf, oracle_of: OracleOf
) -> None:
    adapters, cases = adapters_of(family), make_cases(family)
    with open_bench(family, adapters, device_adapters=2, host_adapters=3) as bench:
        answers = bench.ask(cases)
        assert_equal_to_peft(oracle_of(family), cases, answers)
        assert_answers_differ(cases, answers)
        cases.reverse()
        again = bench.ask(cases)
        assert_equal_to_peft(oracle_of(family), cases, again)
        cases.reverse()
        assert_equal_to_peft(oracle_of(family), cases, bench.ask(cases))
        stats = bench.llm.peft_cache_manager.stats
        assert stats.device.tasks_evicted >= 3
        assert stats.host.tasks_evicted >= 3
        assert stats.source_rereads >= 3
        assert_rows_were_ragged(bench.recorder)


def assert_rows_were_ragged(recorder: RecordingRunner) -> None:
    """Prompts came in chunks, in one row with decoding requests of others and of the base."""
    steps = recorder.steps
    assert any(
        not sequence.sample and sequence.past_tokens > 0
        for step in steps
        for sequence in step.sequences
    ), "no prompt took three steps"
    assert any(
        {len(s.token_ids) > 1 for s in step.sequences}
        == {s.uses_adapter for s in step.sequences}
        == {True, False}
        for step in steps
    ), "no row held a chunk and a decoding request, an adapter and the base"


@pytest.mark.parametrize("family", FAMILIES)
def test_base_rows_do_not_notice_the_adapters(
    family: str, roomy_of: RoomyOf, oracle_of: OracleOf
) -> None:
    bench, cases = roomy_of(family), make_cases(family)
    bases = [position for position, case in enumerate(cases) if case.adapter is None]
    bench.ask(cases)  # from now on the adapters are there, and nobody waits for one
    mixed = bench.ask(cases)
    # All of the base: the same steps, but for the adapters.
    alone = bench.ask([Case(None, case.prompt) for case in cases])
    only_base = bench.ask([cases[position] for position in bases])
    assert_equal_to_peft(oracle_of(family), [cases[i] for i in bases], [mixed[i] for i in bases])
    for position, fewer in zip(bases, only_base, strict=True):
        assert torch.equal(mixed[position].logits, alone[position].logits)
        assert mixed[position].tokens == alone[position].tokens == fewer.tokens
        torch.testing.assert_close(
            mixed[position].logits,
            fewer.logits,
            rtol=0,
            atol=TOLERANCE * float(fewer.logits.std(dim=1).min()),
        )


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windowed_families_look_at_less_than_their_context(family: str) -> None:
    assert tiny_config(family).sliding_window < max(PROMPT_LENGTHS)
