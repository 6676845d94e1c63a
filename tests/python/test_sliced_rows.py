"""Rows for slices of modules, through the cache (design 3.1): split, fused and sharded adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.cache_fixtures import Cache, add_and_wait
from tests.support.row_adapters import RowSource, apply_rows

from pagedlora._core import LoraModule

OUTS = (40, 24, 16)
RANKS = (4, 9, 2)


@pytest.fixture
def fused(make_cache: Callable[..., Cache]) -> Cache:
    """One module of 32 -> q (40), k (24), v (16)."""
    return make_cache(modules=[LoraModule("qkv_proj", 32, sum(OUTS))])


@pytest.fixture
def split(make_cache: Callable[..., Cache]) -> Cache:
    """The same as three modules."""
    names = ("q_proj", "k_proj", "v_proj")
    return make_cache(modules=[LoraModule(n, 32, o) for n, o in zip(names, OUTS, strict=True)])


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_split_adapter_on_a_fused_module(fused: Cache) -> None:
    """Ranks and scales may differ between the parts."""
    source = RowSource()
    x, y = random(5, 32, seed=0), random(5, sum(OUTS), seed=1)
    expected = y.clone()
    matrices = []
    first = 0
    for part, (out, rank) in enumerate(zip(OUTS, RANKS, strict=True)):
        a, b, scale = random(rank, 32, seed=part), random(out, rank, seed=9 + part), 0.5 + part
        source.row(0, rank, scale, source.put(a), source.put(b), out_slice=(first, out))
        expected[:, first : first + out] += scale * (x @ a.T @ b.T)
        matrices.append((a, b))
        first += out
    request = source.carried_by(1, fused.config)
    add_and_wait(fused.peft, request)
    with fused.peft.ensure_batch([request], []) as lease:
        torch.testing.assert_close(apply_rows(lease, [(1, 5)], 0, x, y), expected)
        assert {(e.out_offset, e.out_size) for e in lease[1]} == {(0, 40), (40, 24), (64, 16)}
        a, b = fused.peft.task_weights(1)["qkv_proj"]
    assert torch.equal(a, torch.cat([a for a, _ in matrices]))
    assert torch.equal(b, torch.block_diag(*(b for _, b in matrices)))
    fused.peft.mark_request_done(request)


def test_a_fused_adapter_on_split_modules(split: Cache) -> None:
    """The same A for every module, another range of B's rows."""
    source = RowSource()
    a, b = random(8, 32, seed=2), random(sum(OUTS), 8, seed=3)
    a_offset, b_offset = source.put(a), source.put(b)
    first = 0
    for module, out in enumerate(OUTS):
        source.row(module, 8, 2.0, a_offset, b_offset + 4 * 8 * first)
        first += out
    request = source.carried_by(1, split.config)
    add_and_wait(split.peft, request)
    x = random(3, 32, seed=4)
    with split.peft.ensure_batch([request], []) as lease:
        parts = [apply_rows(lease, [(1, 3)], m, x, torch.zeros(3, o)) for m, o in enumerate(OUTS)]
    torch.testing.assert_close(torch.cat(parts, dim=1), 2.0 * (x @ a.T @ b.T))
    split.peft.mark_request_done(request)


@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_by_input_add_up_and_shards_by_output_stand_side_by_side(
    make_cache: Callable[..., Cache], num_shards: int
) -> None:
    a, b = random(6, 32, seed=5), random(80, 6, seed=6)
    x = random(4, 32, seed=7)
    whole = 0.25 * (x @ a.T @ b.T)
    by_input, by_output = torch.zeros(4, 80), []
    ins, outs = 32 // num_shards, 80 // num_shards
    for shard in range(num_shards):
        cache = make_cache(modules=[LoraModule("down", ins, 80), LoraModule("up", 32, outs)])
        source = RowSource()
        a_offset, b_offset = source.put(a), source.put(b)
        source.row(0, 6, 0.25, a_offset + 4 * ins * shard, b_offset, a_row_stride=32)
        source.row(1, 6, 0.25, a_offset, b_offset + 4 * 6 * outs * shard)
        request = source.carried_by(1, cache.config)
        add_and_wait(cache.peft, request)
        with cache.peft.ensure_batch([request], []) as lease:
            columns = x[:, ins * shard : ins * (shard + 1)].contiguous()
            by_input += apply_rows(lease, [(1, 4)], 0, columns, torch.zeros(4, 80))
            by_output.append(apply_rows(lease, [(1, 4)], 1, x, torch.zeros(4, outs)))
        assert torch.equal(cache.peft.task_weights(1)["down"][0], a[:, ins * shard :][:, :ins])
        cache.peft.mark_request_done(request)
    torch.testing.assert_close(by_input, whole)
    torch.testing.assert_close(torch.cat(by_output, dim=1), whole)
