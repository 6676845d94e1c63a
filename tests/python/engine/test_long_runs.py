"""Long runs through torch's matrix products give what the operator gives, but for rounding."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from tests.support.cache_fixtures import Cache, Call, build_cache, wait_until
from tests.support.run_products import (
    EMBEDDING,
    MODULES,
    Activations,
    Leased,
    Segments,
    assert_right,
    by_operator,
    draw_activations,
    lease_random_rows,
)

from pagedlora import InvalidArgumentError, LeaseClosedError, _core
from pagedlora.engine import long_runs
from pagedlora.engine.long_runs import LongRunOptions
from pagedlora.engine.pool_view import PoolView

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
MIN_ROWS = 5
MIXED: Segments = [(1, 6), (None, 2), (2, 1), (3, 9), (4, 4), (None, 7), (1, 3), (100, 3), (2, 5)]


def options(leased: Leased, min_rows: int = MIN_ROWS) -> LongRunOptions:
    return LongRunOptions(PoolView(leased.cache.peft, CPU), min_rows)


def by_both(
    leased: Leased, segments: Segments, module: int, given: Activations
) -> tuple[torch.Tensor, Segments]:
    """What torch adds to what the operator makes of the short runs, and which these were."""
    runs, rest = options(leased).split(leased.lease, segments)
    y = by_operator(leased, rest, module, given)
    if runs is not None and module == EMBEDDING:
        runs.add_embedding(module, given.x, y, given.factor)
    elif runs is not None:
        runs.add(module, given.x, y, given.base_bias)
    return y, rest


def draw_segments(dice: random.Random) -> Segments:
    return [
        (dice.choice([None, 1, 2, 3, 4, 100]), dice.choice([0, 1, 2, 4, 5, 11, 30]))
        for _ in range(dice.randrange(1, 9))
    ]


@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_layouts_and_batches(
    make_cache: Callable[..., Cache], dtype: torch.dtype, weights: torch.dtype
) -> None:
    """Ranks 1 to 64, slices, several rows per module, biases, DoRA, tiles, embeddings."""
    dice = random.Random(f"{dtype}{weights}")
    with lease_random_rows(make_cache, weights, dice) as leased:
        for segments in [MIXED, *(draw_segments(dice) for _ in range(4))]:
            rows = sum(count for _, count in segments)
            for module in range(len(MODULES)):
                given = draw_activations(module, rows, dtype, dice)
                actual, rest = by_both(leased, segments, module, given)
                assert_right(leased, segments, module, given, actual)
                whole = by_operator(leased, segments, module, given)
                assert_right(leased, segments, module, given, whole)
                first = 0
                for (request, count), (left, _) in zip(_cut(segments, rest), rest, strict=True):
                    if request == left:  # short, or of the base: as if no run were long
                        run = slice(first, first + count)
                        assert torch.equal(actual[run], whole[run])
                    first += count


def _cut(segments: Segments, rest: Segments) -> Segments:
    """The segments with those that became one put together."""
    pending, cut = list(segments), []
    for _, count in rest:
        request, rows = pending.pop(0)
        while rows < count:
            rows += pending.pop(0)[1]
        cut.append((request, rows))
    return cut


def test_layouts_are_tiled_and_of_several_blocks(make_cache: Callable[..., Cache]) -> None:
    """Otherwise the test above shows less than it says."""
    dice = random.Random("torch.float32torch.float32")
    with (
        lease_random_rows(make_cache, torch.float32, dice) as leased,
        _core.LeasePages(leased.lease) as held,
    ):
        rows = [
            row
            for request in leased.rows
            for module in range(len(MODULES))
            for row in held.rows(request, module)
        ]
    assert any(len(row.a) > 1 for row in rows)
    assert any(len(tiles) > 1 for row in rows for _, tiles in row.a)
    assert any(len(tiles) > 1 for row in rows for _, tiles in row.b)
    assert any(len(row.bias) > 1 for row in rows)
    assert any(row.dora_scale for row in rows)
    assert any(row.in_slice[0] for row in rows)
    assert any(row.out_slice[0] for row in rows)
    assert {row.rank for row in rows} >= {1, 64}


def test_which_runs_are_long(make_cache: Callable[..., Cache]) -> None:
    """Neighbours of one task are one run, whoever asks; the base is nobody's."""
    with lease_random_rows(make_cache, torch.float32, random.Random(1)) as leased:
        runs, rest = options(leased).split(leased.lease, MIXED)
        assert rest == [
            (None, 6), (None, 2), (2, 1), (None, 9), (4, 4), (None, 7), (None, 6), (None, 5),
        ]  # fmt: skip
        assert runs is not None
        assert [rows for _, rows in runs._runs] == [
            [slice(0, 6), slice(29, 35)],
            [slice(9, 18)],
            [slice(35, 40)],
        ]
        assert options(leased, 10).split(leased.lease, MIXED) == (None, MIXED)
        with pytest.raises(KeyError):
            options(leased).split(leased.lease, [(77, 9)])
        with pytest.raises(InvalidArgumentError, match="min_rows is 0"):
            options(leased, 0)


def _doubled(pages: _core.RowPages, row: object, t: torch.Tensor, *rest: object) -> None:
    _expand(pages, row, 2.0 * t, *rest)  # type: ignore[arg-type]


_expand, _shrink = long_runs._expand, long_runs._shrink


@pytest.mark.parametrize("fault", ["scale", "task", "rows"])
def test_what_is_wrong_is_noticed(
    make_cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    dice = random.Random(2)
    with lease_random_rows(make_cache, torch.float32, dice) as leased:
        given = draw_activations(0, 40, torch.float32, dice)
        runs, rest = options(leased).split(leased.lease, MIXED)
        assert runs is not None
        if fault == "scale":
            monkeypatch.setattr(long_runs, "_expand", _doubled)
        elif fault == "task":
            (one, a), (two, b), *more = runs._runs
            runs._runs = [(two, a), (one, b), *more]
        else:
            request, (first, *others) = runs._runs[0]
            runs._runs = [(request, [slice(first.start, first.stop + 1), *others])]
        y = by_operator(leased, rest, 0, given)
        runs.add(0, given.x, y, given.base_bias)
        with pytest.raises(AssertionError):
            assert_right(leased, MIXED, 0, given, y)


@pytest.mark.parametrize("weights", DTYPES, ids=str)
def test_gathered_rows_are_those_of_the_cache_to_the_bit(
    make_cache: Callable[..., Cache], weights: torch.dtype
) -> None:
    with lease_random_rows(make_cache, weights, random.Random(3)) as leased:
        pool = PoolView(leased.cache.peft, CPU)
        tokens = torch.tensor([129, 0, 5, 5, 64])
        with _core.LeasePages(leased.lease) as held:
            for request, modules in leased.rows.items():
                for module, drawn in modules.items():
                    found = sorted(
                        held.rows(request, module), key=lambda r: (r.in_slice, r.out_slice)
                    )
                    ordered = sorted(drawn, key=lambda r: (r.inputs.start, r.outputs.start))
                    for pages, row in zip(found, ordered, strict=True):
                        assert torch.equal(pool.b(pages).double(), row.b)
                        if module != EMBEDDING:
                            assert torch.equal(pool.row(pages).a.double(), row.a)
                        elif pages.in_slice == (0, 130):
                            columns = pool.columns(pages, tokens)
                            assert torch.equal(columns.double(), row.a[:, tokens].T)


def test_a_view_is_of_the_pages_themselves_and_keeps_them() -> None:
    cache = build_cache(torch.bfloat16).peft
    view = PoolView(cache, CPU)
    base, num_bytes = cache.core.pool_range("device")
    assert view._elements.data_ptr() == view._floats.data_ptr() == base
    assert view._elements.numel() * 2 == view._floats.numel() * 4 == num_bytes
    capsule = _core.device_pool_to_dlpack(cache.core, None)
    cache.close()
    del capsule, cache  # the capsule was not taken: it gives back what it holds
    gc.collect()
    view._elements.fill_(3.0)
    assert (view._elements == 3.0).all()


def test_no_products_from_a_closed_lease(make_cache: Callable[..., Cache]) -> None:
    with lease_random_rows(make_cache, torch.float32, random.Random(5)) as leased:
        given = draw_activations(0, 40, torch.float32, random.Random(5))
        runs, _ = options(leased).split(leased.lease, MIXED)
        assert runs is not None
        held = _core.LeasePages(leased.lease)
        with pytest.raises(InvalidArgumentError, match="within `with`"):
            held.rows(1, 0)
        with held:
            with pytest.raises(KeyError):
                held.rows(77, 0)
            with pytest.raises(InvalidArgumentError, match="held already"), held:
                pass
        leased.lease.close()
        with pytest.raises(LeaseClosedError):
            runs.add(0, given.x, given.y.clone(), None)
        with pytest.raises(LeaseClosedError), held:
            pass


def test_whoever_closes_a_lease_waits_for_what_reads_it(make_cache: Callable[..., Cache]) -> None:
    with lease_random_rows(make_cache, torch.float32, random.Random(6)) as leased:
        with _core.LeasePages(leased.lease) as held:
            close = Call(leased.lease.close)
            assert not wait_until(lambda: close.has_returned, patience_s=0.05)
            assert held.rows(1, 0)
        close.result()
        assert not leased.lease.is_open
