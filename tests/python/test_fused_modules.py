"""Name maps between fused and split modules: what fits, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import PREFIX, Tensors, write_adapter
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import LlmRequest, LoraManager
from pagedlora._core import LoraModule
from pagedlora.errors import AdapterFormatError, InvalidArgumentError

OUTS = {"q": 8, "k": 4, "v": 4}
FUSED = {"qkv": OUTS}
LAYER = "model.layers.0.attn"


@pytest.fixture
def fused(make_cache: Callable[..., Cache]) -> LoraManager:
    cache = make_cache(modules=[LoraModule(f"{LAYER}.qkv", 8, 16, 0)])
    return LoraManager(cache.config, cache.peft, fused_modules=FUSED)


@pytest.fixture
def split(make_cache: Callable[..., Cache]) -> LoraManager:
    modules = [LoraModule(f"{LAYER}.{part}", 8, out, 0) for part, out in OUTS.items()]
    cache = make_cache(modules=modules)
    return LoraManager(cache.config, cache.peft, fused_modules=FUSED)


def tensors(**ranks_and_outs: tuple[int, int]) -> Tensors:
    made: Tensors = {}
    for name, (rank, out) in ranks_and_outs.items():
        made[f"{PREFIX}{LAYER}.{name}.lora_A.weight"] = torch.randn(rank, 8)
        made[f"{PREFIX}{LAYER}.{name}.lora_B.weight"] = torch.randn(out, rank)
    return made


def write(path: Path, content: Tensors) -> Path:
    ranks = {
        name.split(".")[-3]: tensor.shape[0] for name, tensor in content.items() if "lora_A" in name
    }
    return write_adapter(path, content, r=1, rank_pattern=ranks, target_modules=list(ranks))


def test_parts_have_labels_ranks_and_digests_of_their_own(
    fused: LoraManager, tmp_path: Path
) -> None:
    info = fused.load("a", write(tmp_path / "a", tensors(q=(3, 8), v=(5, 4))))
    assert info.ranks == {f"{LAYER}.qkv[0:8]": 3, f"{LAYER}.qkv[12:16]": 5}
    assert set(info.scales) == set(info.ranks)
    assert info.report.renamed == (("part of qkv", 2),)
    # the same numbers for another part are another adapter
    torch.manual_seed(1)
    one = fused.load("k", write(tmp_path / "k", tensors(k=(2, 4))))
    torch.manual_seed(1)
    other = fused.load("v", write(tmp_path / "v", tensors(v=(2, 4))))
    assert one.generation != other.generation


def test_a_fused_module_is_cut_into_parts(split: LoraManager, tmp_path: Path) -> None:
    content = tensors(qkv=(3, 16))
    info = split.load("a", write(tmp_path, content))
    assert info.ranks == {f"{LAYER}.{part}": 3 for part in OUTS}
    assert info.report.renamed == (("cut into q, k, v", 1),)
    request = LlmRequest(1, lora_task_id=info.task_id)
    cache = split._cache
    add_and_wait(cache, request)
    weights = cache.task_weights(info.task_id, "host")
    cache.mark_request_done(request)
    a = content[f"{PREFIX}{LAYER}.qkv.lora_A.weight"]
    assert all(torch.equal(weights[f"{LAYER}.{part}"][0], a) for part in OUTS)
    b = torch.cat([weights[f"{LAYER}.{part}"][1] for part in OUTS])
    assert torch.equal(b, content[f"{PREFIX}{LAYER}.qkv.lora_B.weight"])


def test_wrappers_and_maps_go_together(fused: LoraManager, tmp_path: Path) -> None:
    content = {f"module.{name}": tensor for name, tensor in tensors(q=(2, 8)).items()}
    assert fused.register("a", write(tmp_path, content)).ranks == {f"{LAYER}.qkv[0:8]": 2}


BROKEN: dict[str, tuple[str, Tensors, str]] = {
    "part too large": ("fused", tensors(q=(2, 9)), r"shape \[9, 2\]; the model needs \[8, 2\]"),
    "part and whole": (
        "fused",
        tensors(q=(2, 8), qkv=(2, 16)),
        "is for a part of module '.*qkv', for all of which there is one",
    ),
    "no part": ("fused", tensors(o=(2, 8)), "which the model does not have"),
    "cut of another size": (
        "split",
        tensors(qkv=(2, 15)),
        r"shape \[15, 2\]; the model needs \[16, 2\]",
    ),
    "part twice": ("split", tensors(q=(2, 8), qkv=(2, 16)), "is a second one for module '.*q'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_named(
    name: str, fused: LoraManager, split: LoraManager, tmp_path: Path
) -> None:
    model, content, message = BROKEN[name]
    manager = fused if model == "fused" else split
    with pytest.raises(AdapterFormatError, match=message):
        manager.register("a", write(tmp_path, content))
    assert not manager.list()


def test_a_fused_adapter_needs_all_parts_to_be_targets(
    make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    cache = make_cache(modules=[LoraModule(f"{LAYER}.q", 8, 8, 0)])
    manager = LoraManager(cache.config, cache.peft, fused_modules=FUSED)
    with pytest.raises(AdapterFormatError, match="k, v of its parts are not among"):
        manager.register("a", write(tmp_path, tensors(qkv=(2, 16))))


def test_a_map_that_does_not_add_up_is_refused_where_it_is_used(
    make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    cache = make_cache(modules=[LoraModule(f"{LAYER}.qkv", 8, 24, 0)])
    manager = LoraManager(cache.config, cache.peft, fused_modules=FUSED)
    with pytest.raises(AdapterFormatError, match="has 24 outputs, and not the 16 of its parts"):
        manager.register("a", write(tmp_path, tensors(q=(2, 8))))


def test_without_a_map_names_must_be_the_models(fused: LoraManager, tmp_path: Path) -> None:
    plain = LoraManager(fused._parts.table.config, fused._cache)
    with pytest.raises(AdapterFormatError, match="which the model does not have"):
        plain.register("a", write(tmp_path, tensors(q=(2, 8))))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"qkv": {"q": 8}}, "two parts or more"),
        ({"qkv": {"q": 8, "k": 0}}, "two parts or more"),
        ({"qkv": {"q": 8, "k": "8"}}, "two parts or more"),
        ({"qkv": 8}, "two parts or more"),
        (8, "must be a dictionary"),
        ({"qkv": {"q": 8, "k": 8}, "qk": {"q": 8, "k": 8}}, "part 'q' in 'qkv' and in 'qk'"),
    ],
)
def test_impossible_maps_are_refused(wrong: Any, message: str, small_cache: Cache) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LoraManager(small_cache.config, small_cache.peft, fused_modules=wrong)
