"""What goes wrong in one request stays with it; misuse raises before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support import llm_fixtures
from tests.support.llm_fixtures import (
    ADAPTERS,
    GREEDY,
    adapter_bytes,
    make_prompts,
    save_adapter,
    tokens_of,
)
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model
from torch import nn

from pagedlora.config import PeftCacheConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    CapacityError,
    InvalidArgumentError,
    PagedLoraError,
)
from pagedlora.requests import LoRARequest
from pagedlora.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings(
    # transformers warns when PEFT 0.21 asks a model whether it checkpoints gradients.
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)
llama_adapters = llm_fixtures.llama_adapters
engines = llm_fixtures.engines
llm = llm_fixtures.llm


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (([1], GREEDY, "nobody"), AdapterNotFoundError, "nobody"),
        (([1], GREEDY, LoRARequest("new", 7, "/no/such")), AdapterNotFoundError, "/no/such"),
        (([], GREEDY, None), InvalidArgumentError, "empty"),
        (([VOCAB_SIZE], GREEDY, "r8"), InvalidArgumentError, f"token id {VOCAB_SIZE}"),
        (([-1], GREEDY, None), InvalidArgumentError, "token id -1"),
        (("text", GREEDY, None), InvalidArgumentError, "no tokenizer"),
        (([1] * 100, SamplingParams(max_tokens=100), "r8"), CapacityError, "200 tokens need 50"),
    ],
)
def test_a_bad_request_has_its_error_and_the_others_answer(
    llm: LLM, bad: tuple[Any, SamplingParams, Any], error: type[Exception], words: str
) -> None:
    prompt, params, lora = bad
    good = tokens_of(llm.generate([[1, 2, 3], [4, 5]], GREEDY, ["r3", None]))
    outputs = llm.generate(
        [[1, 2, 3], prompt, [4, 5]], [GREEDY, params, GREEDY], ["r3", lora, None]
    )
    assert tokens_of([outputs[0], outputs[2]]) == good
    assert outputs[1].outputs == []
    assert outputs[1].finished
    with pytest.raises(error, match=words):
        raise outputs[1].error


def _copy_adapter(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_file_truncated_after_registration_fails_its_requests_alone(
    llm: LLM, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    broken = _copy_adapter(llama_adapters["r12"], tmp_path / "broken")
    llm.load_lora("broken", broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    outputs = llm.generate([[1, 2], [1, 2], [3]], GREEDY, ["broken", "r12", "broken"])
    assert isinstance(outputs[0].error, PagedLoraError)
    assert isinstance(outputs[2].error, PagedLoraError)
    assert len(outputs[1].outputs[0].token_ids) == 8


def test_adapters_that_do_not_fit_are_refused_with_the_numbers(
    llm: LLM, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(PagedLoraError, match=r"128.*max_lora_rank 64"):
        llm.load_lora("high", save_adapter(tmp_path / "high", "llama", 128, ["q_proj"]))
    truncated = _copy_adapter(llama_adapters["r12"], tmp_path / "cut")
    weights = truncated / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(AdapterFormatError):
        llm.load_lora("cut", truncated)
    with pytest.raises(AdapterNotFoundError):
        llm.load_lora("missing", tmp_path / "missing")
    (tmp_path / "no-file").mkdir()
    with pytest.raises(PagedLoraError):
        llm.load_lora("no-file", tmp_path / "no-file")
    assert {info.name for info in llm.list_loras()} == set(ADAPTERS)


def test_an_adapter_larger_than_the_device_tier_fails_alone(
    llama_adapters: dict[str, Path], engines: list[LLM]
) -> None:
    room = adapter_bytes(llama_adapters["r64"]) // 2
    llm = LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size=room, host_cache_size="16MB"),
    )
    engines.append(llm)
    loras = [LoRARequest(name, None, llama_adapters[name]) for name in ("r64", "r3")]
    too_large, good = llm.generate([[1], [1]], GREEDY, loras)
    assert too_large.error is not None
    assert too_large.error.code == "adapter_too_large"
    assert len(good.outputs[0].token_ids) == 8


def test_numbers_and_names_must_agree(llm: LLM, llama_adapters: dict[str, Path]) -> None:
    first, second = llm.generate(
        [[1], [1]],
        GREEDY,
        [
            LoRARequest("r8", 1, llama_adapters["r8"]),
            LoRARequest("r3", 1, llama_adapters["r3"]),
        ],
    )
    assert first.error is None
    assert isinstance(second.error, InvalidArgumentError)
    (other_path,) = llm.generate([1], GREEDY, LoRARequest("r8", 2, llama_adapters["r3"]))
    assert isinstance(other_path.error, InvalidArgumentError)


@pytest.mark.parametrize(
    ("prompts", "params", "loras"),
    [
        ([[1], [2]], [GREEDY], None),
        ([[1], [2]], [], None),
        ([[1], [2]], GREEDY, ["r8"]),
        ([[1]], GREEDY, [5]),
        (None, GREEDY, None),
    ],
)
def test_arguments_that_do_not_fit_raise_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, loras: Any
) -> None:
    with pytest.raises(InvalidArgumentError):
        llm.generate(prompts, params, loras)


@pytest.mark.parametrize("exception", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_forward_that_raises_leaves_nothing_behind(llm: LLM, exception: BaseException) -> None:
    good = tokens_of(llm.generate([[1, 2, 3], [4]], GREEDY, ["r8", "r3"]))
    calls = 0

    def explode(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise exception

    handle = llm._parts.loaded.model.register_forward_pre_hook(explode)
    with pytest.raises(type(exception)):
        llm.generate(make_prompts(6, seed=1), GREEDY, ["r8", "r3", None] * 2)
    handle.remove()
    assert not llm.peft_cache_manager.active_tasks
    assert tokens_of(llm.generate([[1, 2, 3], [4]], GREEDY, ["r8", "r3"])) == good


def test_a_nan_adapter_harms_only_itself(llm: LLM, tmp_path: Path) -> None:
    bad = save_adapter(tmp_path / "nan", "llama", 4, ["down_proj"])
    file = bad / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)
    good = tokens_of(llm.generate([[1, 2], [3]], GREEDY, ["r8", None]))
    outputs = llm.generate(
        [[1, 2], [1, 2], [3]], GREEDY, ["r8", LoRARequest("nan", None, bad), None]
    )
    assert tokens_of([outputs[0], outputs[2]]) == good
    assert isinstance(outputs[1].error, AdapterFormatError)
    assert "NaN or infinite" in str(outputs[1].error)


@pytest.mark.parametrize("path", [7, None, b"adapters/a"], ids=repr)
def test_what_is_no_path_is_refused(llm: LLM, path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="path of adapter 'new'"):
        llm.load_lora("new", path)


def test_a_path_that_no_file_can_have_fails_its_request_alone(llm: LLM) -> None:
    good = tokens_of(llm.generate([[1, 2], [3]], GREEDY, ["r8", None]))
    bad = [LoRARequest(name, None, "/no\0path") for name in ("r8", "new")]
    outputs = llm.generate([[1, 2], [1], [1], [3]], GREEDY, ["r8", *bad, None])
    assert tokens_of([outputs[0], outputs[3]]) == good
    assert isinstance(outputs[1].error, InvalidArgumentError)
    assert isinstance(outputs[2].error, AdapterNotFoundError)
