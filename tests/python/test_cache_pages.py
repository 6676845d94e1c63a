"""What the pages hold: the file's bits or the specified cast, and entries that point at them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    adapter_tensors,
    assert_same_weights,
    read_matrix,
    same_bits,
    select_modules,
    weights_of,
    write_adapter,
    write_random_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import AdapterFormatError, LlmRequest, LoraManager

MakeCache = Callable[..., Cache]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SLOT_BYTES = 64


def make_resident(cache: Cache, directory: Path) -> tuple[LlmRequest, Any]:
    cache.adapters.register("adapter", directory)
    request = cache.request(1, "adapter")
    add_and_wait(cache.peft, request)
    return request, cache.peft.ensure_batch([request], [])


def unchecked(cache: Cache) -> Cache:
    """The same, whose registry takes values that no adapter should have."""
    adapters = LoraManager(cache.config, cache.peft, check_values=False)
    return replace(cache, adapters=adapters)


# ---- entries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [256, 1024, 65536, None])
@pytest.mark.parametrize("rank", [1, 3, 8, 13, 16])
def test_entries_add_up_to_the_adapters_product(
    make_cache: MakeCache, tmp_path: Path, rank: int, page_bytes: int | None
) -> None:
    cache = make_cache(torch.bfloat16, page_bytes=page_bytes)
    fields = {"lora_alpha": 5, "use_rslora": rank == 13}
    directory = write_random_adapter(tmp_path, cache.config, rank=rank, seed=rank, **fields)
    request, lease = make_resident(cache, directory)
    expected = weights_of(adapter_tensors(cache.config.modules, rank, rank), torch.bfloat16)

    modules = {module.name: module for module in cache.config.modules}
    deltas = {n: torch.zeros(m.out_features, m.in_features).double() for n, m in modules.items()}
    covered = {n: torch.zeros(m.out_features, m.in_features).int() for n, m in modules.items()}
    scales = cache.adapters.get("adapter").scales
    for entry in lease[request.request_id]:
        rows = slice(entry.out_offset, entry.out_offset + entry.out_size)
        columns = slice(entry.in_offset, entry.in_offset + entry.in_size)
        a = read_matrix(
            entry.weights_in_pointer, (entry.adapter_size, entry.in_size), torch.bfloat16
        )
        b = read_matrix(
            entry.weights_out_pointer, (entry.out_size, entry.adapter_size), torch.bfloat16
        )
        assert entry.scale == pytest.approx(scales[entry.module_name], rel=1e-7)
        deltas[entry.module_name][rows, columns] += b.double() @ a.double()
        covered[entry.module_name][rows, columns] += entry.adapter_size
    for name, (a, b) in expected.items():
        assert torch.equal(deltas[name], b.double() @ a.double()), name
        assert torch.all(covered[name] == rank), name


def test_entries_point_into_the_device_pool_without_overlap(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    cache = make_cache(torch.float32, page_bytes=512, host_pages=900, device_pages=900)
    directory = write_random_adapter(tmp_path, cache.config, rank=11, seed=1)
    request, lease = make_resident(cache, directory)
    base, size = cache.peft.core.pool_range("device")
    host_base, host_size = cache.peft.core.pool_range("host")
    assert base + size <= host_base or host_base + host_size <= base
    assert size == cache.peft.max_device_pages * 512

    parts = set()
    for entry in lease[request.request_id]:
        module = cache.config.modules[cache.config.find(entry.module_name)]
        assert (entry.layer_id, entry.module_id) == (module.layer_id, module.module_id)
        assert entry.scaling_vec_pointer is None
        slots = 0
        for page, slot, pointer, length in (
            (entry.page_id, entry.slot_idx, entry.weights_in_pointer, entry.in_size),
            (entry.out_page_id, entry.out_slot_idx, entry.weights_out_pointer, entry.out_size),
        ):
            num_bytes = length * entry.adapter_size * 4
            assert pointer == base + page * 512 + slot * SLOT_BYTES
            assert slot * SLOT_BYTES + num_bytes <= 512
            assert base <= pointer < pointer + num_bytes <= base + size
            parts.add((pointer, num_bytes))
            slots += -(-num_bytes // SLOT_BYTES)
        assert entry.num_slots == slots
    ends: dict[int, int] = defaultdict(int)
    for pointer, num_bytes in sorted(parts):
        assert pointer >= ends[0], "two parts overlap"
        ends[0] = pointer + num_bytes
    total = sum(m.in_features + m.out_features for m in cache.config.modules) * 11 * 4
    assert sum(num_bytes for _, num_bytes in parts) == total


def test_an_adapter_of_some_modules_has_entries_for_those_only(
    small_cache: Cache, tmp_path: Path
) -> None:
    directory = write_random_adapter(
        tmp_path, small_cache.config, rank=2, seed=1, targets=["v_proj", "down_proj"]
    )
    request, lease = make_resident(small_cache, directory)
    wanted = {m.name for m in select_modules(small_cache.config, ["v_proj", "down_proj"])}
    assert {entry.module_name for entry in lease[request.request_id]} == wanted
    assert set(small_cache.peft.task_weights(request.lora_task_id)) == wanted


# ---- bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_pages_hold_the_files_bits(
    make_cache: MakeCache, tmp_path: Path, dtype: torch.dtype, tier: Any
) -> None:
    cache = make_cache(dtype)
    tensors = adapter_tensors(cache.config.modules, 13, 4, dtype=dtype, integers=False)
    request, _ = make_resident(cache, write_adapter(tmp_path, tensors))
    actual = cache.peft.task_weights(request.lora_task_id, tier)
    assert_same_weights(actual, weights_of(tensors, dtype))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a 16-bit type; of float32, those where rounding decides, and random."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    high = torch.arange(0, 2**16, dtype=torch.int64) << 16
    random = torch.randint(0, 2**32, (2**17,), generator=torch.Generator().manual_seed(1))
    lows = (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    patterns = torch.cat([*(high + low for low in lows), random])
    return patterns.to(torch.int32).view(torch.float32)


def load_values(cache: Cache, directory: Path, values: torch.Tensor) -> torch.Tensor:
    """The values as they come out of the pages, after a trip through an A and a B matrix."""
    module = cache.config.modules[0]
    a = values.view(-1, module.in_features)
    b = a.T.clone(memory_format=torch.contiguous_format)
    prefix = f"base_model.model.{module.name}"
    tensors = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    request, _ = make_resident(cache, write_adapter(directory, tensors))
    stored_a, stored_b = cache.peft.task_weights(request.lora_task_id)[module.name]
    assert same_bits(stored_a, stored_b.T)
    return stored_a.reshape(-1)


def cast_cache(make_cache: MakeCache, dtype: torch.dtype, values: torch.Tensor) -> Cache:
    width = 2**14 - 24  # of no vector length
    rank = -(-values.numel() // width)
    pages = 4 * width * (rank + 8) * dtype.itemsize // 2**18 + 4
    cache = make_cache(
        dtype,
        shapes={"proj": (width, width)},
        num_layers=1,
        max_lora_rank=max(rank, 1),
        page_bytes=2**18,
        host_pages=pages,
        device_pages=pages,
    )
    return unchecked(cache)


def padded(values: torch.Tensor, width: int) -> torch.Tensor:
    missing = -values.numel() % width
    return torch.cat([values, values.new_ones(missing)])


CASTS = [(a, b) for a in FLOATS for b in FLOATS]


@pytest.mark.parametrize(("stored", "kept"), CASTS, ids=lambda d: str(d).removeprefix("torch."))
def test_casts_are_torchs_bit_for_bit(
    make_cache: MakeCache, tmp_path: Path, stored: torch.dtype, kept: torch.dtype
) -> None:
    values = every_pattern(stored)
    values = values[~values.isnan()]
    if kept == torch.float16:  # overflow has its own test
        values = values[values.isinf() | ~values.to(torch.float16).isinf()]
    assert (values.float().abs() < torch.finfo(stored).smallest_normal).sum() > 100  # subnormals
    cache = cast_cache(make_cache, kept, values)
    values = padded(values, cache.config.modules[0].in_features)
    actual = load_values(cache, tmp_path, values)
    assert same_bits(actual, values.to(kept))


@pytest.mark.parametrize(("stored", "kept"), CASTS, ids=lambda d: str(d).removeprefix("torch."))
def test_every_nan_becomes_the_canonical_one_when_cast(
    make_cache: MakeCache, tmp_path: Path, stored: torch.dtype, kept: torch.dtype
) -> None:
    values = every_pattern(stored)
    values = values[values.isnan()]
    cache = cast_cache(make_cache, kept, values)
    values = padded(values, cache.config.modules[0].in_features)
    nans = values.isnan()
    actual = load_values(cache, tmp_path, values)[nans]
    if stored == kept:  # a copy, not a cast
        assert same_bits(actual, values[nans])
        return
    bits = torch.int32 if kept == torch.float32 else torch.int16
    assert set(actual.view(bits).tolist()) == {torch.iinfo(bits).max}


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("value", [65520.0, -65520.0, 1e5, 3e38])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_finite_value_beyond_float16_is_refused(
    make_cache: MakeCache, tmp_path: Path, stored: torch.dtype, value: float, *, is_checked: bool
) -> None:
    """By whoever copies it, also where nobody checks values before."""
    cache = make_cache(torch.float16)
    cache = cache if is_checked else unchecked(cache)
    tensors = adapter_tensors(cache.config.modules, 4, 1, dtype=stored)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name][103, 3] = value
    cache.adapters.register("adapter", write_adapter(tmp_path, tensors))
    with pytest.raises(AdapterFormatError, match="float16"):
        add_and_wait(cache.peft, cache.request(1, "adapter"))
    assert cache.peft.active_tasks == {}
    assert cache.peft.resident_tasks("host") == 0
    assert cache.peft.stats.failed_loads == 1


def test_values_just_inside_float16_are_kept(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = unchecked(make_cache(torch.float16))
    tensors = adapter_tensors(cache.config.modules, 4, 1)
    for tensor in tensors.values():
        tensor.view(-1)[:4] = torch.tensor([65504.0, 65519.99, -65519.99, float("inf")])
    request, _ = make_resident(cache, write_adapter(tmp_path, tensors))
    actual = cache.peft.task_weights(request.lora_task_id)
    assert_same_weights(actual, weights_of(tensors, torch.float16))


def test_evicted_and_read_again_the_bits_are_the_same(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    cache = make_cache(torch.bfloat16)
    tensors = adapter_tensors(cache.config.modules, 16, 2, integers=False)
    request, lease = make_resident(cache, write_adapter(tmp_path, tensors))
    lease.close()
    cache.peft.mark_request_done(request)
    for tier in ("host", "device"):
        cache.peft.evict_unowned(tier)
    add_and_wait(cache.peft, request)
    cache.peft.ensure_batch([request], []).close()
    assert cache.peft.stats.source_rereads == 1
    expected = weights_of(tensors, torch.bfloat16)
    assert_same_weights(cache.peft.task_weights(request.lora_task_id), expected)
