"""Adapters kept on a device and listed by pointer, as TensorRT-LLM lists them without a cache."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    PREFIX,
    Tensors,
    adapter_config,
    adapter_tensors,
    read_matrix,
    same_bits,
    write_adapter,
)
from tests.support.nemo import Heads, draw_pairs, write_nemo

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterPathError,
    InvalidArgumentError,
    LoraModelConfig,
    PagedLoraWarning,
    PeftTensors,
    RetainedAdapters,
    UnsupportedAdapterError,
    _core,
)
from pagedlora._core import Dtype, LoraModule, ModuleKind
from pagedlora.engine.dtypes import to_core_dtype

HEADS = Heads(heads=4, groups=2, size=8)
NAMES = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_4h_to_h": "mlp.down_proj",
}
LAYERS, RANK = 2, 3


def model(dtype: torch.dtype = torch.float32, **parallel: int) -> LoraModelConfig:
    return LoraModelConfig.from_dims(
        LAYERS,
        hidden_size=32,
        mlp_hidden_size=48,
        num_heads=HEADS.heads,
        num_kv_heads=HEADS.groups,
        head_size=HEADS.size,
        modules=list(NAMES),
        dtype=dtype,
        max_lora_rank=8,
        **parallel,
    )


def tensors_of(seed: int = 1, **more: Any) -> Tensors:
    return adapter_tensors(list(model().modules), RANK, seed, integers=False, **more)


def named(layer: int, module: str, side: str) -> str:
    return f"{PREFIX}model.layers.{layer}.{NAMES[module]}.lora_{side}.weight"


def expected(tensors: Tensors, layer: int, module: str, scale: float, dtype: torch.dtype) -> Any:
    """A as it is cast, and B times the scale, rounded once."""
    b = tensors[named(layer, module, "B")].float()
    return tensors[named(layer, module, "A")].to(dtype), (b * scale).to(dtype)


def listed(
    buffers: dict[str, torch.Tensor], layer: int, module: str, position: int
) -> tuple[int, list[int]]:
    ranks = buffers[f"{module}_lora_ranks_{layer}"]
    pointers = buffers[f"{module}_lora_weights_pointers_{layer}"]
    assert (ranks.dtype, pointers.dtype) == (torch.int32, torch.int64)
    assert pointers.shape == (len(ranks), 3)
    return int(ranks[position]), pointers[position].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ranks_and_pointers_lead_to_the_matrices_with_the_scale_in_b(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """By sequence, zeros where one has no LoRA (scenario 10 of the reference)."""
    adapters, config = RetainedAdapters(model(dtype)), model(dtype)
    tensors = {"a": tensors_of(1), "b": tensors_of(2)}
    del tensors["b"][named(1, "attn_dense", "A")], tensors["b"][named(1, "attn_dense", "B")]
    for name, alpha in (("a", 5), ("b", 6)):
        adapters.load(name, write_adapter(tmp_path / name, tensors[name], lora_alpha=alpha))
    sequences = ["b", None, "a", "a"]
    buffers = adapters.input_buffers(sequences)
    assert len(buffers) == 2 * len(config.modules)
    for position, name in enumerate(sequences):
        for layer in range(LAYERS):
            for module in NAMES:
                rank, (a_at, b_at, magnitude) = listed(buffers, layer, module, position)
                assert magnitude == 0
                if name is None or (name, layer, module) == ("b", 1, "attn_dense"):
                    assert (rank, a_at, b_at) == (0, 0, 0)
                    continue
                scale = (5 if name == "a" else 6) / RANK
                a, b = expected(tensors[name], layer, module, scale, dtype)
                assert rank == RANK
                assert same_bits(read_matrix(a_at, tuple(a.shape), dtype), a)
                assert same_bits(read_matrix(b_at, tuple(b.shape), dtype), b)


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("pp_rank", [0, 1])
def test_a_rank_has_its_part(tp_rank: int, pp_rank: int) -> None:
    """Of q|k|v a part of each, of inputs some columns, and its own layers."""
    tensors = tensors_of()
    config = model(tp_size=2, tp_rank=tp_rank, pp_size=2, pp_rank=pp_rank)
    adapters = RetainedAdapters(config)
    adapters.load("a", PeftTensors(adapter_config(tensors, lora_alpha=RANK), tensors))
    assert {row.layer for row in adapters.rows("a")} == {pp_rank}
    rows = {row.module: row for row in adapters.rows("a")}
    for module, row in rows.items():
        a, b = expected(tensors, pp_rank, module, 1.0, torch.float32)
        if module == "attn_qkv":
            parts = [part.chunk(2)[tp_rank] for part in b.split(HEADS.parts)]
            b = torch.cat(parts)
        else:
            a = a.chunk(2, dim=1)[tp_rank]
        assert torch.equal(row.a, a)
        assert torch.equal(row.b, b)
        assert row.a.is_contiguous()
    assert set(rows) == set(NAMES)


def test_all_ways_in_are_the_same_adapter(tmp_path: Path) -> None:
    """One parser: a directory, tensors, and a NeMo archive, of attn_qkv alone."""
    pairs = draw_pairs(HEADS, range(LAYERS), RANK, seed=3)
    tensors = {
        named(layer, "attn_qkv", side): tensor
        for layer, pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    config = adapter_config(tensors, lora_alpha=RANK)
    adapters = RetainedAdapters(model(), allow_pickle=True)
    adapters.load("directory", write_adapter(tmp_path / "a", tensors, **config))
    adapters.load("tensors", PeftTensors(config, tensors))
    adapters.load("archive", write_nemo(tmp_path / "a.nemo", HEADS, pairs))
    assert adapters.names == ("directory", "tensors", "archive")
    first, *others = (adapters.rows(name) for name in adapters.names)
    assert [(row.layer, row.rank) for row in first] == [(0, RANK), (1, RANK)]
    for rows in others:
        for mine, theirs in zip(first, rows, strict=True):
            assert torch.equal(mine.a, theirs.a)
            assert torch.equal(mine.b, theirs.b)


def test_tensors_stay_where_they_are_until_they_are_unloaded(tmp_path: Path) -> None:
    """The rule of the reference: without a cache they are kept."""
    adapters = RetainedAdapters(model())
    path = write_adapter(tmp_path / "a", tensors_of())
    adapters.load("a", path)
    before = adapters.input_buffers(["a"])
    kept = weakref.ref(adapters.rows("a")[0].a)
    adapters.load("a", path)
    for number in range(5):
        adapters.load(f"other {number}", write_adapter(tmp_path / f"{number}", tensors_of(number)))
    after = adapters.input_buffers(["a"])
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert kept() is not None
    adapters.unload("a")
    gc.collect()
    assert kept() is None
    for use in (adapters.unload, adapters.rows, lambda name: adapters.input_buffers([name])):
        with pytest.raises(AdapterNotFoundError, match="'a'"):
            use("a")


def test_a_name_stands_for_one_source(tmp_path: Path) -> None:
    adapters = RetainedAdapters(model())
    adapters.load("a", write_adapter(tmp_path / "a", tensors_of()))
    with pytest.raises(InvalidArgumentError, match="unload it"):
        adapters.load("a", write_adapter(tmp_path / "b", tensors_of()))
    with pytest.raises(AdapterNotFoundError):
        adapters.load("b", "no\0path")
    with pytest.raises(AdapterPathError):
        RetainedAdapters(model(), adapter_root=tmp_path / "a").load("a", tmp_path / "b")
    assert adapters.names == ("a",)


def test_no_sequences_are_empty_lists() -> None:
    buffers = RetainedAdapters(model()).input_buffers([])
    assert {tuple(each.shape) for each in buffers.values()} == {(0,), (0, 3)}


# ---- refusals ----------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj"


def refuse(
    modules: list[_core.LoraModule],
    tensors: Tensors,
    words: str,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> None:
    adapters = RetainedAdapters(
        LoraModelConfig(modules, to_core_dtype(dtype), 8),
        fused_modules={"qkv_proj": {"q_proj": 4, "k_proj": 2, "v_proj": 2}},
    )
    error = AdapterFormatError if dtype == torch.float16 else UnsupportedAdapterError
    with pytest.raises(error, match=words):
        adapters.load("a", PeftTensors(adapter_config(tensors, **fields), tensors))
    assert adapters.names == ()


def pair(name: str = Q, out: int = 4, b: float = 1.0) -> Tensors:
    return {
        f"{name}.lora_A.weight": torch.ones(2, 4),
        f"{name}.lora_B.weight": torch.full((out, 2), b),
    }


def test_what_lists_of_pointers_cannot_say_is_refused_by_name() -> None:
    q = LoraModule(Q, 4, 4, 0, 1)
    dora = {**pair(), f"{Q}.lora_magnitude_vector": torch.ones(4)}
    refuse([q], dora, "magnitude_vector' is for DoRA.*LoraManager", use_dora=True)
    bias = {**pair(), f"{Q}.lora_B.bias": torch.ones(4)}
    refuse([q], bias, r"lora_B.bias' is for a bias of B", lora_bias=True)
    embedding = LoraModule("model.embed_tokens", 9, 4, kind=ModuleKind.embedding)
    embed = "model.embed_tokens.lora_embedding"
    matrices = {f"{embed}_A": torch.ones(2, 9), f"{embed}_B": torch.ones(4, 2)}
    refuse([embedding], matrices, "for an embedding", r=2, target_modules=["embed_tokens"])
    fused = LoraModule("model.layers.0.self_attn.qkv_proj", 4, 8, 0, 0)
    refuse([fused], pair(), "part of the fused module 'model.layers.0.self_attn.qkv_proj'")
    refuse([LoraModule(Q, 4, 4, 0)], pair(), "no TensorRT-LLM id of its own")
    refuse([q, LoraModule(f"x.{Q}", 4, 4, 0, 1)], pair(), "no TensorRT-LLM id of its own")


def test_what_is_ignored_is_warned_of(tmp_path: Path) -> None:
    """With strict=False, as by LoraManager."""
    path = write_adapter(tmp_path / "a", tensors_of(), some_new_field=3)
    adapters = RetainedAdapters(model(), strict=False)
    with pytest.warns(PagedLoraWarning, match="ignored some_new_field=3"):
        adapters.load("a", path)
    assert adapters.names == ("a",)


@pytest.mark.parametrize("name", [None, 3, "", "x" * 257, ["a"]])
def test_impossible_names_are_refused(tmp_path: Path, name: Any) -> None:
    """None would be the base model in a list of names."""
    adapters = RetainedAdapters(model())
    with pytest.raises(InvalidArgumentError, match="an adapter's name must be"):
        adapters.load(name, write_adapter(tmp_path / "a", tensors_of()))
    assert adapters.names == ()


def test_a_list_of_names_is_needed(tmp_path: Path) -> None:
    adapters = RetainedAdapters(model())
    adapters.load("a", write_adapter(tmp_path / "a", tensors_of()))
    with pytest.raises(InvalidArgumentError, match="must be a list"):
        adapters.input_buffers("a")


@pytest.mark.parametrize("device", ["nonsense", "meta", 1.5])
def test_devices_that_cannot_keep_tensors_are_refused_at_once(device: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="device"):
        RetainedAdapters(model(), device)


def test_values_that_the_scale_puts_over_the_range_are_refused() -> None:
    q = LoraModule(Q, 4, 4, 0, 1)
    large = pair(b=6e4)
    refuse([q], large, "after it is multiplied by the scale 8", torch.float16, lora_alpha=16)
    refuse([q], pair(b=float("nan")), "NaN or infinite", torch.float16)
    refuse([q], pair(b=1e5), "over the range", torch.float16, lora_alpha=2)
    adapters = RetainedAdapters(LoraModelConfig([q], Dtype.float16, 8))
    adapters.load("a", PeftTensors(adapter_config(large, lora_alpha=2), large))
    assert adapters.rows("a")[0].b.dtype == torch.float16
