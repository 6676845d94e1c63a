"""What `close()` gives back, what is said afterwards, and who waits for whom."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from tests.support.llm_fixtures import GREEDY, tokens_of
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import KvCacheConfig, PeftCacheConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import InvalidArgumentError
from pagedlora.requests import LoRARequest


@pytest.fixture
def llm() -> Iterator[LLM]:
    """A small engine, the only holder of its model; closed at the end."""
    with LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size="1MB", host_cache_size="1MB"),
        kv_cache_config=KvCacheConfig(num_blocks=16, block_size=4, host_blocks=4),
    ) as engine:
        yield engine


def test_close_gives_back_caches_and_model(llm: LLM) -> None:
    outputs = llm.generate([[1, 2], [1], [2]], GREEDY, [None, "nobody", LoRARequest("a", 1, "/a")])
    assert [output.error is None for output in outputs] == [True, False, False]
    parts = llm._parts
    assert parts is not None
    kv = parts.core._runner.kv
    tensors = [*kv.keys, *kv.values, *kv.host_keys, *kv.host_values]
    held = [*tensors, parts.peft_cache_manager.core, parts.core, parts.loaded.model]
    references = [weakref.ref(part) for part in held]
    del kv, tensors, held, parts

    llm.close()
    gc.collect()
    # Neither the closed object nor the errors of its results keep anything.
    assert [type(ref()) for ref in references if ref() is not None] == []
    assert len(outputs) == 3


def test_a_closed_llm_says_so(llm: LLM) -> None:
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.generate([[1]]),
        lambda: llm.load_lora("a", "/a"),
        llm.list_loras,
        lambda: llm.lora_manager,
        lambda: llm.peft_cache_manager,
        llm.__enter__,
    ]
    for use in uses:
        with pytest.raises(InvalidArgumentError, match="this LLM is closed"):
            use()
    llm.close()


def test_close_in_another_thread_waits_for_the_answers(llm: LLM) -> None:
    right = tokens_of(llm.generate([[1, 2, 3]], GREEDY))
    closers: list[threading.Thread] = []

    def close_beside(module: Any, args: Any) -> None:
        if not closers:
            closers.append(threading.Thread(target=llm.close))
            closers[0].start()
            closers[0].join(timeout=0.1)  # time to do harm, if it does not wait
            assert closers[0].is_alive()

    assert llm._parts is not None
    handle = llm._parts.loaded.model.register_forward_pre_hook(close_beside)
    try:
        assert tokens_of(llm.generate([[1, 2, 3]], GREEDY)) == right
    finally:
        handle.remove()
    closers[0].join()
    with pytest.raises(InvalidArgumentError, match="closed"):
        llm.list_loras()


class InterruptAtLine:
    """A trace function that raises KeyboardInterrupt at the n-th line of `generate`.

    Attributes:
        lines: Lines begun until the computation itself began, or until the interrupt.
    """

    def __init__(self, nth: int) -> None:
        self.lines = 0
        self._nth = nth
        self._counting = True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is LLM._run.__code__:
            self._counting = False
        return self._line if frame.f_code is LLM.generate.__code__ else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._counting:
            self.lines += 1
            if self.lines == self._nth:
                raise KeyboardInterrupt
        return self._line


def test_ctrl_c_at_any_line_before_the_computation_leaves_the_llm_usable(llm: LLM) -> None:
    right = tokens_of(llm.generate([[1, 2, 3]], GREEDY))
    for nth in range(1, 100):
        interrupt = InterruptAtLine(nth)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            llm.generate([[1, 2, 3]], GREEDY)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        assert interrupt.lines == nth
        assert tokens_of(llm.generate([[1, 2, 3]], GREEDY)) == right
    assert nth > 8
    assert interrupt.lines == nth - 1
