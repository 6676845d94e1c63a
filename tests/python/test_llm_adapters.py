"""Adapters of an `LLM` come, change and go beside its requests."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support import llm_fixtures
from tests.support.adapters import write_random_adapter
from tests.support.cache_fixtures import Call
from tests.support.llm_fixtures import GREEDY, SMALL_CACHE, make_prompts, tokens_of
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import LoraConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterNotFoundError,
    AdapterPathError,
    PagedLoraWarning,
    UnsupportedAdapterError,
)
from pagedlora.model_config import LoraModelConfig
from pagedlora.requests import LoRARequest
from pagedlora.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings(
    # transformers warns when PEFT 0.21 asks a model whether it checkpoints gradients.
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)
llama_adapters = llm_fixtures.llama_adapters
engines = llm_fixtures.engines
llm = llm_fixtures.llm


def uses_of(llm: LLM) -> dict[int, Any]:
    return llm.lora_manager._names._uses


class PausedEngine:
    """Lets the engine take its first step, then wait until it is told to go on."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        core = llm._parts.core  # type: ignore[union-attr]
        step = core.step
        self.has_stepped, self.go_on = threading.Event(), threading.Event()

        def one_step() -> Any:
            ended = step()
            self.has_stepped.set()
            assert self.go_on.wait(60)
            return ended

        monkeypatch.setattr(core, "step", one_step)


def test_an_unloaded_adapter_answers_no_more(llm: LLM, llama_adapters: dict[str, Path]) -> None:
    before = tokens_of(llm.generate([[1, 2]], GREEDY, "r8"))
    llm.unload_lora("r8", timeout_s=0)
    assert "r8" not in {info.name for info in llm.list_loras()}
    (gone,) = llm.generate([[1, 2]], GREEDY, "r8")
    assert isinstance(gone.error, AdapterNotFoundError)
    with pytest.raises(AdapterNotFoundError):
        llm.unload_lora("r8")
    again = LoRARequest("r8", None, llama_adapters["r8"])
    assert tokens_of(llm.generate([[1, 2]], GREEDY, again)) == before
    other = LoRARequest("r3", 5, llama_adapters["r3"])
    llm.generate([[1]], GREEDY, other)
    llm.unload_lora("r3")
    llm.load_lora("r3", llama_adapters["r12"])


def test_requests_give_their_adapters_back_however_they_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = SamplingParams(max_tokens=1000)
    outputs = llm.generate([[1], [2], [3]], [GREEDY, too_long, GREEDY], ["r3", "r8", "nobody"])
    assert [output.error is None for output in outputs] == [True, False, False]
    assert uses_of(llm) == {}

    def interrupt() -> None:
        assert len(uses_of(llm)) == 2
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._parts.core, "step", interrupt)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], GREEDY, ["r3", "r8"])
    assert uses_of(llm) == {}
    for name in ("r3", "r8"):
        llm.unload_lora(name, timeout_s=0)


def test_unloading_beside_generate_waits_for_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(8, seed=1)  # more than run at once: some wait
    expected = tokens_of(llm.generate(prompts, GREEDY, "r8"))
    paused = PausedEngine(llm, monkeypatch)
    answering = Call(llm.generate, prompts, GREEDY, "r8")
    assert paused.has_stepped.wait(60)
    with pytest.raises(AdapterInUseError) as caught:
        llm.unload_lora("r8", timeout_s=0)
    assert len(caught.value.owners) == len(prompts)
    unloading = Call(llm.unload_lora, "r8")
    paused.go_on.set()
    assert tokens_of(answering.result()) == expected
    unloading.result()
    assert llm.lora_manager.retired() == ()


def test_reloading_beside_generate_changes_none_of_its_answers(
    llm: LLM, llama_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(8, seed=2)
    old = tokens_of(llm.generate(prompts, GREEDY, "r8"))
    new = tokens_of(llm.generate(prompts, GREEDY, "r64"))
    paused = PausedEngine(llm, monkeypatch)
    answering = Call(llm.generate, prompts, GREEDY, "r8")
    assert paused.has_stepped.wait(60)
    llm.lora_manager.reload("r8", llama_adapters["r64"])
    assert len(llm.lora_manager.retired()) == 1
    paused.go_on.set()
    assert tokens_of(answering.result()) == old
    assert llm.lora_manager.retired() == ()
    assert tokens_of(llm.generate(prompts, GREEDY, "r8")) == new


def test_sixteen_threads_that_load_and_unload_change_none_of_the_answers(
    llm: LLM, llama_adapters: dict[str, Path]
) -> None:
    """Each with names of its own, for as long as prompts are answered again and again."""
    prompts = make_prompts(6, seed=3)
    names = ["r3", "r8", None] * 2
    expected = tokens_of(llm.generate(prompts, GREEDY, names))
    is_over = threading.Event()
    paths = [*llama_adapters.values()]

    def come_and_go(number: int) -> int:
        rounds = 0
        while not is_over.is_set() or rounds < 3:
            llm.load_lora(f"guest {number}", paths[(number + rounds) % len(paths)])
            llm.unload_lora(f"guest {number}")
            rounds += 1
        return rounds

    guests = [Call(come_and_go, number) for number in range(16)]
    try:
        for _ in range(5):
            assert tokens_of(llm.generate(prompts, GREEDY, names)) == expected
    finally:
        is_over.set()
        rounds = [guest.result() for guest in guests]
    assert min(rounds) >= 3
    assert not [info.name for info in llm.list_loras() if info.name.startswith("guest")]
    assert llm.lora_manager.retired() == ()
    assert uses_of(llm) == {}


def test_how_strict_it_is_comes_from_the_configuration(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model)
    path = write_random_adapter(tmp_path, config, rank=2, seed=1, a_field_of_tomorrow=1)
    with (
        LLM(model, peft_cache_config=SMALL_CACHE) as llm,
        pytest.raises(UnsupportedAdapterError, match="a_field_of_tomorrow"),
    ):
        llm.load_lora("a", path)
    with LLM(model, lora_config=LoraConfig(strict=False), peft_cache_config=SMALL_CACHE) as llm:
        with pytest.warns(PagedLoraWarning, match="a_field_of_tomorrow"):
            info = llm.load_lora("a", path)
        assert len(info.report.ignored) == 1


def test_adapters_of_a_directory_answer_by_their_path(
    llm: LLM, llama_adapters: dict[str, Path], engines: list[LLM], tmp_path: Path
) -> None:
    """Each is parsed at its first request; what is wrong with one is that request's alone."""
    directory, root = tmp_path / "lora_dir", tmp_path / "root"
    for name in ("r8", "r64"):
        shutil.copytree(llama_adapters[name], directory / "org" / name)
    shutil.copytree(llama_adapters["r3"], root / "r3")
    (directory / "broken").mkdir()
    (directory / "broken" / "adapter_config.json").write_text("{")
    (directory / "out").symlink_to(llama_adapters["r12"])
    config = LoraConfig(lora_dir=directory, adapter_root=root)  # type: ignore[arg-type]
    engine = LLM(build_tiny_model("llama"), lora_config=config, peft_cache_config=SMALL_CACHE)
    engines.append(engine)
    assert engine.list_loras() == []
    assert engine.lora_manager.names == ("broken", "org/r64", "org/r8")

    prompts = make_prompts(7, seed=3)
    out_of_root = LoRARequest("r1", lora_path=llama_adapters["r1"])
    requests = ["org/r8", "broken", LoRARequest("org/r64"), "out", "none", out_of_root]
    outputs = engine.generate(prompts, GREEDY, [*requests, LoRARequest("r3", lora_path="r3")])
    expected = llm.generate(prompts, GREEDY, ["r8", "r8", "r64", "r8", "r8", "r8", "r3"])
    for i in (0, 2, 6):
        assert tokens_of([outputs[i]]) == tokens_of([expected[i]])
    errors = [type(outputs[i].error) for i in (1, 3, 4, 5)]
    assert errors == [AdapterFormatError, AdapterPathError, AdapterNotFoundError, AdapterPathError]
    assert [info.name for info in engine.list_loras()] == ["org/r8", "org/r64", "r3"]
