"""What a rank has of a model (design 3.1): splits, layers, plans, TensorRT-LLM's table, errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tiny_models import build_tiny_model, tiny_config

from pagedlora import Dtype, InvalidArgumentError, LoraModelConfig
from pagedlora._core import LoraModule, ModuleKind
from pagedlora.sharding import (
    ModuleSplit,
    Parallel,
    Sharding,
    SplitPart,
    layer_ranges,
    split_features,
)

DIMS = {
    "num_layers": 7,
    "hidden_size": 64,
    "mlp_hidden_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
}


def sizes(config: LoraModelConfig) -> dict[str, tuple[int, int]]:
    """Last part of the name to in and out features, of the modules of the first layer here."""
    first = min(module.layer_id for module in config.modules)
    return {
        module.name.rsplit(".", 1)[-1]: (module.in_features, module.out_features)
        for module in config.modules
        if module.layer_id == first
    }


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "expected"),
    [(7, 2, [4, 3]), (7, 3, [3, 2, 2]), (8, 4, [2, 2, 2, 2]), (5, 1, [5]), (3, 3, [1, 1, 1])],
)
def test_layers_that_are_not_even_go_to_the_first_ranks(
    num_layers: int, pp_size: int, expected: list[int]
) -> None:
    ranges = layer_ranges(num_layers, pp_size)
    assert [len(layers) for layers in ranges] == expected
    assert [layer for layers in ranges for layer in layers] == list(range(num_layers))


@given(
    units=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4),
    tp_size=st.sampled_from([1, 2, 3, 4]),
)
def test_ranks_have_disjoint_features_that_are_all(
    units: list[tuple[int, int]], tp_size: int
) -> None:
    """Each part is cut on its own, in order, and in equal shares."""
    parts = tuple(SplitPart(count * tp_size * unit, unit) for count, unit in units)
    total = sum(part.length for part in parts)
    module = LoraModule("m", 3, total)
    seen = torch.zeros(total, dtype=torch.int64)
    shares = set()
    for rank in range(tp_size):
        first = 0
        ranges = split_features(module, ModuleSplit("output", parts), tp_size, rank)
        here = torch.zeros(total, dtype=torch.bool)
        for offset, count in ranges:
            here[offset : offset + count] = True
        for part in parts:
            share = part.length // tp_size
            mine = here[first : first + part.length].nonzero().flatten().tolist()
            assert mine == list(range(rank * share, (rank + 1) * share))
            first += part.length
        seen += here
        shares.add(sum(count for _, count in ranges))
    assert seen.eq(1).all()
    assert shares == {total // tp_size}


@pytest.mark.parametrize(
    ("kv_heads", "tp_size", "expected"),
    [(1, 4, [0, 0, 0, 0]), (2, 4, [0, 0, 1, 1]), (2, 8, [0, 0, 0, 0, 1, 1, 1, 1])],
)
def test_ranks_share_heads_of_keys_where_there_are_fewer(
    kv_heads: int, tp_size: int, expected: list[int]
) -> None:
    module = LoraModule("k_proj", 64, kv_heads * 8)
    split = ModuleSplit("output", (SplitPart(kv_heads * 8, 8, may_repeat=True),))
    got = [split_features(module, split, tp_size, rank) for rank in range(tp_size)]
    assert got == [((head * 8, 8),) for head in expected]


@pytest.mark.parametrize(
    ("module", "split", "message"),
    [
        (
            LoraModule("m", 3, 10),
            ModuleSplit("output"),
            "10 outputs are not divisible by tp_size 4",
        ),
        (LoraModule("m", 10, 3), ModuleSplit("input"), "10 inputs are not divisible by tp_size 4"),
        (
            LoraModule("q", 3, 48),
            ModuleSplit("output", (SplitPart(48, 8),)),
            "48 outputs, 6 heads of 8, are not divisible by tp_size 4",
        ),
        (
            LoraModule("k", 3, 24),
            ModuleSplit("output", (SplitPart(24, 8, may_repeat=True),)),
            "24 outputs, 3 heads of 8, are not divisible",
        ),
        (
            LoraModule("e", 30, 4, kind=ModuleKind.embedding),
            ModuleSplit("input"),
            "30 rows of the vocabulary are not divisible",
        ),
        (
            LoraModule("m", 3, 12),
            ModuleSplit("output", (SplitPart(4), SplitPart(4))),
            r"12 outputs, and its parts \[4, 4\] have 8",
        ),
        (LoraModule("m", 8, 3), ModuleSplit("input", (SplitPart(4),) * 2), "inputs are one part"),
    ],
)
def test_what_cannot_be_divided_is_an_error_on_every_rank(
    module: LoraModule, split: ModuleSplit, message: str
) -> None:
    for rank in range(4):
        with pytest.raises(InvalidArgumentError, match=message):
            Sharding([module], {module.name: split}, Parallel(4, rank))


@pytest.mark.parametrize(
    "parallel", [Parallel(0), Parallel(2, 2), Parallel(2, -1), Parallel(1, 0, 2, 2)]
)
def test_impossible_ranks_are_refused(parallel: Parallel) -> None:
    with pytest.raises(InvalidArgumentError, match="are no rank of a group"):
        Sharding([LoraModule("m", 8, 8)], {}, parallel)


def test_a_pipeline_rank_without_modules_is_an_error_on_every_rank() -> None:
    modules = [LoraModule("layers.0.q_proj", 8, 8, 0), LoraModule("layers.1.q_proj", 8, 8, 1)]
    for rank in range(3):
        with pytest.raises(InvalidArgumentError, match="pp_size 3 is more than the model's 2"):
            Sharding(modules, {}, Parallel(pp_size=3, pp_rank=rank))
    for rank in range(2):
        with pytest.raises(InvalidArgumentError, match="rank 1 of 2, layers 2 to 3"):
            Sharding(modules, {}, Parallel(pp_size=2, pp_rank=rank), num_layers=4)


@pytest.mark.parametrize("rank", range(4))
def test_the_declared_plan_of_a_transformers_model_is_used(rank: int) -> None:
    """4 heads, 2 of keys and values: over 4 ranks these are shared."""
    targets = ["all-linear", "embed_tokens", "lm_head"]
    config = LoraModelConfig.from_module(
        build_tiny_model("llama"), targets, tp_size=4, tp_rank=rank
    )
    assert sizes(config) == {
        "embed_tokens": (16, 32),
        "lm_head": (32, 16),
    }
    layer = {m.name.rsplit(".", 1)[-1]: m for m in config.modules if m.layer_id == 1}
    assert {name: (m.in_features, m.out_features) for name, m in layer.items()} == {
        "q_proj": (32, 8),
        "k_proj": (32, 8),
        "v_proj": (32, 8),
        "o_proj": (8, 32),
        "gate_proj": (32, 12),
        "up_proj": (32, 12),
        "down_proj": (12, 32),
    }
    sharding = config.sharding
    assert sharding is not None
    keys = [m.name for m in sharding.modules].index("model.layers.1.self_attn.k_proj")
    assert sharding.shards[keys].features == ((rank * 2 // 4 * 8, 8),)
    assert config.splits["model.layers.1.self_attn.o_proj"].how == "input"


def test_fused_modules_are_cut_as_the_plan_says() -> None:
    """transformers gathers Phi-3's, and cuts them as one; a plan of one's own cuts parts."""
    model = build_tiny_model("phi3")

    def features(**plan: object) -> dict[str, tuple]:
        config = LoraModelConfig.from_module(model, tp_size=2, tp_rank=1, **plan)
        shards = zip(config.sharding.modules, config.sharding.shards, strict=True)
        return {m.name.rsplit(".", 1)[-1]: s.features for m, s in shards if m.layer_id == 0}

    declared = features()
    assert declared["qkv_proj"] == ((32, 32),)
    assert declared["gate_up_proj"] == ((48, 48),)
    own = features(tp_plan={"qkv_proj": "colwise", "gate_up_proj": "colwise"})
    assert own["qkv_proj"] == ((16, 16), (40, 8), (56, 8))
    assert own["gate_up_proj"] == ((24, 24), (72, 24))
    assert own["down_proj"] == ((0, 32),)


def test_a_model_without_a_plan_needs_one() -> None:
    model = build_tiny_model("gpt2")
    with pytest.raises(InvalidArgumentError, match="declares no tensor parallel plan"):
        LoraModelConfig.from_module(model, tp_size=2)
    with pytest.raises(InvalidArgumentError, match="'sideways' for module"):
        LoraModelConfig.from_module(model, tp_size=2, tp_plan={"c_proj": "sideways"})
    assert LoraModelConfig.from_module(model, pp_size=2, pp_rank=1).sharding is not None
    config = LoraModelConfig.from_module(model, tp_size=2, tp_plan={"mlp.c_proj": "rowwise"})
    whole = LoraModelConfig.from_module(model)
    assert {m.name for m in config.modules} == {m.name for m in whole.modules}
    assert config.splits["transformer.h.0.mlp.c_proj"].how == "input"
    assert config.splits["transformer.h.0.attn.c_proj"].how == "none"


def test_from_hf_config_is_the_same_as_from_module() -> None:
    rank = {"tp_size": 2, "tp_rank": 1, "pp_size": 2, "pp_rank": 1}
    one = LoraModelConfig.from_hf_config(tiny_config("llama"), **rank)
    other = LoraModelConfig.from_module(build_tiny_model("llama"), **rank)
    assert one.modules == other.modules
    assert one.splits == other.splits


def test_a_rank_is_not_cut_again() -> None:
    config = LoraModelConfig([LoraModule("m", 8, 8)], Dtype.float32).shard({"m": "colwise"})
    with pytest.raises(InvalidArgumentError, match="that of a rank already"):
        config.shard({"m": "colwise"}, tp_size=2)


# TensorRT-LLM's table, written down again: id, name, in, out, cut inputs, cut outputs.
TABLE = [
    (0, "attn_qkv", "qkv_proj", 64, 64, 1, 2),
    (1, "attn_q", "q_proj", 64, 32, 1, 2),
    (2, "attn_k", "k_proj", 64, 16, 1, 2),
    (3, "attn_v", "v_proj", 64, 16, 1, 2),
    (4, "attn_dense", "o_proj", 32, 64, 2, 1),
    (5, "mlp_h_to_4h", "gate_proj", 64, 96, 1, 2),
    (6, "mlp_4h_to_h", "down_proj", 96, 64, 2, 1),
    (7, "mlp_gate", "up_proj", 64, 96, 1, 2),
    (8, "cross_attn_qkv", "qkv_proj", 64, 64, 1, 2),
    (9, "cross_attn_q", "q_proj", 64, 32, 1, 2),
    (10, "cross_attn_k", "k_proj", 64, 16, 1, 2),
    (11, "cross_attn_v", "v_proj", 64, 16, 1, 2),
    (12, "cross_attn_dense", "o_proj", 32, 64, 2, 1),
    (16, "moe_router", "gate", 64, 6, 1, 1),
    (17, "mlp_router", "router", 64, 1, 1, 1),
    (18, "mlp_gate_up", "gate_up_proj", 64, 192, 1, 2),
    (19, "shared_expert_h_to_4h", "gate_proj", 64, 40, 1, 2),
    (20, "shared_expert_4h_to_h", "down_proj", 40, 64, 2, 1),
    (21, "shared_expert_gate", "up_proj", 64, 40, 1, 2),
    (24, "moe_latent_fc1", "fc1_latent_proj", 64, 20, 1, 1),
    (25, "moe_latent_fc2", "fc2_latent_proj", 20, 64, 1, 1),
]
GIVEN_SIZES = ("moe_router", "shared_expert", "moe_latent", "mamba")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[1])
def test_from_dims_has_tensorrt_llms_ids_names_sizes_and_splits(row: tuple) -> None:
    number, name, last, inner, outer, cut_in, cut_out = row
    given = {name: (inner, outer)} if name.startswith(GIVEN_SIZES) else {}
    whole = LoraModelConfig.from_dims(**DIMS, modules=[name], sizes=given)
    assert [(m.module_id, m.layer_id) for m in whole.modules] == [(number, n) for n in range(7)]
    assert sizes(whole) == {last: (inner, outer)}
    rank = LoraModelConfig.from_dims(
        **DIMS, modules=[name], sizes=given, tp_size=2, tp_rank=1, pp_size=3, pp_rank=1
    )
    assert [m.layer_id for m in rank.modules] == [3, 4]
    assert sizes(rank) == {last: (inner // cut_in, outer // cut_out)}


def test_from_dims_cuts_fused_parts_and_shares_heads() -> None:
    config = LoraModelConfig.from_dims(
        **DIMS, modules=["attn_qkv", "mlp_gate_up"], tp_size=4, tp_rank=3, dtype=torch.bfloat16
    )
    assert config.dtype == Dtype.bfloat16
    assert config.sharding.shards[0].features == ((24, 8), (40, 8), (56, 8))
    assert config.sharding.shards[1].features == ((72, 24), (168, 24))


def test_from_dims_knows_mamba_whole_only() -> None:
    given = {"mamba_in_proj": (64, 100), "mamba_out_proj": (50, 64)}
    config = LoraModelConfig.from_dims(**DIMS, modules=list(given), sizes=given)
    assert [m.module_id for m in config.modules[:2]] == [22, 23]
    with pytest.raises(InvalidArgumentError, match="splits 'mamba_in_proj' is not known"):
        LoraModelConfig.from_dims(**DIMS, modules=list(given), sizes=given, tp_size=2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"modules": ["moe_gate"]}, "'moe_gate' .id 15.: adapters for experts"),
        ({"modules": ["attn_z"]}, "which TensorRT-LLM does not"),
        ({"modules": []}, "name at least one"),
        ({"modules": ["attn_q", "attn_q"]}, "each once"),
        ({"modules": ["moe_router"]}, r"give \(in, out\) in sizes"),
        ({"modules": ["attn_q"], "sizes": {"attn_q": (1, 2)}}, "leave it out of sizes"),
        ({"modules": ["attn_q"], "tp_size": 8}, "32 outputs, 4 heads of 8, are not divisible"),
        ({"modules": ["attn_q"], "num_heads": 0}, "describe no model"),
        ({"modules": ["attn_q"], "num_heads": 5, "head_size": None}, "multiple of num_heads"),
    ],
)
def test_from_dims_refuses_by_name(more: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LoraModelConfig.from_dims(**{**DIMS, **more})
