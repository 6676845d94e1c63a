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
