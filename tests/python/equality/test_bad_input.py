"""An attacker at the front door: whatever goes wrong, the others get their right answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cache_fixtures import Call
from tests.support.equality_bench import GREEDY, Bench, make_cases, open_bench
from tests.support.llm_fixtures import SMALL_CACHE
from tests.support.peft_oracle import Case
from tests.support.tiny_models import VOCAB_SIZE

from pagedlora import (
    LLM,
    AdapterNotFoundError,
    AdapterReadError,
    AdapterSourceChangedError,
    CapacityError,
    InvalidArgumentError,
    LoRARequest,
    PagedLoraError,
    RequestOutput,
    SamplingParams,
)
from pagedlora.engine import engine_core

AdaptersOf = Callable[[str], dict[str, Path]]
SHORT = SamplingParams(temperature=0, max_tokens=4)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapters(adapters_of: AdaptersOf, tmp_path: Path) -> dict[str, Path]:
    """A copy of llama's adapters that a test may damage."""
    return {
        name: Path(shutil.copytree(path, tmp_path / name))
        for name, path in adapters_of("llama").items()
    }


@pytest.fixture
def own_bench(adapters: dict[str, Path]) -> Iterator[Bench]:
    """Room for two on the device and three in host; checked after the test."""
    with open_tight_bench(adapters) as bench:
        yield bench


@pytest.fixture(scope="module")
def _shared_bench(adapters_of: AdaptersOf) -> Iterator[Bench]:
    with open_tight_bench(adapters_of("llama")) as bench:
        yield bench


@pytest.fixture
def bench(_shared_bench: Bench) -> Iterator[Bench]:
    """As `own_bench`, for tests that leave it as it was."""
    yield _shared_bench
    _shared_bench.check()


def open_tight_bench(adapters: dict[str, Path]) -> AbstractContextManager[Bench]:
    return open_bench("llama", adapters, device_adapters=2, host_adapters=3, max_batch_size=4)


@pytest.fixture
def right(roomy_of: Callable[[str], Bench]) -> dict[Case, list[int]]:
    """The answers that nobody disturbed."""
    cases = make_cases("llama")
    answers = roomy_of("llama").ask(cases)
    return {case: answer.tokens for case, answer in zip(cases, answers, strict=True)}


def test_all_bad_requests_at_once_leave_the_good_ones_alone(
    bench: Bench, adapters_of: AdaptersOf, right: dict[Case, list[int]]
) -> None:
    adapters = adapters_of("llama")
    bad: list[tuple[Any, SamplingParams, Any, type[PagedLoraError], str]] = [
        ([], GREEDY, None, InvalidArgumentError, "empty"),
        ([VOCAB_SIZE], GREEDY, "r1", InvalidArgumentError, f"token id {VOCAB_SIZE}"),
        ([2**70], GREEDY, "r3", InvalidArgumentError, f"token id {2**70}"),
        ([-(2**70)], GREEDY, None, InvalidArgumentError, "token id -"),
        ("text", GREEDY, "r1", InvalidArgumentError, "no tokenizer"),
        ([1] * 512, GREEDY, "r1", CapacityError, "512 tokens, and the model's full length is 512"),
        ([1], SamplingParams(max_tokens=10**12), "r1", CapacityError, "128 KV blocks of 4"),
        ([1], GREEDY, "nobody", AdapterNotFoundError, "'nobody'"),
        ([1], GREEDY, "", AdapterNotFoundError, "''"),
        ([1], GREEDY, "\ud800", AdapterNotFoundError, "no adapter"),
        ([1], GREEDY, LoRARequest("a", 1, "no/such"), AdapterNotFoundError, "no/such"),
        ([1], GREEDY, LoRARequest("b", 2, "nul\0"), AdapterNotFoundError, "nul"),
        ([1], GREEDY, LoRARequest("c", 3, "/" + "a" * 5000), AdapterReadError, "too long"),
        ([1], GREEDY, LoRARequest("d", 4, __file__), AdapterNotFoundError, "test_bad_input"),
        ([1], GREEDY, LoRARequest("r1", 5, adapters["r3"]), InvalidArgumentError, "registered"),
    ]
    cases = list(right)[: len(bad)]
    prompts: list[Any] = []
    params: list[SamplingParams] = []
    loras: list[Any] = []
    for case, (prompt, how, lora, _, _) in zip(cases, bad, strict=True):
        prompts += [prompt, list(case.prompt)]
        params += [how, GREEDY]
        loras += [lora, case.adapter]
    outputs = bench.llm.generate(prompts, params, loras)
    assert tokens_of(outputs[1::2]) == [right[case] for case in cases]
    for output, (_, _, lora, error, words) in zip(outputs[::2], bad, strict=True):
        assert type(output.error) is error, lora
        assert words in str(output.error)
        assert output.outputs == []
    assert {info.name for info in bench.llm.list_loras()} == set(adapters)


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate([[1]], SamplingParams(max_tokens=0)),
        lambda llm: llm.generate([[1]], SamplingParams(temperature=float("nan"))),
        lambda llm: llm.generate((prompt for prompt in [[1]]), GREEDY),
        lambda llm: llm.generate([[1], None], GREEDY),
        lambda llm: llm.generate([[1], [None]], GREEDY),
        lambda llm: llm.generate([1, [2]], GREEDY),
        lambda llm: llm.generate([[True]], GREEDY),
        lambda llm: llm.generate(torch.tensor([1.0, 2.0]), GREEDY),
        lambda llm: llm.generate(torch.zeros(1, 2, 3, dtype=torch.int64), GREEDY),
        lambda llm: llm.generate([[1]], [None]),
        lambda llm: llm.generate([[1]], {"max_tokens": 3}),
        lambda llm: llm.generate([[1]], GREEDY, [["r1"]]),
        lambda llm: llm.generate([[1]], GREEDY, LoRARequest("new", None, 7)),
        lambda llm: llm.load_lora(None, "r1"),
        lambda llm: llm.load_lora("x" * 257, "r1"),
    ],
)
def test_misuse_raises_before_anything_runs(bench: Bench, ask: Callable[[LLM], object]) -> None:
    steps = len(bench.recorder.steps)
    with pytest.raises(InvalidArgumentError):
        ask(bench.llm)
    assert len(bench.recorder.steps) == steps


def test_no_prompts_and_unusual_containers_are_answered(bench: Bench) -> None:
    llm = bench.llm
    assert llm.generate([], GREEDY) == []
    assert llm.generate([], [], []) == []
    (expected,) = tokens_of(llm.generate([1, 2], GREEDY, "r12"))
    for prompts in ((1, 2), [(1, 2)], torch.tensor([1, 2]), torch.tensor([[1, 2]]).int()):
        assert tokens_of(llm.generate(prompts, GREEDY, "r12")) == [expected]


def test_one_adapter_fifty_times_is_read_once(
    own_bench: Bench, right: dict[Case, list[int]]
) -> None:
    case = next(case for case in right if case.adapter == "r33")
    assert [a.tokens for a in own_bench.ask([case] * 50)] == [right[case]] * 50
    stats = own_bench.llm.peft_cache_manager.stats
    assert (stats.source_reads, stats.source_rereads) == (1, 0)
    assert stats.device.bytes_loaded == stats.host.bytes_loaded, "copied to the device once"


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (Path.unlink, AdapterNotFoundError),
        (lambda path: path.write_bytes(path.read_bytes()[:-64]), AdapterSourceChangedError),
        (lambda path: shutil.rmtree(path.parent), AdapterNotFoundError),
    ],
)
def test_files_that_vanish_during_a_run_fail_their_own_requests_alone(
    own_bench: Bench,
    adapters: dict[str, Path],
    right: dict[Case, list[int]],
    damage: Callable[[Path], object],
    error: type[PagedLoraError],
) -> None:
    victim = "r48"
    cases = sorted(right, key=lambda case: case.adapter == victim)  # the victim is read last

    def damage_in_the_third_step(number: int) -> None:
        if number == 3:
            damage(adapters[victim] / WEIGHTS)

    outputs = run_with(own_bench, cases, damage_in_the_third_step)
    for case, output in zip(cases, outputs, strict=True):
        if case.adapter == victim:
            assert type(output.error) is error
        else:
            assert tokens_of([output]) == [right[case]]
    # Requests of later calls fail as well, until the adapter comes back under another name.
    (again,) = own_bench.generate([Case(victim, (1, 2))])
    assert type(again.error) is error


def test_a_failed_read_can_be_repaired(
    own_bench: Bench, adapters: dict[str, Path], right: dict[Case, list[int]]
) -> None:
    case = next(case for case in right if case.adapter == "r12")
    hidden = adapters["r12"] / "hidden"
    (adapters["r12"] / WEIGHTS).rename(hidden)
    (failed,) = own_bench.generate([case])
    assert isinstance(failed.error, AdapterNotFoundError)
    shutil.copy(hidden, adapters["r12"] / WEIGHTS)
    own_bench.llm.load_lora("repaired", adapters["r12"])
    assert own_bench.ask([Case("repaired", case.prompt)])[0].tokens == right[case]


SEAMS: dict[str, Callable[[Bench], tuple[object, str]]] = {
    "forward": lambda own_bench: (own_bench.recorder, "forward"),
    "sampling": lambda _: (engine_core, "sample_tokens"),
    "lease": lambda own_bench: (own_bench.llm.peft_cache_manager, "ensure_batch"),
    "add": lambda own_bench: (own_bench.llm.peft_cache_manager, "add_request_peft"),
    "pages": lambda own_bench: (own_bench.llm.peft_cache_manager, "determine_num_pages"),
    "allocation": lambda own_bench: (own_bench.llm._parts.core._kv, "try_allocate"),
    "release of blocks": lambda own_bench: (own_bench.llm._parts.core._kv, "free_resources"),
    "output": lambda own_bench: (own_bench.llm._parts.processor, "make_output"),
    "request": lambda own_bench: (own_bench.llm._parts.processor, "make_request"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("seam", SEAMS)
def test_an_exception_anywhere_leaves_nothing_behind(
    bench: Bench, seam: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = make_cases("llama")[:8]
    expected = [answer.tokens for answer in bench.ask(cases, SHORT)]
    fatal = [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3), MemoryError()]
    for nth in (1, 2, 3, 5, 8, 13, 21):
        with monkeypatch.context() as patch:
            exception = fatal[nth % len(fatal)]
            owner, name = SEAMS[seam](bench)
            failing = FailsOnce(getattr(owner, name), nth, when, exception)
            patch.setattr(owner, name, failing)
            with pytest.raises(type(exception)) if nth == 1 else suppress(type(exception)):
                bench.ask(cases, SHORT)
        bench.check()
        assert [answer.tokens for answer in bench.ask(cases, SHORT)] == expected
        if failing.calls < nth:
            break


def test_a_second_interrupt_during_the_clean_up_leaves_nothing_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = make_cases("llama")[:8]
    expected = [answer.tokens for answer in bench.ask(cases, SHORT)]
    core = bench.llm._parts.core
    for owner, name, nth in (
        (bench.llm.peft_cache_manager, "mark_request_done", 1),
        (bench.llm.peft_cache_manager, "mark_request_done", 2),
        (core._kv, "reset", 1),
    ):
        with monkeypatch.context() as patch:
            forward = FailsOnce(bench.recorder.forward, 2, "after", KeyboardInterrupt())
            clean_up = FailsOnce(getattr(owner, name), nth, "before", KeyboardInterrupt())
            patch.setattr(bench.recorder, "forward", forward)
            patch.setattr(owner, name, clean_up)
            with pytest.raises(KeyboardInterrupt):
                bench.ask(cases, SHORT)
            assert clean_up.calls == nth
        assert core.has_unfinished
        assert [answer.tokens for answer in bench.ask(cases, SHORT)] == expected
        bench.check()


class FailsOnce:
    """A function that raises in its n-th call, before or after it did its work."""

    def __init__(
        self, function: Callable[..., Any], nth: int, when: str, exception: BaseException
    ) -> None:
        self.calls = 0
        self._function = function
        self._nth = nth
        self._before = when == "before"
        self._exception = exception

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        fails = self.calls == self._nth
        if fails and self._before:
            raise self._exception
        result = self._function(*args, **kwargs)
        if fails:
            raise self._exception
        return result


def test_a_second_generate_inside_a_running_one_is_refused_and_harmless(
    bench: Bench, right: dict[Case, list[int]]
) -> None:
    refusals: list[InvalidArgumentError] = []
    steps = len(bench.recorder.steps)

    def generate_again(number: int) -> None:
        with pytest.raises(InvalidArgumentError, match="is running") as caught:
            bench.llm.generate([[1]], GREEDY, "r1")
        refusals.append(caught.value)

    cases = list(right)
    outputs = run_with(bench, cases, generate_again)
    assert tokens_of(outputs) == [right[case] for case in cases]
    assert len(refusals) == len(bench.recorder.steps) - steps > 0


def test_adapters_registered_during_a_run_are_harmless(
    own_bench: Bench, adapters: dict[str, Path], right: dict[Case, list[int]]
) -> None:
    cases = list(right)
    outputs = run_with(
        own_bench, cases, lambda number: own_bench.llm.load_lora(f"new {number}", adapters["r64"])
    )
    assert tokens_of(outputs) == [right[case] for case in cases]


@pytest.mark.parametrize("first", [0, 1])
def test_two_engines_on_one_model_do_not_disturb_each_other(
    adapters: dict[str, Path], right: dict[Case, list[int]], first: int
) -> None:
    cases = [case for case in right if len(case.prompt) == 3]
    with open_bench("llama", adapters) as one:
        model = one.llm._parts.loaded.model
        two = LLM(model, peft_cache_config=SMALL_CACHE)
        # The same names for other adapters: hooks of one must not act in the other.
        for name, other in zip(adapters, reversed(adapters.values()), strict=True):
            two.load_lora(name, other)
        swapped = dict(zip(adapters, reversed(adapters), strict=True))
        for _ in range(2):
            assert [answer.tokens for answer in one.ask(cases)] == [right[c] for c in cases]
            prompts = [list(case.prompt) for case in cases]
            outputs = two.generate(prompts, GREEDY, [case.adapter for case in cases])
            assert tokens_of(outputs) == [
                right[Case(case.adapter and swapped[case.adapter], case.prompt)] for case in cases
            ]
        survivor = (two, one.llm)[first]
        (one.llm, two)[first].close()
        assert len(tokens_of(survivor.generate([1, 2], GREEDY, "r12"))[0]) == GREEDY.max_tokens
        two.close()


def test_two_engines_on_one_model_answer_from_two_threads(
    adapters: dict[str, Path], right: dict[Case, list[int]]
) -> None:
    """Their steps take turns: hooks of both are on the same modules."""
    cases = [case for case in right if len(case.prompt) == 3]
    with (
        open_bench("llama", adapters) as one,
        LLM(one.llm._parts.loaded.model, peft_cache_config=SMALL_CACHE) as two,
    ):
        for name, directory in adapters.items():
            two.load_lora(name, directory)
        prompts = [list(case.prompt) for case in cases]
        names = [case.adapter for case in cases]
        calls = [
            Call(lambda llm=llm: [llm.generate(prompts, GREEDY, names) for _ in range(5)])
            for llm in (one.llm, two)
        ]
        for call in calls:
            for outputs in call.result():
                assert tokens_of(outputs) == [right[case] for case in cases]


def test_an_engine_inside_anothers_step_is_refused(adapters: dict[str, Path]) -> None:
    with open_bench("llama", adapters) as one:
        model = one.llm._parts.loaded.model
        with LLM(model, peft_cache_config=SMALL_CACHE) as two:
            refused: list[BaseException] = []

            def ask_the_other(*_: object) -> None:
                with pytest.raises(InvalidArgumentError, match="inside another engine's step") as e:
                    two.generate([[1]], GREEDY)
                refused.append(e.value)

            handle = model.register_forward_pre_hook(ask_the_other)
            one.llm.generate([[1, 2]], GREEDY, "r12")
            handle.remove()
            assert len(refused) == GREEDY.max_tokens


def test_a_closed_engine_says_so_and_its_model_is_as_it_was(adapters: dict[str, Path]) -> None:
    with open_bench("llama", adapters) as bench:
        llm, model = bench.llm, bench.llm._parts.loaded.model

        def explode(number: int) -> None:
            raise RuntimeError("boom")

        with pytest.raises(RuntimeError, match="boom"):
            run_with(bench, [Case("r12", (1, 2))], explode)
        bench.check()
        for _ in range(2):
            llm.close()
        for use in (
            lambda: llm.generate([[1]], GREEDY),
            lambda: llm.load_lora("new", adapters["r1"]),
            llm.list_loras,
        ):
            with pytest.raises(InvalidArgumentError, match="closed"):
                use()
        assert not any(module._forward_hooks for module in model.modules())
        assert model.config._attn_implementation == "sdpa"
        assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCAB_SIZE)


def test_close_inside_a_run_is_refused_and_harmless(adapters: dict[str, Path]) -> None:
    with open_bench("llama", adapters) as bench:
        with pytest.raises(InvalidArgumentError, match="inside generate"):
            run_with(bench, make_cases("llama"), lambda number: bench.llm.close())
        bench.check()
        assert len(bench.llm.generate([[1]], GREEDY)[0].outputs) == 1


def run_with(
    bench: Bench, cases: list[Case], before_step: Callable[[int], object]
) -> list[RequestOutput]:
    """Answers the cases and does something before each forward, given its number from 1."""
    number, forward = 0, bench.recorder.forward

    def wrapped(*args: Any) -> torch.Tensor:
        nonlocal number
        number += 1
        before_step(number)
        return forward(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.recorder, "forward", wrapped)
        return bench.generate(cases)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """The answers; none of the requests failed."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]
