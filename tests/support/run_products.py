"""Adapters of random rows in a cache, what float64 makes of them, and the bound on errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tests.support.cache_fixtures import Cache, add_and_wait
from tests.support.row_adapters import RowSource

from pagedlora import LlmRequest, LoraBatch, LoraOperator
from pagedlora._core import Dtype, LoraModule, ModuleKind
from pagedlora.engine.dtypes import to_core_dtype

Segments = list[tuple[int | None, int]]

MODULES = [
    LoraModule("plain", 96, 40),
    LoraModule("fused", 48, 72),
    LoraModule("wide", 700, 24),
    LoraModule("tall", 24, 500),
    LoraModule("embed", 130, 32, kind=ModuleKind.embedding),
]
EMBEDDING = 4
TOUCHED_BY_ALL = 0
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SMALLEST = 2.0**-24
"""Of float16: what lies below is rounded to a multiple of it."""


class DrawnRow(NamedTuple):
    """A row as the cache keeps it, in float64."""

    scale: float
    a: torch.Tensor
    b: torch.Tensor
    inputs: slice
    outputs: slice
    bias: torch.Tensor | None
    dora_scale: torch.Tensor | None


@dataclass(frozen=True)
class Leased:
    """A lease of adapters with known rows.

    Attributes:
        cache: Of a page of a KiB, so that matrices are tiled.
        lease: Of all requests.
        rows: By request and module.
    """

    cache: Cache
    lease: Any
    rows: dict[int, dict[int, list[DrawnRow]]]


@contextmanager
def lease_random_rows(
    make_cache: Callable[..., Cache], dtype: torch.dtype, dice: random.Random, num_adapters: int = 4
) -> Iterator[Leased]:
    """Adapters of requests 1, 2, ...; the request 100 uses that of request 1 as well."""
    cache = make_cache(dtype, modules=MODULES, max_lora_rank=64, host_pages=6000, device_pages=6000)
    requests, rows = [], {}
    for number in range(1, num_adapters + 1):
        source = RowSource()
        rows[number] = _draw_adapter(source, dtype, dice)
        requests.append(source.carried_by(number, cache.config))
    requests.append(LlmRequest(100, lora_task_id=1))
    rows[100] = rows[1]
    for request in requests:
        add_and_wait(cache.peft, request)
    with cache.peft.ensure_batch(requests, []) as lease:
        assert not lease.errors
        yield Leased(cache, lease, rows)
    for request in requests:
        cache.peft.mark_request_done(request)


def _draw_adapter(
    source: RowSource, dtype: torch.dtype, dice: random.Random
) -> dict[int, list[DrawnRow]]:
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    drawn: dict[int, list[DrawnRow]] = {}
    for index, module in enumerate(MODULES):
        if index != TOUCHED_BY_ALL and dice.random() < 0.2:
            continue
        drawn[index] = [
            _draw_row(source, dtype, dice, generator, index, slices)
            for slices in _draw_slices(module, dice)
        ]
    return drawn


def _draw_slices(module: LoraModule, dice: random.Random) -> list[tuple[slice, slice]]:
    """Whole, parts of the outputs side by side, or parts of the inputs that share outputs."""
    inputs, outputs = slice(0, module.in_features), slice(0, module.out_features)
    kind = dice.choice(["whole", "outputs", "inputs", "part"])
    if kind == "outputs":
        first, second = sorted(dice.sample(range(1, outputs.stop), 2))
        cuts = [(0, first), (first, second), (second, outputs.stop)]
        return [(inputs, slice(*cut)) for cut in dice.sample(cuts, dice.choice([2, 3]))]
    if kind == "inputs":
        cut = dice.randrange(1, inputs.stop)
        return [(slice(0, cut), outputs), (slice(cut, inputs.stop), outputs)]
    if kind == "part":
        cut, other = dice.randrange(inputs.stop), dice.randrange(outputs.stop)
        return [(slice(cut, inputs.stop), slice(other, outputs.stop))]
    return [(inputs, outputs)]


def _draw_row(  # noqa: PLR0917 - what a row is
    source: RowSource,
    dtype: torch.dtype,
    dice: random.Random,
    generator: torch.Generator,
    module: int,
    slices: tuple[slice, slice],
) -> DrawnRow:
    inputs, outputs = slices
    ins, outs = inputs.stop - inputs.start, outputs.stop - outputs.start
    rank = dice.choice([1, 2, 7, 8, 9, 16, 33, 64])
    is_whole_output = inputs.start == 0 and inputs.stop == MODULES[module].in_features
    has_dora = is_whole_output and dice.random() < 0.4  # no two rows with the same outputs
    has_bias = dice.random() < 0.4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    a, b = draw(rank, ins) / ins**0.5, draw(outs, rank) / rank**0.5
    bias, dora_scale = draw(outs), 1.0 + 0.3 * draw(outs)
    scale = dice.choice([0.25, 1.0, 1.7, -2.0])
    source.row(
        module,
        rank,
        scale,
        source.put(a),
        source.put(b),
        in_slice=(inputs.start, ins),
        out_slice=(outputs.start, outs),
        bias=(source.put(bias), Dtype.float32) if has_bias else None,
        dora_scale_offset=source.put(dora_scale) if has_dora else None,
    )
    return DrawnRow(
        float(torch.tensor(scale)),
        a.to(dtype).double(),
        b.to(dtype).double(),
        inputs,
        outputs,
        bias.double() if has_bias else None,
        dora_scale.double() if has_dora else None,
    )


class Activations(NamedTuple):
    """What a module takes and gives: x or token ids, y, and the module's bias."""

    x: torch.Tensor
    y: torch.Tensor
    base_bias: torch.Tensor
    factor: float = 1.0


def draw_activations(
    module: int, rows: int, dtype: torch.dtype, dice: random.Random
) -> Activations:
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    spec = MODULES[module]
    y = torch.randn(rows, spec.out_features, generator=generator).to(dtype)
    bias = torch.randn(spec.out_features, generator=generator).to(dtype)
    if module == EMBEDDING:
        ids = torch.randint(spec.in_features, (rows,), generator=generator)
        return Activations(ids, y, torch.zeros_like(bias), 1.5)
    return Activations(torch.randn(rows, spec.in_features, generator=generator).to(dtype), y, bias)


def by_operator(
    leased: Leased, segments: Segments, module: int, given: Activations
) -> torch.Tensor:
    """What the CPU's operator makes of a copy of y."""
    y, lora = given.y.clone(), LoraOperator(leased.cache.config.dtype)
    batch, dtype = LoraBatch(leased.lease, segments), to_core_dtype(given.y.dtype)
    if module == EMBEDDING:
        lora.apply_embedding(
            batch,
            module,
            given.x.data_ptr(),
            y.data_ptr(),
            len(y),
            y.stride(0),
            dtype,
            given.factor,
        )
        return y
    x, bias = given.x, given.base_bias
    lora.apply(
        batch,
        module,
        x.data_ptr(),
        y.data_ptr(),
        len(y),
        x.stride(0),
        y.stride(0),
        dtype,
        bias.data_ptr(),
    )
    return y


def assert_right(
    leased: Leased, segments: Segments, module: int, given: Activations, actual: torch.Tensor
) -> None:
    """Each output within the bound that long_runs.py states; rows of the base untouched."""
    first = 0
    for request, count in segments:
        rows = slice(first, first + count)
        first += count
        if request is None:
            assert torch.equal(actual[rows], given.y[rows])
            continue
        right, bound = _in_float64(leased.rows[request].get(module, []), rows, given)
        error = (actual[rows].double() - right).abs()
        assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"


def _in_float64(
    rows: list[DrawnRow], tokens: slice, given: Activations
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs, and how far from them one may be."""
    y, bound = given.y[tokens].double(), torch.zeros_like(given.y[tokens], dtype=torch.float64)
    dtype = given.y.dtype
    for row in rows:
        t, t_size = _shrunk(row, given, tokens)
        delta, size = t @ row.b.T, t_size @ row.b.abs().T
        if row.bias is not None:
            delta, size = delta + row.scale * row.bias, size + (row.scale * row.bias).abs()
        before, grows = y[:, row.outputs], torch.ones(())
        size = size + before.abs()
        if row.dora_scale is not None:
            base = before - given.base_bias[row.outputs].double()
            kept = (row.dora_scale - 1.0) * base
            size = size * row.dora_scale.abs() + (row.dora_scale - 1.0).abs() * (
                before.abs() + given.base_bias[row.outputs].double().abs()
            )
            size, delta = size + before.abs(), kept + row.dora_scale * delta
            grows = row.dora_scale.abs().clamp(min=1.0)
        y[:, row.outputs] = before + delta
        terms = row.a.shape[1] + row.a.shape[0] + 2 + 6
        bound[:, row.outputs] = (
            bound[:, row.outputs] * grows
            + terms * ROUNDOFF[torch.float32] * size
            + ROUNDOFF[dtype] * 1.01 * y[:, row.outputs].abs()
            + (_SMALLEST if dtype is torch.float16 else 0.0)
        )
    return y, bound


def _shrunk(row: DrawnRow, given: Activations, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """scale * A x, and the same of magnitudes."""
    x = given.x[tokens]
    if x.dim() == 1:
        whole = torch.zeros(MODULES[EMBEDDING].in_features, row.a.shape[0], dtype=torch.float64)
        whole[row.inputs] = row.a.T
        t = given.factor * row.scale * whole[x]
        return t, t.abs()
    part = x[:, row.inputs].double()
    return row.scale * part @ row.a.T, abs(row.scale) * part.abs() @ row.a.abs().T
