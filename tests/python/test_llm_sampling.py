"""What ends an answer and what is reported of it: stop strings, min_tokens, log probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.llm_fixtures import SMALL_CACHE
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import KvCacheConfig, PeftCacheConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import InvalidArgumentError
from pagedlora.requests import CompletionOutput
from pagedlora.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A small engine with a tokenizer of bytes."""
    with LLM(
        build_tiny_model("llama"),
        ByteTokenizer(),
        peft_cache_config=PeftCacheConfig(device_cache_size="1MB", host_cache_size="1MB"),
        kv_cache_config=KvCacheConfig(num_blocks=64, block_size=4),
    ) as engine:
        yield engine


def ask(llm: LLM, **params: object) -> CompletionOutput:
    """The greedy answer to a fixed prompt."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, **params)  # type: ignore[arg-type]
    (output,) = llm.generate([[1, 2, 3]], sampling)
    assert output.error is None
    return output.outputs[0]


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    whole = ask(llm, max_tokens=12)
    stop = whole.text[3:5]
    cut = ask(llm, max_tokens=12, stop=stop)
    end = whole.text.find(stop)
    assert cut.text == whole.text[:end]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: end + 2], "the tokens of the stop string are there"
    assert ask(llm, max_tokens=12, stop=["\x7f\x7f\x7f", stop]).text == cut.text


def test_a_stop_token_before_min_tokens_is_not_chosen(llm: LLM) -> None:
    whole = ask(llm, max_tokens=8)
    first = whole.token_ids[0]
    assert ask(llm, max_tokens=8, stop_token_ids=[first]).token_ids == [first]
    later = ask(llm, max_tokens=8, stop_token_ids=[first], min_tokens=4)
    assert first not in later.token_ids[:4]
    assert len(later.token_ids) >= 4


def test_a_stop_string_before_min_tokens_does_not_count(llm: LLM) -> None:
    whole = ask(llm, max_tokens=8)
    cut = ask(llm, max_tokens=8, stop=whole.text[0], min_tokens=5)
    assert len(cut.token_ids) >= 5
    assert cut.text.startswith(whole.text[:4])


def test_log_probabilities_are_those_of_the_model(llm: LLM) -> None:
    answer = ask(llm, max_tokens=4, logprobs=3)
    assert answer.logprobs is not None
    model = build_tiny_model("llama")
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, *answer.token_ids]])).logits[0]
    for index, reported in enumerate(answer.logprobs):
        right = torch.log_softmax(logits[2 + index].float(), dim=-1)
        assert list(reported) == right.topk(3).indices.tolist()
        assert next(iter(reported)) == answer.token_ids[index]
        for token, value in reported.items():
            assert value == pytest.approx(float(right[token]), abs=1e-4)


def test_the_chosen_token_is_reported_whatever_its_probability(llm: LLM) -> None:
    params = SamplingParams(temperature=5.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
    (output,) = llm.generate([[1, 2, 3]], params)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert [list(reported) for reported in answer.logprobs] == [[t] for t in answer.token_ids]
    assert ask(llm, max_tokens=2).logprobs is None


def test_stop_strings_need_a_tokenizer() -> None:
    with LLM(
        build_tiny_model("llama"),
        kv_cache_config=KvCacheConfig(num_blocks=8),
        peft_cache_config=SMALL_CACHE,
    ) as llm:
        (output,) = llm.generate([[1]], SamplingParams(stop="x"))
    assert isinstance(output.error, InvalidArgumentError)
    assert "tokenizer" in str(output.error)
