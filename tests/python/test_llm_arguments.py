"""Wrong arguments of `LLM`: a typed error that names the value, and the engine goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests.support import llm_fixtures
from tests.support.llm_fixtures import GREEDY, tokens_of
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model
from tests.support.wrong_arguments import check_refusal, error_of

from pagedlora import (
    LLM,
    InvalidArgumentError,
    KvCacheConfig,
    LoRARequest,
    ModelLoadError,
    PagedLoraError,
    RequestTimeoutError,
    SamplingParams,
    UnsupportedModelError,
)

pytestmark = pytest.mark.filterwarnings(
    # transformers warns when PEFT 0.21 asks a model whether it checkpoints gradients.
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)
llama_adapters = llm_fixtures.llama_adapters
engines = llm_fixtures.engines
llm = llm_fixtures.llm

CONFIGS = ("lora_config", "peft_cache_config", "kv_cache_config", "scheduler_config")
WRONG: dict[str, Any] = {
    "int": 3,
    "float": 1.5,
    "none": None,
    "bytes": b"x",
    "empty": "",
    "surrogate": "x\ud800",
    "line end": "a\nb",
    "long": "x" * 10_000,
    "dict": {"a": 1},
    "list of none": [None],
    "object": object(),
    "array": np.array([1.5]),
    "tensor": torch.tensor([[1.5]]),
    "endless": 10**5000,
    "class": dict,
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_tiny_model("llama")


# ---- construction ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", [3, [], False, "x", KvCacheConfig, LoRARequest("a")])
def test_what_is_no_configuration_is_refused(
    model: torch.nn.Module, name: str, value: object
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is .* it must be a .*Config"):
        LLM(model, **{name: value})


def test_fields_of_a_configuration_do_for_it(
    model: torch.nn.Module, llama_adapters: dict[str, Path], engines: list[LLM]
) -> None:
    with pytest.raises(ValidationError, match="host_cash_size"):
        LLM(model, peft_cache_config={"host_cash_size": 1})
    fields: dict[str, Any] = {
        "lora_config": {"max_lora_rank": 16},
        "peft_cache_config": {"host_cache_size": "4MiB", "device_cache_size": "1MiB"},
        "kv_cache_config": {"num_blocks": 20},
        "scheduler_config": {"max_batch_size": 2},
    }
    engine = LLM(model, **fields)
    engines.append(engine)
    assert engine.peft_cache_manager.model_config.max_lora_rank == 16
    engine.load_lora("r3", llama_adapters["r3"])
    (output,) = engine.generate([1, 2], GREEDY, "r3")
    assert output.error is None


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", ["model", "tokenizer", "device", "dtype", "enable_stats"])
def test_constructor_arguments_of_wrong_types(
    model: torch.nn.Module, name: str, value: object
) -> None:
    if name == "tokenizer" and (value is None or value is dict):
        return  # no tokenizer; a class can be called
    with pytest.raises(PagedLoraError) as refused:
        LLM(**{"model": model, name: value})
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


def _write(directory: Path, config: str) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    return directory


BROKEN: dict[str, tuple[type[PagedLoraError], Callable[[Path, Path], object]]] = {
    "unknown hub id": (ModelLoadError, lambda good, new: "nobody/nothing-here"),
    "no hub id": (ModelLoadError, lambda good, new: "a/b/c"),
    "no directory": (ModelLoadError, lambda good, new: new),
    "a file": (ModelLoadError, lambda good, new: good / "config.json"),
    "no json": (ModelLoadError, lambda good, new: _write(new, "{")),
    "no weights": (ModelLoadError, lambda good, new: _write(new, '{"model_type": "llama"}')),
    "an empty directory": (ModelLoadError, lambda good, new: new.mkdir() or new),
    "no configuration": (UnsupportedModelError, lambda good, new: _write(new, "{}")),
    "unknown type": (UnsupportedModelError, lambda good, new: _write(new, '{"model_type": "x"}')),
    "cut weights": (ModelLoadError, lambda good, new: _changed(good, new, cut=True)),
    "a weight less": (ModelLoadError, lambda good, new: _changed(good, new, without="up_proj")),
    "other sizes": (ModelLoadError, lambda good, new: _changed(good, new, hidden_size=64)),
    "text as size": (ModelLoadError, lambda good, new: _changed(good, new, hidden_size="x")),
    "broken tokenizer": (ModelLoadError, lambda good, new: _changed(good, new, tokenizer="{")),
}


def _changed(
    good: Path,
    new: Path,
    *,
    cut: bool = False,
    without: str = "",
    tokenizer: str = "",
    **fields: Any,
) -> Path:
    config = json.loads((good / "config.json").read_text())
    weights = load_file(good / "model.safetensors")
    _write(new, json.dumps(config | fields))
    if without:
        weights = {name: w for name, w in weights.items() if without not in name}
    save_file(weights, new / "model.safetensors", {"format": "pt"})
    if cut:
        content = (new / "model.safetensors").read_bytes()
        (new / "model.safetensors").write_bytes(content[:1000])
    if tokenizer:
        (new / "tokenizer.json").write_text(tokenizer)
    return new


@pytest.fixture(scope="module")
def saved(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)  # type: ignore[operator]
    return path


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_cannot_be_loaded_is_named(saved: Path, tmp_path: Path, case: str) -> None:
    error, make = BROKEN[case]
    source = make(saved, tmp_path / "new")
    with pytest.raises(error) as refused:
        LLM(source)  # type: ignore[arg-type]
    assert str(source) in str(refused.value)
    assert str(refused.value).isprintable()
    if isinstance(refused.value, ModelLoadError):
        assert isinstance(refused.value, OSError | ValueError)
        assert refused.value.source == str(source)
        assert "give a director" in str(refused.value)


def test_weights_that_are_missing_are_named(saved: Path, tmp_path: Path) -> None:
    """transformers draws them at random: the answers would be nobody's."""
    with pytest.raises(ModelLoadError, match=r"lack 2 weights: 'model\.layers\.0\.mlp\.up_proj"):
        LLM(_changed(saved, tmp_path / "new", without="up_proj"))


@pytest.mark.parametrize("source", ["/no/such", "nobody/none", "", 3, object()])
def test_a_tokenizer_that_is_none_is_refused(model: torch.nn.Module, source: object) -> None:
    with pytest.raises(InvalidArgumentError, match="tokenizer"):
        LLM(model, tokenizer=source)


# ---- calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_wrong_arguments_of_calls_change_nothing(llm: LLM, value: Any) -> None:
    names = [info.name for info in llm.list_loras()]
    good = tokens_of(llm.generate([[1, 2, 3]], GREEDY, "r3"))

    def answer(*args: Any) -> None:
        for output in llm.generate(*args):
            if output.error is not None:
                raise output.error

    calls: dict[str, Callable[[], object]] = {
        "prompts": lambda: answer(value, GREEDY),
        "a prompt": lambda: answer([[1], value], GREEDY),
        "a token": lambda: answer([[1, value]], GREEDY),
        "sampling_params": lambda: answer([1], value),
        "of one prompt": lambda: answer([[1]], [value]),
        "lora_request": lambda: answer([1], GREEDY, value),
        "lora of one": lambda: answer([[1]], GREEDY, [value]),
        "stream": lambda: llm.generate_async(value, GREEDY).result(60),
        "stream's params": lambda: llm.generate_async([1], value).result(60),
        "abort": lambda: llm.abort(value),
        "load_lora": lambda: llm.load_lora(value, "/no/such"),
        "load_lora path": lambda: llm.load_lora("new", value),
        "unload_lora": lambda: llm.unload_lora(value),
        "unload timeout": lambda: llm.unload_lora("nobody", timeout_s=value),
        "LoRARequest path": lambda: answer([1], GREEDY, LoRARequest("new", None, value)),
    }
    for name, call in calls.items():
        check_refusal(name, call)
    assert [info.name for info in llm.list_loras()] == names
    llm.peft_cache_manager.check_invariants()
    assert tokens_of(llm.generate([[1, 2, 3]], GREEDY, "r3")) == good


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate(3), "prompts is 3, a int"),
        (lambda llm: llm.generate([None]), "prompt 0 is None"),
        (lambda llm: llm.generate([[1, 1.5]]), r"prompt 0 .*\[1, 1.5\]"),
        (lambda llm: llm.generate([[1], [2]], GREEDY, ["r3"]), "2 prompts but 1 element in lora"),
        (lambda llm: llm.generate([[1]], [GREEDY] * 2), "1 prompt but 2 elements in sampling"),
        (lambda llm: llm.abort("x"), "request_id is 'x': it must be an integer"),
        (lambda llm: llm.load_lora("q", ""), "the path of adapter 'q' is empty"),
        (lambda llm: llm.load_lora("", "/x"), "1 to 256 bytes, not ''"),
        (
            lambda llm: llm.unload_lora("nobody"),
            r"no adapter 'nobody' is registered; \d+ others are",
        ),
    ],
)
def test_the_message_says_what_is_wrong(
    llm: LLM, call: Callable[[LLM], object], words: str
) -> None:
    with pytest.raises(PagedLoraError, match=words):
        call(llm)


@pytest.mark.parametrize(
    "token", [-1, VOCAB_SIZE, 2**70, -(10**5000)], ids=["-1", "next", "2^70", "endless"]
)
def test_tokens_beyond_the_vocabulary_fail_their_request(llm: LLM, token: int) -> None:
    bad, good = llm.generate([[1, token], [1]], GREEDY)
    assert isinstance(bad.error, InvalidArgumentError)
    assert f"the model knows 0 to {VOCAB_SIZE - 1}" in str(bad.error)
    assert good.error is None


@pytest.mark.parametrize(
    "limit_s",
    [-1, float("nan"), "x", None, [], 10**5000],
    ids=["-1", "nan", "text", "none", "list", "endless"],
)
def test_the_time_to_wait_is_checked_also_where_nothing_is_waited_for(
    llm: LLM, limit_s: Any
) -> None:
    stream = llm.generate_async([1], GREEDY)
    whole = stream.result(60)
    if limit_s is None or limit_s == 10**5000:
        assert stream.result(limit_s) == whole
    else:
        with pytest.raises(InvalidArgumentError, match="timeout_s"):
            stream.result(limit_s)


def test_a_request_that_has_not_ended_in_time_goes_on(llm: LLM) -> None:
    stream = llm.generate_async([1], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    error = error_of(lambda: stream.result(0))
    if error is not None:
        assert isinstance(error, TimeoutError)
        assert isinstance(error, RequestTimeoutError)
        assert (error.request_id, error.limit_seconds) == (stream.request_id, 0)
    assert len(stream.result(60).outputs[0].token_ids) == 60


@pytest.mark.parametrize("params", [{"temperature": 1e-320}, {"top_p": 1e-320}, {"top_k": 2**70}])
def test_values_at_the_edge_answer(llm: LLM, params: dict[str, Any]) -> None:
    (output,) = llm.generate([1, 2], SamplingParams(max_tokens=3, seed=1, **params))
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 3
