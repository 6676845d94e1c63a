"""Answers token by token: order, threads, coroutines, aborts, failures."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.cache_fixtures import wait_until
from tests.support.llm_fixtures import GREEDY, make_prompts, save_adapter, tokens_of
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import KvCacheConfig, PeftCacheConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import AdapterNotFoundError, CapacityError, InvalidArgumentError
from pagedlora.requests import RequestOutput
from pagedlora.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    """A small engine with an adapter "a" and a tokenizer of bytes."""
    with LLM(
        build_tiny_model("llama"),
        ByteTokenizer(),
        peft_cache_config=PeftCacheConfig(device_cache_size="1MB", host_cache_size="1MB"),
        kv_cache_config=KvCacheConfig(num_blocks=64, block_size=4),
        enable_stats=True,
    ) as engine:
        engine.load_lora("a", save_adapter(tmp_path / "a", "llama", 4, ["q_proj", "v_proj"]))
        yield engine


def whole_of(items: list[RequestOutput]) -> tuple[list[int], str]:
    """Tokens and text of a stream's items."""
    tokens = [token for item in items for output in item.outputs for token in output.token_ids]
    return tokens, "".join(output.text for item in items for output in item.outputs)


@pytest.mark.parametrize("lora", [None, "a"])
def test_one_item_per_token_and_together_they_are_the_answer(llm: LLM, lora: str | None) -> None:
    (right,) = llm.generate([[1, 2, 3]], GREEDY, lora)
    items = list(llm.generate_async([1, 2, 3], GREEDY, lora))
    assert [len(item.outputs[0].token_ids) for item in items] == [1] * 8
    assert [item.finished for item in items] == [False] * 7 + [True]
    assert [item.outputs[0].finish_reason for item in items] == [None] * 7 + ["length"]
    assert whole_of(items) == (right.outputs[0].token_ids, right.outputs[0].text)


def test_a_result_is_what_generate_gives(llm: LLM) -> None:
    (right,) = llm.generate([[1, 2, 3]], GREEDY, "a")
    output = llm.generate_async([1, 2, 3], GREEDY, "a").result(60)
    assert output.outputs == right.outputs
    assert output.finished


def test_coroutines_and_threads_share_the_engine(llm: LLM) -> None:
    prompts = make_prompts(6, seed=3)
    loras = [None, "a", None, "a", "a", None]
    right = tokens_of(llm.generate(prompts, GREEDY, loras))

    async def read(number: int) -> list[int]:
        stream = llm.generate_async(prompts[number], GREEDY, loras[number])
        if number % 2:
            return (await stream.aresult()).outputs[0].token_ids
        return whole_of([item async for item in stream])[0]

    async def read_all() -> list[list[int]]:
        return list(await asyncio.gather(*map(read, range(6))))

    llm.get_stats()
    in_threads: dict[int, list[int]] = {}

    def read_in_thread(number: int) -> None:
        items = list(llm.generate_async(prompts[number], GREEDY, loras[number]))
        in_threads[number] = whole_of(items)[0]

    threads = [threading.Thread(target=read_in_thread, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    assert asyncio.run(read_all()) == right
    for thread in threads:
        thread.join()
    assert [in_threads[n] for n in range(6)] == right
    assert max(step["numGenRequests"] for step in llm.get_stats()) > 1, "batched together"


def test_an_aborted_request_ends_with_what_it_has(llm: LLM) -> None:
    (right,) = llm.generate([[1, 2, 3]], LONG)
    stream = llm.generate_async([1, 2, 3], LONG)
    iterator = iter(stream)
    first = next(iterator)
    stream.abort()
    items = [first, *iterator]
    output = stream.result(60)
    assert output.outputs[0].finish_reason == "abort"
    assert whole_of(items)[0] == output.outputs[0].token_ids
    assert right.outputs[0].token_ids[: len(output.outputs[0].token_ids)] == whole_of(items)[0]
    llm.abort(stream.request_id)
    llm.abort(10**9)
    assert tokens_of(llm.generate([[1, 2, 3]], GREEDY))


def hold_steps(llm: LLM) -> tuple[threading.Event, threading.Event, Callable[[], None]]:
    """Lets no forward begin; gives: one has come, let them go, take the hold away."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(module: Any, args: Any) -> None:
        begun.set()
        assert go_on.wait(60)

    assert llm._parts is not None
    handle = llm._parts.loaded.model.register_forward_pre_hook(wait)
    return begun, go_on, handle.remove


def test_a_request_aborted_before_it_began_has_no_tokens(llm: LLM) -> None:
    begun, go_on, release = hold_steps(llm)
    first = llm.generate_async([1, 2], GREEDY)
    assert begun.wait(60)
    second = llm.generate_async([3], GREEDY)
    second.abort()
    go_on.set()
    assert second.result(60).outputs[0].token_ids == []
    assert second.result().outputs[0].finish_reason == "abort"
    assert len(first.result(60).outputs[0].token_ids) == 8
    release()


def test_a_request_that_cannot_be_answered_has_its_error(llm: LLM) -> None:
    unknown = llm.generate_async([1], GREEDY, "nobody")
    too_long = llm.generate_async([1] * 300, GREEDY)
    good = llm.generate_async([1], GREEDY)
    assert isinstance(unknown.result(60).error, AdapterNotFoundError)
    assert isinstance(too_long.result(60).error, CapacityError)
    assert [item.error for item in unknown] == [unknown.result().error]
    assert len(good.result(60).outputs[0].token_ids) == 8


def test_a_failed_forward_is_raised_to_everybody_who_waits(llm: LLM) -> None:
    assert llm._parts is not None
    begun, go_on, release = hold_steps(llm)
    streams = [llm.generate_async([1], GREEDY), llm.generate_async([2], GREEDY, "a")]
    assert begun.wait(60)

    def explode(module: Any, args: Any) -> None:
        raise RuntimeError("boom")

    handle = llm._parts.loaded.model.register_forward_pre_hook(explode)
    go_on.set()
    for stream in streams:
        with pytest.raises(RuntimeError, match="boom"):
            stream.result(60)
        with pytest.raises(RuntimeError, match="boom"):
            list(stream)
    handle.remove()
    release()
    assert len(llm.generate_async([1], GREEDY, "a").result(60).outputs[0].token_ids) == 8
    assert llm.peft_cache_manager.active_tasks == {}


def test_generate_beside_streams_is_refused_and_a_stream_beside_generate_waits(llm: LLM) -> None:
    begun, go_on, release = hold_steps(llm)
    stream = llm.generate_async([1], GREEDY)
    assert begun.wait(60)
    with pytest.raises(InvalidArgumentError, match="streams are unfinished"):
        llm.generate([[1]], GREEDY)
    go_on.set()
    right = stream.result(60).outputs
    release()
    waiting: list[Any] = []

    def ask(module: Any, args: Any) -> None:
        if not waiting:
            waiting.append(llm.generate_async([1], GREEDY))

    assert llm._parts is not None
    handle = llm._parts.loaded.model.register_forward_pre_hook(ask)
    llm.generate([[2]], GREEDY)
    handle.remove()
    assert waiting[0].result(60).outputs == right


def test_generate_right_after_a_stream_waits_until_that_has_left_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, go_on = threading.Event(), threading.Event()
    take_inbox = llm._loop._take_inbox

    def linger() -> bool:
        is_busy = take_inbox()
        if not is_busy:
            leaving.set()
            assert go_on.wait(60)
        return is_busy

    monkeypatch.setattr(llm._loop, "_take_inbox", linger)
    right = llm.generate_async([1], GREEDY).result(60).outputs
    assert leaving.wait(60)
    thread = llm._loop._thread
    assert thread is not None
    join = thread.join
    monkeypatch.setattr(thread, "join", lambda: (go_on.set(), join()))
    try:
        assert llm.generate([[1]], GREEDY)[0].outputs == right
    finally:
        go_on.set()


def test_close_aborts_streams(llm: LLM) -> None:
    begun, go_on, _ = hold_steps(llm)
    running = llm.generate_async([1], LONG)
    assert begun.wait(60)
    queued = llm.generate_async([2], LONG)
    closer = threading.Thread(target=llm.close)
    closer.start()
    assert wait_until(lambda: llm._loop._closed)
    go_on.set()
    closer.join(60)
    assert not closer.is_alive()
    assert running.result(60).outputs[0].finish_reason == "abort"
    assert queued.result(60).outputs[0].token_ids == []
    with pytest.raises(InvalidArgumentError, match="closed"):
        llm.generate_async([1])


def test_a_result_that_does_not_come_in_time_is_a_timeout(llm: LLM) -> None:
    begun, go_on, release = hold_steps(llm)
    stream = llm.generate_async([1], GREEDY)
    assert begun.wait(60)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        stream.result(0.01)
    go_on.set()
    assert stream.result(60).finished
    release()


LEAVING = """
from tests.support.tiny_models import build_tiny_model

from pagedlora import LLM, KvCacheConfig, SamplingParams

llm = LLM(build_tiny_model("llama"), kv_cache_config=KvCacheConfig(num_blocks=64, block_size=16))
params = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
stream = llm.generate_async([1, 2, 3], params)
next(iter(stream))
print("leaving")
"""


@pytest.mark.slow
def test_the_interpreter_can_end_while_a_stream_is_unfinished() -> None:
    command = [sys.executable, "-c", LEAVING]
    for _ in range(3):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
        )
        assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr
