"""What the engine learns from a model: dtype, end of sequence, length, tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model
from torch import nn

from pagedlora.engine.loading import load_model, parse_dtype
from pagedlora.engine.pretrained import skeleton
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError


def test_a_live_module_is_taken_as_it_is() -> None:
    model = build_tiny_model("llama", dtype=torch.bfloat16)
    loaded = load_model(model)
    assert loaded.model is model
    assert loaded.tokenizer is None
    assert loaded.dtype == torch.bfloat16
    assert loaded.eos_token_ids == frozenset()
    assert loaded.max_model_tokens == 512
    assert loaded.vocab_size == VOCAB_SIZE


def test_a_live_module_is_not_converted() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model.to\(torch.bfloat16\)"):
        load_model(build_tiny_model("llama"), dtype="bfloat16")
    assert load_model(build_tiny_model("llama"), dtype=torch.float32).dtype == torch.float32


def test_a_directory_without_a_tokenizer_loads(tmp_path: Path) -> None:
    build_tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(str(tmp_path)).tokenizer is None
    assert load_model(tmp_path, dtype="float32").dtype == torch.float32


def test_a_tokenizer_beside_the_model_is_found(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    build_tiny_model("llama").save_pretrained(tmp_path)
    tokenizer = load_model(tmp_path).tokenizer
    assert tokenizer is not None
    assert tokenizer("b a")["input_ids"] == [1, 0]
    beside = load_model(build_tiny_model("llama"), tmp_path).tokenizer
    assert beside is not None
    assert beside("b")["input_ids"] == [1]


@pytest.mark.parametrize(
    ("of_generation", "of_model", "of_tokenizer", "expected"),
    [
        (5, 6, 7, {5}),
        ([5, 8], 6, 7, {5, 8}),
        (None, 6, 7, {6}),
        (None, None, 7, {7}),
        (0, 6, None, {0}),
        (None, None, None, set()),
    ],
)
def test_end_of_sequence_comes_from_the_nearest_that_says(
    of_generation: object, of_model: object, of_tokenizer: object, expected: set[int]
) -> None:
    model = build_tiny_model("llama")
    model.generation_config.eos_token_id = of_generation
    model.config.eos_token_id = of_model
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = of_tokenizer
    assert load_model(model, tokenizer).eos_token_ids == expected


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", Path("no-such-model")])
def test_a_missing_directory_is_named(path: str | Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no.such.model does not exist"):
        load_model(path)


@pytest.mark.parametrize("device", ["tpu", "mps", "gpu"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match=device):
        load_model(build_tiny_model("llama"), device=device)


@pytest.mark.parametrize("dtype", ["int8", "float64", torch.float64, "fp16"])
def test_other_dtypes_are_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(InvalidArgumentError, match="'float32', 'bfloat16', 'float16'"):
        load_model(build_tiny_model("llama"), dtype=dtype)


def test_dtypes_by_name() -> None:
    assert parse_dtype("bfloat16") == parse_dtype("torch.bfloat16") == torch.bfloat16
    assert parse_dtype(torch.float16) == torch.float16


def test_a_module_of_another_library_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        load_model(nn.Linear(2, 2))


def test_weights_of_another_dtype_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="float64"):
        load_model(build_tiny_model("llama", dtype=torch.float64))


def test_a_skeleton_has_modules_but_no_weights(tmp_path: Path) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path)
    module = skeleton(tmp_path)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert module.get_submodule("model.layers.1.self_attn.q_proj").in_features == 32
