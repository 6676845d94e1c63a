"""Adapters of an `LLM` come, change and go beside its requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support import llm_fixtures
from tests.support.adapters import write_random_adapter
from tests.support.cache_fixtures import Call
from tests.support.llm_fixtures import GREEDY, make_prompts, tokens_of
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import LoraConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import (
    AdapterInUseError,
    AdapterNotFoundError,
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


def test_how_strict_it_is_comes_from_the_configuration(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model)
    path = write_random_adapter(tmp_path, config, rank=2, seed=1, a_field_of_tomorrow=1)
    with LLM(model) as llm, pytest.raises(UnsupportedAdapterError, match="a_field_of_tomorrow"):
        llm.load_lora("a", path)
    with LLM(model, lora_config=LoraConfig(strict=False)) as llm:
        with pytest.warns(PagedLoraWarning, match="a_field_of_tomorrow"):
            info = llm.load_lora("a", path)
        assert len(info.report.ignored) == 1
