"""KV memory on device and host: whole blocks are copied bit for bit, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model

from pagedlora.config import KvCacheConfig, PeftCacheConfig
from pagedlora.engine.kv_tensors import KvTensors, bytes_per_block
from pagedlora.engine.llm import LLM
from pagedlora.engine.model_runner import ModelRunner
from pagedlora.engine.model_spec import LayerSpec, ModelSpec
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.errors import InvalidArgumentError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.requests import LlmRequest

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS = (LayerSpec(0, 4, 2, 6, 5), LayerSpec(1, 4, 4, 3, 8))
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 7, 5, 4
QUIET = {torch.float32: 0x7FC00001, torch.float16: 0x7E01, torch.bfloat16: 0x7FC1}
SIGNALLING = {torch.float32: 0x7F800001, torch.float16: 0x7C01, torch.bfloat16: 0x7F81}
"""NaN with a payload, as bits."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def tensors_of(kv: KvTensors, place: str) -> list[torch.Tensor]:
    if place == "device":
        return [*kv.keys, *kv.values]
    return [*kv.host_keys, *kv.host_values]


def contents(kv: KvTensors) -> dict[str, list[torch.Tensor]]:
    return {
        place: [bits(tensor).clone() for tensor in tensors_of(kv, place)]
        for place in ("device", "host")
    }


@pytest.fixture(params=DTYPES, ids=str)
def kv(request: pytest.FixtureRequest) -> KvTensors:
    """Every element a random bit pattern; in every block there are NaNs with a payload."""
    dtype = request.param
    kv = KvTensors(
        ModelSpec(LAYERS, dtype), NUM_BLOCKS, BLOCK_SIZE, dtype, num_host_blocks=NUM_HOST_BLOCKS
    )
    generator = torch.Generator().manual_seed(5)
    for tensor in [*tensors_of(kv, "device"), *tensors_of(kv, "host")]:
        view = bits(tensor)
        limits = torch.iinfo(view.dtype)
        view.copy_(torch.randint(limits.min, limits.max, view.shape, generator=generator))
        view[:, 0, 0, 0] = QUIET[dtype]
        view[:, 1, 0, 0] = SIGNALLING[dtype]
        assert tensor[:, :2, 0, 0].isnan().all()
    return kv


@pytest.mark.parametrize("direction", ["to_host", "from_host"])
def test_blocks_arrive_bit_for_bit_and_nothing_else_changes(kv: KvTensors, direction: str) -> None:
    device_blocks, host_blocks = [5, 0, 3], [1, 4, 0]
    before = contents(kv)
    if direction == "to_host":
        kv.copy_to_host(device_blocks, host_blocks)
        source, target, pairs = "device", "host", zip(device_blocks, host_blocks, strict=True)
    else:
        kv.copy_from_host(host_blocks, device_blocks)
        source, target, pairs = "host", "device", zip(host_blocks, device_blocks, strict=True)

    expected = [tensor.clone() for tensor in before[target]]
    for from_block, to_block in pairs:
        for tensor, original in zip(expected, before[source], strict=True):
            tensor[to_block] = original[from_block]
    after = contents(kv)
    assert all(map(torch.equal, after[target], expected))
    assert all(map(torch.equal, after[source], before[source]))


def test_a_suspended_request_comes_back_bit_for_bit_elsewhere(kv: KvTensors) -> None:
    manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, num_host_blocks=NUM_HOST_BLOCKS, copier=kv)
    request, other = LlmRequest(1), LlmRequest(2)
    assert manager.try_allocate(request, 9)
    table = list(manager.block_table(request))
    before = [bits(tensor)[table] for tensor in tensors_of(kv, "device")]
    assert manager.suspend_request(request)
    for tensor in tensors_of(kv, "device"):
        tensor.zero_()
    assert manager.try_allocate(other, 5)
    assert manager.try_allocate(request, 14)
    again = list(manager.block_table(request))[: len(table)]
    assert again != table
    after = [bits(tensor)[again] for tensor in tensors_of(kv, "device")]
    assert all(map(torch.equal, after, before))
    manager.check_invariants()


@pytest.mark.parametrize(
    ("device_blocks", "host_blocks"),
    [([0, 1], [0]), ([0], [0, 1]), ([7], [0]), ([0], [5]), ([-1], [0])],
)
@pytest.mark.parametrize("direction", ["to_host", "from_host"])
def test_blocks_that_do_not_exist_or_match_change_nothing(
    kv: KvTensors, direction: str, device_blocks: list[int], host_blocks: list[int]
) -> None:
    before = contents(kv)
    copy, arguments = kv.copy_to_host, (device_blocks, host_blocks)
    if direction == "from_host":
        copy, arguments = kv.copy_from_host, (host_blocks, device_blocks)
    with pytest.raises(IndexError):
        copy(*arguments)
    after = contents(kv)
    for place in ("device", "host"):
        assert all(map(torch.equal, after[place], before[place]))


def test_the_host_pool_is_memory_of_its_own_and_of_its_size(kv: KvTensors) -> None:
    everything = [*tensors_of(kv, "device"), *tensors_of(kv, "host")]
    assert len({tensor.untyped_storage().data_ptr() for tensor in everything}) == len(everything)
    dtype = kv.keys[0].dtype
    block_bytes = bytes_per_block(ModelSpec(LAYERS, dtype), BLOCK_SIZE, dtype)
    host_bytes = sum(tensor.nbytes for tensor in tensors_of(kv, "host"))
    assert host_bytes == NUM_HOST_BLOCKS * block_bytes


def test_without_host_blocks_there_is_no_host_memory() -> None:
    spec = ModelSpec(LAYERS, torch.float32)
    kv = KvTensors(spec, 2, BLOCK_SIZE, torch.float32)
    assert kv.num_host_blocks == 0
    assert sum(tensor.nbytes for tensor in tensors_of(kv, "host")) == 0
    with pytest.raises(InvalidArgumentError, match="num_host_blocks is -1"):
        KvTensors(spec, 2, BLOCK_SIZE, torch.float32, num_host_blocks=-1)


def greedy(runner: ModelRunner, manager: KVCacheManager, *, suspended_at: int | None) -> list[list]:
    """Logits of each step of one request, which makes way for another one before a step."""
    request, other = LlmRequest(1), LlmRequest(2)
    tokens, past, logits = [3, 17, 9, 4, 44, 21], 0, []
    for step in range(6):
        if step == suspended_at:
            assert manager.suspend_request(request)
            assert manager.try_allocate(other, 11)
            _forward(runner, manager, other, list(range(11)), 0)
        assert manager.try_allocate(request, len(tokens))
        manager.confirm_resume(request)
        row = _forward(runner, manager, request, tokens[past:], past)
        past = len(tokens)
        tokens.append(int(row.argmax()) % VOCAB_SIZE)
        logits.append(row.tolist())
    manager.free_resources(request)
    manager.free_resources(other)
    return logits


def _forward(
    runner: ModelRunner, manager: KVCacheManager, request: LlmRequest, tokens: list[int], past: int
) -> torch.Tensor:
    table = list(manager.block_table(request))
    sequence = ScheduledSequence(
        request.request_id, tokens, past, table, uses_adapter=False, sample=True
    )
    return runner.forward(StepBatch([sequence]))[0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_resumed_request_computes_what_it_would_have_computed(family: str) -> None:
    runner = ModelRunner(
        build_tiny_model(family),
        None,
        num_blocks=8,
        block_size=4,
        num_host_blocks=4,
        weights_dtype=None,
    )
    manager = KVCacheManager(8, 4, num_host_blocks=4, copier=runner.kv)
    undisturbed = greedy(runner, manager, suspended_at=None)
    for step in range(1, 6):
        assert greedy(runner, manager, suspended_at=step) == undisturbed
    manager.check_invariants()
    runner.close()


def test_an_engine_gets_the_host_pool_that_it_is_configured_with() -> None:
    with LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size="1MB", host_cache_size="1MB"),
        kv_cache_config=KvCacheConfig(num_blocks=8, block_size=4, host_blocks=3),
    ) as engine:
        assert engine._parts is not None
        core = engine._parts.core
        manager, tensors = core._kv, core._runner.kv
        assert (manager.num_blocks, manager.num_host_blocks) == (8, 3)
        assert (tensors.num_blocks, tensors.num_host_blocks) == (8, 3)
        request = LlmRequest(10**6)
        assert manager.try_allocate(request, 4)
        tensors.keys[1][manager.block_table(request)[0]] = 7
        assert manager.suspend_request(request)
        assert bool((tensors.host_keys[1][0] == 7).all())
        manager.free_resources(request)
