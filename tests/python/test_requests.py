"""Requests: legal transitions, checked names, results."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from pagedlora.engine import live_requests
from pagedlora.errors import InvalidArgumentError
from pagedlora.requests import (
    TRANSITIONS,
    LlmRequest,
    LoRARequest,
    RequestOutput,
    RequestState,
)


@pytest.mark.parametrize(("start", "end"), list(itertools.product(RequestState, repeat=2)))
def test_every_pair_of_states_is_allowed_or_refused_by_the_table(
    start: RequestState, end: RequestState
) -> None:
    request = LlmRequest(7, state=start)
    if end in TRANSITIONS[start]:
        request.advance_to(end)
        assert request.state is end
    else:
        with pytest.raises(RuntimeError, match=f"request 7 .*{start.value} to {end.value}"):
            request.advance_to(end)
        assert request.state is start


def test_the_engine_documents_exactly_these_transitions() -> None:
    live = [state.value for state in RequestState if TRANSITIONS[state]]
    documented = set()
    for starts, ends in re.findall(
        r"^\| ([\w, ]+?) +\| ([\w, ]+?) +\|", live_requests.__doc__ or "", re.MULTILINE
    ):
        for start in live if starts == "any of these" else starts.split(", "):
            documented |= {(start, end) for end in ends.split(", ") if start != "from"}
    assert documented == {
        (start.value, end.value) for start, ends in TRANSITIONS.items() for end in ends
    }


def test_requests_are_compared_by_identity() -> None:
    assert LlmRequest(1) != LlmRequest(1)
    assert len({LlmRequest(1), LlmRequest(1)}) == 2


def test_token_counts() -> None:
    request = LlmRequest(1, prompt_token_ids=[5, 6, 7], max_tokens=4)
    assert request.num_prompt_tokens == 3
    assert request.max_total_tokens == 7


def test_a_restarted_request_computes_all_it_has_again() -> None:
    request = LlmRequest(1, prompt_token_ids=[5, 6, 7], state=RequestState.DECODING)
    request.output_token_ids += [8, 9]
    request.num_computed_tokens = 4
    request.restart()
    assert (request.state, request.num_computed_tokens) == (RequestState.WAITING, 0)
    assert (request.num_context_tokens, request.num_prompt_tokens) == (5, 3)
    assert request.context_token_ids(0, 5) == [5, 6, 7, 8, 9]
    assert request.context_token_ids(1, 4) == [6, 7, 8]
    assert request.context_token_ids(4, 5) == [9]


def test_a_request_that_was_restarted_has_started() -> None:
    request = LlmRequest(1, prompt_token_ids=[5, 6, 7])
    assert not request.has_started
    request.advance_to(RequestState.PREFILLING)
    request.num_computed_tokens = 2
    request.restart()
    assert request.has_started
    with pytest.raises(RuntimeError):
        request.restart()
    assert request.num_restarts == 1


def test_a_plain_request_has_the_three_attributes_that_caches_read() -> None:
    request = LlmRequest(3, 9, "weights")
    assert (request.request_id, request.lora_task_id, request.lora_weights) == (3, 9, "weights")
    assert LlmRequest(3).lora_task_id is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": 5}, "lora_name"),
        ({"lora_name": "a", "lora_int_id": -1}, "lora_int_id"),
        ({"lora_name": "a", "lora_int_id": "1"}, "lora_int_id"),
        ({"lora_name": "a", "lora_int_id": True}, "lora_int_id"),
    ],
)
def test_a_bad_lora_request_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LoRARequest(**arguments)


def test_a_lora_request_by_position_as_in_vllm() -> None:
    request = LoRARequest("sql", 1, "/adapters/sql")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == (
        "sql",
        1,
        "/adapters/sql",
    )


def test_a_result_is_finished_without_an_error_unless_said() -> None:
    output = RequestOutput(1, [1, 2], [])
    assert output.finished
    assert output.error is None
