"""Prompts are checked and cut to the model's length; outputs carry texts without the stop token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pagedlora.engine.loading import LoadedModel
from pagedlora.engine.request_processor import RequestProcessor
from pagedlora.errors import AdapterNotFoundError, CapacityError, InvalidArgumentError
from pagedlora.requests import LlmRequest, LoRARequest
from pagedlora.sampling_params import SamplingParams


class Letters:
    """A tokenizer of lower-case letters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("a") + token) for token in token_ids)


class OneAdapter:
    """Knows the adapter 'sql'."""

    def resolve(self, lora: LoRARequest | str | None) -> int | None:
        if lora not in (None, "sql"):
            raise AdapterNotFoundError(f"no adapter {lora!r}", name=str(lora))
        return None if lora is None else 77


def make_processor(tokenizer: Any = None, max_model_tokens: int | None = None) -> RequestProcessor:
    loaded = LoadedModel(
        model=nn.Identity(),
        device=torch.device("cpu"),
        tokenizer=tokenizer,
        dtype=torch.float32,
        eos_token_ids=frozenset(),
        max_model_tokens=max_model_tokens,
        vocab_size=26,
    )
    return RequestProcessor(loaded, OneAdapter())  # type: ignore[arg-type]


def test_texts_become_tokens_and_tokens_stay() -> None:
    processor = make_processor(Letters())
    assert processor.token_ids("cab") == [2, 0, 1]
    assert processor.token_ids([2, 0]) == [2, 0]


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidArgumentError, match="no tokenizer"):
        make_processor().token_ids("cab")


def test_a_request_has_everything_the_engine_needs() -> None:
    params = SamplingParams(max_tokens=5, temperature=0.5)
    request = make_processor().make_request(9, [1, 2], params, "sql")
    assert (request.request_id, request.lora_task_id, request.max_tokens) == (9, 77, 5)
    assert list(request.prompt_token_ids) == [1, 2]
    assert request.sampling_params.seed is not None


@pytest.mark.parametrize(
    ("tokens", "words"),
    [([], "empty"), ([3, 26], "token id 26: the model knows 0 to 25"), ([-1, 3], "token id -1")],
)
def test_prompts_that_the_model_cannot_read_are_refused(tokens: list[int], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        make_processor().make_request(0, tokens, SamplingParams(), None)


def test_answers_are_cut_to_the_models_length() -> None:
    processor = make_processor(max_model_tokens=10)
    params = SamplingParams(max_tokens=100)
    assert processor.make_request(0, [1] * 7, params, None).max_tokens == 3
    with pytest.raises(CapacityError, match="10 tokens, and the model's full length is 10"):
        processor.make_request(0, [1] * 10, params, None)


def test_an_unknown_adapter_is_an_error() -> None:
    with pytest.raises(AdapterNotFoundError, match="nobody"):
        make_processor().make_request(0, [1], SamplingParams(), "nobody")


@pytest.mark.parametrize(("reason", "text"), [("length", "abc"), ("stop", "ab")])
def test_the_text_leaves_out_the_token_that_stopped_it(reason: Any, text: str) -> None:
    request = LlmRequest(4, prompt_token_ids=[9], output_token_ids=[0, 1, 2], finish_reason=reason)
    output = make_processor(Letters()).make_output(request)
    assert output.outputs[0].token_ids == [0, 1, 2]
    assert output.outputs[0].text == text
    assert output.outputs[0].finish_reason == reason
    assert (output.request_id, output.prompt_token_ids, output.error) == (4, [9], None)


def test_a_failed_request_has_its_error_and_no_outputs() -> None:
    error = CapacityError("no")
    output = make_processor().make_output(LlmRequest(4, output_token_ids=[1], error=error))
    assert output.outputs == []
    assert output.error is error
    assert output.finished
