"""Attention in torch gives what the native operator gives, and writes the same cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedlora import InvalidArgumentError
from pagedlora.engine.attention import AttentionCall
from pagedlora.engine.attention_backends import NativeAttention
from pagedlora.engine.kv_tensors import KvTensors
from pagedlora.engine.model_spec import LayerSpec, ModelSpec
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.engine.torch_attention import TorchAttention

BLOCK_SIZE = 4
NUM_BLOCKS = 64
LAYERS = (
    LayerSpec(0, 4, 2, 8, 8),
    LayerSpec(1, 6, 1, 8, 16),  # one key head for all, values wider than keys
    LayerSpec(2, 3, 3, 16, 8),
)
SPEC = ModelSpec(LAYERS, torch.float32)


def make_caches(seed: int) -> tuple[KvTensors, KvTensors]:
    """Two caches of the same random content."""
    generator = torch.Generator().manual_seed(seed)
    caches = tuple(KvTensors(SPEC, NUM_BLOCKS, BLOCK_SIZE, torch.float32) for _ in range(2))
    for ours, theirs in zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    ):
        ours.normal_(generator=generator)
        theirs.copy_(ours)
    return caches


def make_step(lengths: list[tuple[int, int]], seed: int) -> StepBatch:
    """Sequences with (past, new) tokens in blocks of their own, shuffled."""
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    sequences = []
    for request, (past, new) in enumerate(lengths):
        count = -(-(past + new) // BLOCK_SIZE)
        table, blocks = blocks[:count], blocks[count:]
        sequences.append(ScheduledSequence(request, [0] * new, past, table, False, True))
    return StepBatch(sequences)


def make_call(
    layer: LayerSpec, tokens: int, seed: int, *, window: int = 0, softcap: float = 0.0, sinks=False
) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # As models give them: [1, tokens, heads, dim], transposed.
    return AttentionCall(
        layer.layer_idx,
        draw(1, tokens, layer.num_heads, layer.key_dim).transpose(1, 2),
        draw(1, tokens, layer.num_kv_heads, layer.key_dim).transpose(1, 2),
        draw(1, tokens, layer.num_kv_heads, layer.value_dim).transpose(1, 2),
        scaling=layer.key_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
        sinks=draw(layer.num_heads) if sinks else None,
    )


LENGTHS = st.lists(
    st.tuples(st.integers(0, 19), st.one_of(st.just(1), st.integers(1, 11))), min_size=1, max_size=6
)


PECULIARITIES = st.fixed_dictionaries(
    {
        "window": st.sampled_from([0, 1, 3, 8]),
        "softcap": st.sampled_from([0.0, 2.0]),
        "sinks": st.booleans(),
    }
)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.sampled_from(LAYERS), PECULIARITIES, st.integers(0, 1000))
def test_it_equals_the_native_operator(
    lengths: list[tuple[int, int]], layer: LayerSpec, peculiarities: dict[str, Any], seed: int
) -> None:
    step = make_step(lengths, seed)
    call = make_call(layer, step.num_tokens, seed, **peculiarities)
    native, ours = make_caches(seed)
    expected = NativeAttention(native).begin(step).run(call, layer)
    got = TorchAttention(ours).begin(step).run(call, layer)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        (*ours.keys, *ours.values), (*native.keys, *native.values), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_a_step_serves_layers_of_different_windows() -> None:
    step = make_step([(13, 1), (2, 5)], 3)
    native, ours = make_caches(3)
    theirs, mine = NativeAttention(native).begin(step), TorchAttention(ours).begin(step)
    for layer, window in ((LAYERS[0], 3), (LAYERS[2], 0), (LAYERS[1], 5)):
        call = make_call(layer, step.num_tokens, layer.layer_idx, window=window)
        torch.testing.assert_close(mine.run(call, layer), theirs.run(call, layer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type(dtype: torch.dtype) -> None:
    kv = KvTensors(ModelSpec(LAYERS, dtype), NUM_BLOCKS, BLOCK_SIZE, dtype)
    step = make_step([(0, 6), (3, 1)], 1)
    layer = LAYERS[0]
    whole = make_call(layer, step.num_tokens, 5)
    call = AttentionCall(
        0,
        *(t.to(dtype) for t in (whole.query, whole.key, whole.value)),
        whole.scaling,
        0,
        0.0,
        None,
    )
    got = TorchAttention(kv).begin(step).run(call, layer)
    assert got.dtype == dtype
    native = KvTensors(ModelSpec(LAYERS, dtype), NUM_BLOCKS, BLOCK_SIZE, dtype)
    expected = NativeAttention(native).begin(step).run(call, layer)
    torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1], "request 0 has 1 blocks of 4 for 7 tokens"),
        ([1, NUM_BLOCKS], "has blocks 1 to 64; the cache has 0 to 63"),
        ([-1, 2], "has blocks -1 to 2; the cache has 0 to 63"),
    ],
)
def test_block_tables_that_do_not_fit_are_refused(table: list[int], message: str) -> None:
    kv, _ = make_caches(0)
    step = StepBatch([ScheduledSequence(0, [0] * 4, 3, table, False, True)])
    with pytest.raises(InvalidArgumentError, match=message):
        TorchAttention(kv).begin(step)
