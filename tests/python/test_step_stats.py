"""Statistics per step: what is counted, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.llm_fixtures import GREEDY, SMALL_CACHE, save_adapter
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import KvCacheConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.engine.llm import LLM
from pagedlora.engine.step_stats import StepStats
from pagedlora.errors import InvalidArgumentError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest, RequestState
from pagedlora.scheduler.step import SchedulerOutput

STATISTICS = Path(__file__).parents[2] / "docs" / "statistics.md"


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    """A small engine with an adapter."""
    with LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size="1MB", host_cache_size="1MB"),
        kv_cache_config=KvCacheConfig(num_blocks=32, block_size=4, host_blocks=4),
        scheduler_config=SchedulerConfig(max_num_tokens=8),
        enable_stats=True,
    ) as engine:
        engine.load_lora("a", save_adapter(tmp_path / "a", "llama", 4, ["q_proj", "v_proj"]))
        yield engine


def test_steps_add_up_to_what_was_asked(llm: LLM) -> None:
    llm.generate([list(range(1, 13)), [5, 6]], GREEDY, ["a", None])
    steps = llm.get_stats()
    assert [step["iter"] for step in steps] == list(range(len(steps)))
    assert sum(step["numContextTokens"] for step in steps) == 14
    assert sum(step["numCompletedRequests"] for step in steps) == 2
    assert sum(step["numGenRequests"] for step in steps) == 2 * 7, "the first token is prefill's"
    assert all(step["numActiveRequests"] >= step["numQueuedRequests"] for step in steps)
    assert steps[-1]["numActiveRequests"] == 0
    kv = steps[-1]["kvCacheStats"]
    assert (kv["maxNumBlocks"], kv["freeNumBlocks"], kv["usedNumBlocks"]) == (32, 32, 0)
    assert (kv["tokensPerBlock"], kv["maxNumHostBlocks"], kv["freeNumHostBlocks"]) == (4, 4, 4)
    peft = [step["peftCacheIterationStats"] for step in steps]
    assert sum(each["requestsTerminated"] for each in peft) == 1
    assert sum(each["tasksReleasedHost"] for each in peft) == 1
    assert llm.get_stats() == [], "each step is told once"


def test_a_step_that_raised_has_its_requests_as_failed(llm: LLM) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    assert llm._parts is not None
    handle = llm._parts.loaded.model.register_forward_pre_hook(explode)
    with pytest.raises(RuntimeError, match="boom"):
        llm.generate([[1], [2]], GREEDY)
    handle.remove()
    (step,) = llm.get_stats()
    assert (step["numFailedRequests"], step["numCompletedRequests"]) == (2, 0)
    assert step["numActiveRequests"] == 0


def test_states_are_counted() -> None:
    stats = StepStats(KVCacheManager(4, 4), None)
    live = [LlmRequest(1), LlmRequest(2, state=RequestState.SUSPENDED), LlmRequest(3)]
    ended = [LlmRequest(4, state=RequestState.FAILED), LlmRequest(5, state=RequestState.FINISHED)]
    stats.record(SchedulerOutput(suspended=[live[1]]), live, ended)
    (step,) = stats.take()
    assert (step["numActiveRequests"], step["numQueuedRequests"]) == (3, 2)
    assert (step["numSuspendedRequests"], step["numNewlySuspendedRequests"]) == (1, 1)
    assert (step["numFailedRequests"], step["numCompletedRequests"]) == (1, 1)


def test_without_adapter_caches_their_statistics_are_absent_not_zero() -> None:
    stats = StepStats(KVCacheManager(4, 4), None)
    stats.record(SchedulerOutput(), [], [])
    assert "peftCacheIterationStats" not in stats.take()[0]


def test_only_the_last_thousand_steps_are_kept() -> None:
    stats = StepStats(KVCacheManager(4, 4), None)
    for _ in range(1005):
        stats.record(SchedulerOutput(), [], [])
    assert [step["iter"] for step in stats.take()] == list(range(5, 1005))


def test_statistics_must_be_asked_for() -> None:
    with (
        LLM(
            build_tiny_model("llama"),
            kv_cache_config=KvCacheConfig(num_blocks=8),
            peft_cache_config=SMALL_CACHE,
        ) as llm,
        pytest.raises(InvalidArgumentError, match="enable_stats=True"),
    ):
        llm.get_stats()


def test_every_field_is_documented(llm: LLM) -> None:
    llm.generate([[1]], GREEDY, "a")
    (*_, step) = llm.get_stats()
    text = STATISTICS.read_text()
    names = {*step, *step["kvCacheStats"], *step["peftCacheIterationStats"]}
    assert [name for name in names if f"`{name}`" not in text] == []
