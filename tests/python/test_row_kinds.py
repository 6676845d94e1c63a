"""Biases, DoRA scales and embeddings through the cache (design 3.1, 3.5), also when read again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.support.cache_fixtures import Cache, add_and_wait
from tests.support.row_adapters import CarriedRows, RowSource, apply_rows

from pagedlora import LlmRequest, LoraBatch, LoraOperator
from pagedlora._core import (
    AdapterPlan,
    BatchLease,
    Dtype,
    FakeSource,
    LoraModule,
    ModuleKind,
    PlannedRow,
    ScratchFile,
    source_with_tail,
)

IN, OUT, RANK, SCALE = 32, 80, 9, 0.75
VOCABULARY = 100


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


A, B = random(RANK, IN, seed=0), random(OUT, RANK, seed=1)
BIAS, DORA = random(OUT, seed=2), 1.5 + 0.2 * random(OUT, seed=3)
X, Y, BASE_BIAS = random(5, IN, seed=4), random(5, OUT, seed=5), random(OUT, seed=6)


def expected(has_bias: bool, has_dora_scale: bool) -> torch.Tensor:
    delta = SCALE * (X @ A.T @ B.T + (BIAS if has_bias else 0))
    if has_dora_scale:
        return Y + (DORA - 1) * (Y - BASE_BIAS) + DORA * delta
    return Y + delta


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    return make_cache(modules=[LoraModule("proj", IN, OUT)])


@contextmanager
def leased(cache: Cache, request: LlmRequest) -> Iterator[BatchLease]:
    add_and_wait(cache.peft, request)
    with cache.peft.ensure_batch([request], []) as lease:
        yield lease
    cache.peft.mark_request_done(request)


@pytest.mark.parametrize(
    ("has_bias", "has_dora_scale"), [(True, False), (False, True), (True, True)]
)
def test_vectors_of_a_row_are_added_listed_and_given_back(
    cache: Cache, has_bias: bool, has_dora_scale: bool
) -> None:
    source = RowSource()
    source.row(
        0,
        RANK,
        SCALE,
        source.put(A),
        source.put(B),
        bias=(source.put(BIAS), Dtype.float32) if has_bias else None,
        dora_scale_offset=source.put(DORA) if has_dora_scale else None,
    )
    with leased(cache, source.carried_by(1, cache.config)) as lease:
        result = apply_rows(lease, [(1, 5)], 0, X, Y, base_bias=BASE_BIAS)
        torch.testing.assert_close(result, expected(has_bias, has_dora_scale))
        assert LoraBatch(lease, [(1, 5)]).has_dora_scales == has_dora_scale
        assert all((e.bias_pointer is not None) == has_bias for e in lease[1])
        assert all((e.scaling_vec_pointer is not None) == has_dora_scale for e in lease[1])
        a, b, *vectors = cache.peft.task_weights(1)["proj"]
    assert torch.equal(a, A)
    assert torch.equal(b, B)
    wanted = [DORA if has_dora_scale else None] + ([BIAS] if has_bias else [])
    assert len(vectors) == len(wanted)
    for vector, value in zip(vectors, wanted, strict=True):
        assert vector is value is None or torch.equal(vector, value)


def test_their_bytes_count(cache: Cache) -> None:
    def pages(**more: object) -> int:
        source = RowSource()
        source.row(0, 8, 1.0, source.put(A), source.put(B), **more)
        source.put(random(1000, seed=7))
        return cache.peft.determine_num_pages(source.carried_by(1, cache.config))

    many = pages(bias=(0, Dtype.float32), dora_scale_offset=0)
    assert many > pages()


def test_a_vector_from_a_scratch_file_is_read_again_with_the_adapter(cache: Cache) -> None:
    """Design 3.5: an evicted DoRA task is read again without Python."""
    data = b"".join(tensor.numpy().tobytes() for tensor in (A, B))
    head = FakeSource(data, "adapter")
    scratch = ScratchFile(tempfile.gettempdir())
    source = source_with_tail(head, scratch.append(DORA.numpy()))
    assert source.size_bytes == len(data) + 4 * OUT
    row = PlannedRow(
        0, RANK, SCALE, 0, Dtype.float32, 4 * A.numel(), Dtype.float32, dora_scale_offset=len(data)
    )
    task = cache.peft.core.register_task(AdapterPlan(cache.config, [row], source))
    del source, row, scratch
    for reads in (1, 2):
        with leased(cache, LlmRequest(1, lora_task_id=task)) as lease:
            torch.testing.assert_close(
                apply_rows(lease, [(1, 5)], 0, X, Y, base_bias=BASE_BIAS), expected(False, True)
            )
        cache.peft.evict_unowned("device")
        cache.peft.evict_unowned("host")
        assert not cache.peft.is_task_cached(task)
        assert cache.peft.stats.source_reads == reads
    cache.peft.core.unregister_task(task)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_adds_the_columns_of_its_tokens(
    make_cache: Callable[..., Cache], dtype: torch.dtype
) -> None:
    module = LoraModule("embed_tokens", VOCABULARY, OUT, kind=ModuleKind.embedding)
    cache = make_cache(dtype, modules=[module])
    a = random(RANK, VOCABULARY, seed=8).to(dtype).float()
    b = B.to(dtype).float()
    source = RowSource()
    source.row(0, RANK, SCALE, source.put(a), source.put(b))
    tokens = torch.tensor([0, 99, 7, 7, 50])
    with leased(cache, source.carried_by(1, cache.config)) as lease:
        y = Y.clone()
        LoraOperator(cache.config.dtype).apply_embedding(
            LoraBatch(lease, [(1, 4), (None, 1)]),
            0,
            tokens.data_ptr(),
            y.data_ptr(),
            5,
            y.stride(0),
            Dtype.float32,
            3.0,
        )
        stored_a, stored_b = cache.peft.task_weights(1)["embed_tokens"]
    wanted = Y.clone()
    wanted[:4] += 3.0 * SCALE * (a.T[tokens[:4]] @ b.T)
    torch.testing.assert_close(y, wanted)
    assert torch.equal(stored_a.float(), a)
    assert torch.equal(stored_b.float(), b)


def test_kinds_tell_models_apart(make_cache: Callable[..., Cache]) -> None:
    """A plan for a linear module does not fit an embedding of the same sizes."""
    linear = make_cache(modules=[LoraModule("m", IN, OUT)])
    embedding = make_cache(modules=[LoraModule("m", IN, OUT, kind=ModuleKind.embedding)])
    source = RowSource()
    source.row(0, RANK, SCALE, source.put(A), source.put(B))
    plan = AdapterPlan(linear.config, source.rows, FakeSource(bytes(source.data), "x"))
    request = LlmRequest(1, lora_task_id=1, lora_weights=CarriedRows(plan))
    with pytest.raises(ValueError, match="another model configuration"):
        embedding.peft.add_request_peft(request)
