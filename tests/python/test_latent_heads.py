"""Tensor parallel cuts of multi-head latent attention go between heads, never through them."""

from __future__ import annotations

import pytest
from tests.support.tiny_models import build_tiny_model

from pagedlora import InvalidArgumentError, LoraModelConfig

# Of the tiny model: 4 heads; a query has 8 + 8 features, keys and values of kv_b_proj 8 + 12.
PLAN = {"q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
HEADS = {"q_b_proj": 16, "kv_b_proj": 20, "o_proj": 12}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_whole_heads(rank: int) -> None:
    model = build_tiny_model("deepseek_v3")
    config = LoraModelConfig.from_module(model, tp_size=2, tp_rank=rank, tp_plan=PLAN)
    sharding = config.sharding
    assert sharding is not None
    for module, shard in zip(sharding.modules, sharding.shards, strict=True):
        last = module.name.rsplit(".", 1)[-1]
        if last in PLAN:
            head = HEADS[last]
            assert shard is not None
            assert shard.features == ((rank * 2 * head, 2 * head),)
            (part,) = config.splits[module.name].parts
            assert (part.unit, part.length) == (head, 4 * head)


@pytest.mark.parametrize(("name", "style"), PLAN.items())
def test_a_cut_through_heads_is_refused(name: str, style: str) -> None:
    """What `head_dim` says there, 8, would let 8 ranks have half a head each."""
    model = build_tiny_model("deepseek_v3")
    with pytest.raises(InvalidArgumentError, match=rf"4 heads of {HEADS[name]},.* tp_size 8"):
        LoraModelConfig.from_module(model, tp_size=8, tp_plan={name: style})


def test_without_a_query_rank_the_projection_of_queries_has_the_same_heads() -> None:
    model = build_tiny_model("deepseek_v3", q_lora_rank=None)
    with pytest.raises(InvalidArgumentError, match="4 heads of 16"):
        LoraModelConfig.from_module(model, tp_size=8, tp_plan={"q_proj": "colwise"})
