"""A step does nothing per registered adapter: counted, not timed.

Every Python function and every C function that Python calls while requests are answered is counted,
by name: 10 registered adapters and 1,000 give the same numbers. Loops inside the C++ core are not
seen; for those there is the ratio of step times in benchmarks/.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.support.llm_fixtures import save_adapter
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import KvCacheConfig, PeftCacheConfig
from pagedlora.engine.llm import LLM
from pagedlora.sampling_params import SamplingParams

FEW, MANY = 10, 1000
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
USED = ["adapter-0", "adapter-3", None, "adapter-7"]


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Counts the calls of Python and C functions in this thread until the block ends."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", repr(argument))] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def engine_with(num_registered: int, adapter: Path) -> LLM:
    """A tiny engine that knows so many adapters, with room for a few."""
    llm = LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(host_cache_size="1MB", device_cache_size="1MB"),
        kv_cache_config=KvCacheConfig(num_blocks=40, block_size=4),
    )
    for number in range(num_registered):
        llm.load_lora(f"adapter-{number}", adapter)
    return llm


def calls_of_an_answer(llm: LLM) -> Counter[str]:
    """What answering calls, from the registered names to the last token."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm.generate(PROMPTS, params, USED)  # loads the adapters, and whatever is made only once
    gc.disable()  # finalisers would be counted wherever they happen to run
    try:
        with counted_calls() as calls:
            outputs = llm.generate(PROMPTS, params, USED)
    finally:
        gc.enable()
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return calls


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A small adapter, registered under every name."""
    return save_adapter(tmp_path / "adapter", "llama", 2, ["q_proj", "v_proj"])


def test_an_answer_makes_the_same_calls_whatever_the_number_of_registered_adapters(
    adapter: Path,
) -> None:
    with engine_with(FEW, adapter) as few, engine_with(MANY, adapter) as many:
        expected = calls_of_an_answer(few)
        actual = calls_of_an_answer(many)
    assert expected.total() > 1000
    assert actual == expected


def test_the_count_would_see_a_loop_over_the_registered_adapters(adapter: Path) -> None:
    counts = []
    for num_registered in (FEW, 2 * FEW):
        with engine_with(num_registered, adapter) as llm, counted_calls() as calls:
            llm.list_loras()
        counts.append(calls.total())
    assert counts[1] > counts[0] + FEW
