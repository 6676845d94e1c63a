"""Adapters are loaded while others compute: nobody waits for another one's file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import generations
from tests.support.llm_fixtures import GREEDY, adapter_bytes, save_adapter, tokens_of
from tests.support.tiny_models import build_tiny_model

from pagedlora import _core
from pagedlora.config import KvCacheConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import AdapterReadError
from pagedlora.requests import RequestState
from pagedlora.sampling_params import SamplingParams

NUM_ADAPTERS = 8
fakes = generations.fakes


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight adapters of one size."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        f"a{n}": save_adapter(root / f"a{n}", "llama", 8, ["q_proj", "v_proj"], seed=n)
        for n in range(NUM_ADAPTERS)
    }


@pytest.fixture
def llm(adapters: dict[str, Path], fakes: dict[str, _core.FakeSource]) -> Iterator[LLM]:
    """An engine with device room for four of them, whose files a test can hold."""
    size = adapter_bytes(adapters["a0"])
    with LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size=5 * size, host_cache_size="4MB"),
        kv_cache_config=KvCacheConfig(num_blocks=128, block_size=4),
        scheduler_config=SchedulerConfig(max_batch_size=4),
    ) as engine:
        for name, path in adapters.items():
            engine.load_lora(name, path)
        yield engine


def test_while_a_file_hangs_the_other_requests_finish(
    llm: LLM, adapters: dict[str, Path], fakes: dict[str, _core.FakeSource]
) -> None:
    right = tokens_of(llm.generate([[1, 2]] * 3, GREEDY, ["a0", "a1", None]))
    llm.peft_cache_manager.evict_unowned("host")
    llm.peft_cache_manager.evict_unowned("device")
    slow = fakes[str(adapters["a0"])]
    slow.hold_reads()
    late = llm.generate_async([1, 2], GREEDY, "a0")
    others = [llm.generate_async([1, 2], GREEDY, name) for name in ("a1", None) * 4]
    answers = [stream.result(60).outputs[0].token_ids for stream in others]
    assert answers == right[1:] * 4
    with pytest.raises(TimeoutError):
        late.result(0)
    slow.release_reads()
    assert late.result(60).outputs[0].token_ids == right[0]


def test_a_file_that_cannot_be_read_fails_its_requests_alone(
    llm: LLM, adapters: dict[str, Path], fakes: dict[str, _core.FakeSource]
) -> None:
    fakes[str(adapters["a2"])].fail_read_after(0)
    outputs = llm.generate([[1, 2]] * 4, GREEDY, ["a2", "a3", "a2", None])
    assert [type(output.error) for output in outputs] == [
        AdapterReadError,
        type(None),
        AdapterReadError,
        type(None),
    ]
    again = llm.generate([[1, 2]], GREEDY, "a2")
    assert again[0].error is None
    assert llm.peft_cache_manager.active_tasks == {}


def test_a_queue_finds_its_first_adapters_on_the_device(llm: LLM) -> None:
    assert llm._parts is not None
    parts = llm._parts
    stats = llm.peft_cache_manager.stats
    assert (stats.device.hits, stats.device.misses) == (0, 0)
    requests = []
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for number in range(NUM_ADAPTERS):
        request = parts.processor.make_request(number, [1, 2, 3], params, f"a{number}")
        parts.adapters.acquire(f"a{number}", request)
        parts.core.add(request)
        requests.append(request)
    while any(request.state is RequestState.WAITING for request in requests[:4]):
        parts.core.step()
        stats = llm.peft_cache_manager.stats
        assert stats.device.misses == 0, "the first four were brought in ahead"
    assert stats.device.hits >= 4
    while parts.core.has_unfinished:
        parts.core.step()
    assert [request.error for request in requests] == [None] * NUM_ADAPTERS
    parts.adapters.release_all()
