"""The equality check can fail: each of these small faults in the engine makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.equality_bench import Bench, make_cases
from tests.support.peft_oracle import (
    Answer,
    Case,
    PeftOracle,
    assert_equal_to_peft,
    assert_follow_peft,
)

from pagedlora import _core
from pagedlora.engine import attention_backends, paged_model, row_map
from pagedlora.engine.attention import AttentionCall
from pagedlora.loaders import binding
from pagedlora.loaders.binding import BoundModule, make_rows

Mutation = Callable[[pytest.MonkeyPatch], None]
FAMILIES = ("llama", "gemma2")
_ATTEND = paged_model._PagedStep.attend


def _patch_attention(change: Callable[[AttentionCall], AttentionCall]) -> Mutation:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            paged_model._PagedStep, "attend", lambda step, call: _ATTEND(step, change(call))
        )

    return mutate


def _skip_attention_of_a_layer(patch: pytest.MonkeyPatch) -> None:
    def attend(step: Any, call: AttentionCall) -> torch.Tensor:
        output = _ATTEND(step, call)
        return torch.zeros_like(output) if call.layer_idx == 1 else output

    patch.setattr(paged_model._PagedStep, "attend", attend)


def _patch_tables(
    change: Callable[[list[list[int]], list[int], int], list[list[int]]],
) -> Mutation:
    """Changes the block tables of a step, given its past tokens and the block size."""

    def make(
        tables: list[list[int]], past: list[int], new: list[int], block_size: int
    ) -> _core.AttentionBatch:
        return _core.AttentionBatch(change(tables, past, block_size), past, new, block_size)

    def mutate(patch: pytest.MonkeyPatch) -> None:
        core = SimpleNamespace(**vars(_core) | {"AttentionBatch": make})
        patch.setattr(attention_backends, "_core", core)

    return mutate


def _read_a_neighbours_block(
    tables: list[list[int]], past: list[int], block_size: int
) -> list[list[int]]:
    """The last decoding sequence reads its oldest full block, never written again, elsewhere."""
    full = [row for row, tokens in enumerate(past) if tokens >= block_size]
    if len(full) > 1:
        tables[full[-1]][0] = tables[full[0]][0]
    return tables


def _patch_segments(
    change: Callable[[list[tuple[int | None, int]]], list[tuple[int | None, int]]],
) -> Mutation:
    """Changes which request's adapter each run of rows uses."""
    original = row_map.RowMap.set

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            row_map.RowMap,
            "set",
            lambda rows, lease, segments: original(rows, lease, change(segments)),
        )

    return mutate


def _last_segment_as_the_first_user(
    segments: list[tuple[int | None, int]],
) -> list[tuple[int | None, int]]:
    """The last sequence gets the adapter of the first that has one."""
    users = [user for user, _ in segments if user is not None]
    return [*segments[:-1], (users[0], segments[-1][1])]


def _shift_the_boundary(
    segments: list[tuple[int | None, int]],
) -> list[tuple[int | None, int]]:
    """The first row of the second sequence gets what the first sequence gets."""
    if len(segments) < 2 or segments[1][1] < 2:
        return segments
    (first, rows), (second, more), *others = segments
    return [(first, rows + 1), (second, more - 1), *others]


FAULTS_OF_A_STEP: dict[str, Mutation] = {
    "attention skipped in a layer": _skip_attention_of_a_layer,
    "attention scaled by 1.1": _patch_attention(
        lambda call: dataclasses.replace(call, scaling=call.scaling * 1.1)
    ),
    "a neighbour's KV block": _patch_tables(_read_a_neighbours_block),
    "a neighbour's adapter": _patch_segments(_last_segment_as_the_first_user),
    "a row of the neighbour": _patch_segments(_shift_the_boundary),
}


@dataclass(frozen=True)
class Exam:
    """An engine with room for everything, what it is asked, and who judges it."""

    bench: Bench
    cases: list[Case]
    oracle: PeftOracle

    def assert_fault_is_seen(self, asked: list[Case] | None = None) -> None:
        """The check as a whole fails now, and so does its teacher-forced half alone."""
        answers = self.bench.ask(self.cases if asked is None else asked)
        with pytest.raises(AssertionError, match=r"tokens differ|below its largest|logits differ"):
            assert_equal_to_peft(self.oracle, self.cases, answers)
        with pytest.raises(AssertionError, match=r"below its largest|logits differ"):
            self.follow(answers)

    def follow(self, answers: list[Answer]) -> None:
        """Feeds the answers to PEFT."""
        assert_follow_peft(self.oracle, self.cases, answers)


@pytest.fixture
def exam(
    family: str,
    roomy_of: Callable[[str], Bench],
    oracle_of: Callable[[str], PeftOracle],
) -> Exam:
    """Of the family that the test is parametrised with."""
    bench, cases = roomy_of(family), make_cases(family)
    bench.ask(cases)  # from now on nobody waits for an adapter, and steps hold several chunks
    return Exam(bench, cases, oracle_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_fault_the_check_passes(exam: Exam) -> None:
    assert_equal_to_peft(exam.oracle, exam.cases, exam.bench.ask(exam.cases))


@pytest.mark.parametrize("fault", FAULTS_OF_A_STEP)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_in_a_step_is_seen(exam: Exam, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS_OF_A_STEP[fault](monkeypatch)
    exam.assert_fault_is_seen()


FAULTS_OF_A_FAMILY: dict[str, Mutation] = {
    "window ignored": _patch_attention(lambda call: dataclasses.replace(call, sliding_window=0)),
    "window one too wide": _patch_attention(
        lambda call: dataclasses.replace(
            call, sliding_window=call.sliding_window and call.sliding_window + 1
        )
    ),
    "soft cap ignored": _patch_attention(lambda call: dataclasses.replace(call, softcap=0.0)),
}


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("mistral", "window ignored"),
        ("mistral", "window one too wide"),
        ("gemma2", "window ignored"),
        ("gemma2", "soft cap ignored"),
    ],
)
def test_a_peculiarity_of_a_family_ignored_is_seen(
    exam: Exam, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS_OF_A_FAMILY[fault](monkeypatch)
    exam.assert_fault_is_seen()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_adapters_swapped_are_seen(exam: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {"r33": "r48", "r48": "r33"}
    manager = exam.bench.llm.lora_manager
    acquire = manager.acquire
    monkeypatch.setattr(
        manager, "acquire", lambda name, request: acquire(swapped.get(name, name), request)
    )
    exam.assert_fault_is_seen()


def _rescaled(modules: Sequence[BoundModule], factor: float) -> list[BoundModule]:
    return [module._replace(scale=module.scale * factor) for module in modules]


FAULTS_OF_THE_LOADER: dict[str, Callable[[Sequence[BoundModule]], list[_core.PlannedRow]]] = {
    "a module dropped": lambda modules: make_rows(modules[1:]),
    "a module twice as strong": lambda modules: make_rows(
        [*_rescaled(modules[:1], 2.0), *modules[1:]]
    ),
    "scaled by 1.1": lambda modules: make_rows(_rescaled(modules, 1.1)),
}


@pytest.mark.parametrize("fault", FAULTS_OF_THE_LOADER)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_of_the_loader_is_seen(
    exam: Exam,
    family: str,
    fault: str,
    adapters_of: Callable[[str], dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(binding, "make_rows", FAULTS_OF_THE_LOADER[fault])
        shapes = exam.bench.llm.lora_manager._parts.shapes
        shapes.clear()
        exam.bench.llm.load_lora(fault, adapters_of(family)["r33"])
        shapes.clear()
    exam.assert_fault_is_seen(
        [Case(fault if c.adapter == "r33" else c.adapter, c.prompt) for c in exam.cases]
    )
