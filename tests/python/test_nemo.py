"""NeMo's adapters: the same as a PEFT directory with their A, B and scale (design 3.5)."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.adapters import PREFIX, WEIGHTS_FILE, Tensors, write_adapter
from tests.support.cache_fixtures import Cache, add_and_wait, check_pages
from tests.support.llm_fixtures import SMALL_CACHE
from tests.support.nemo import KQV, Heads, Pairs, draw_pairs, state_of, write_nemo
from tests.support.tiny_models import build_tiny_model, tiny_config

from pagedlora import (
    LLM,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterPathError,
    LlmRequest,
    LoraConfig,
    LoraManager,
    LoraModelConfig,
    PagedLoraError,
    SamplingParams,
    UnsupportedAdapterError,
    probe_adapter,
)
from pagedlora._core import LoraModule

GQA = Heads(heads=4, groups=2, size=4)
MHA = Heads(heads=4, groups=4, size=4)
MQA = Heads(heads=4, groups=1, size=4)
RANK = 3
LAYER = "model.layers.{}.self_attn"


def fused_modules(heads: Heads) -> dict[str, dict[str, int]]:
    return {"qkv_proj": dict(zip(("q_proj", "k_proj", "v_proj"), heads.parts, strict=True))}


@pytest.fixture(autouse=True)
def private_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made in these tests."""
    root = tmp_path / "private"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


Make = Callable[..., LoraManager]


@pytest.fixture
def fused(make_cache: Callable[..., Cache]) -> Make:
    """Managers over models with one module for q, k and v; the second layer has another name."""

    def make(heads: Heads = GQA, **options: Any) -> LoraManager:
        names = ("model.layers.0.self_attn.qkv_proj", "decoder.blocks.1.attention")
        total, hidden = sum(heads.parts), heads.heads * heads.size
        modules = [LoraModule(name, hidden, total, i, 0) for i, name in enumerate(names)]
        cache = make_cache(modules=modules)
        return LoraManager(cache.config, cache.peft, allow_pickle=True, **options)

    return make


@pytest.fixture
def split(make_cache: Callable[..., Cache]) -> Make:
    def make(heads: Heads = GQA, **options: Any) -> LoraManager:
        hidden = heads.heads * heads.size
        modules = [
            LoraModule(f"{LAYER.format(layer)}.{part}_proj", hidden, out, layer, 1 + i)
            for layer in range(2)
            for i, (part, out) in enumerate(zip("qkv", heads.parts, strict=True))
        ]
        cache = make_cache(modules=modules)
        options = {"fused_modules": fused_modules(heads), **options}
        return LoraManager(cache.config, cache.peft, allow_pickle=True, **options)

    return make


def as_peft(pairs: Pairs, names: Mapping[int, str]) -> Tensors:
    """The same adapter under PEFT's names, of modules with q, k and v one after another."""
    return {
        f"{PREFIX}{names[layer]}.lora_{side}.weight": tensor
        for layer, pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
    }


def weights(manager: LoraManager, task_id: int) -> Mapping[str, Any]:
    request = LlmRequest(1, lora_task_id=task_id)
    cache = manager.cache_manager
    add_and_wait(cache, request)
    found = cache.task_weights(task_id, "host")
    cache.mark_request_done(request)
    return found


@pytest.mark.parametrize("heads", [GQA, MHA, MQA], ids=["gqa", "mha", "mqa"])
def test_rows_are_put_from_groups_into_q_k_and_v(fused: Make, tmp_path: Path, heads: Heads) -> None:
    """A fused module: the same task weights and the same generation as PEFT's directory."""
    manager, pairs = fused(heads), draw_pairs(heads, [0, 1], RANK, seed=1)
    info = manager.load("a", write_nemo(tmp_path / "a.nemo", heads, pairs))
    names = dict(enumerate(info.ranks))
    theirs = write_adapter(tmp_path / "b", as_peft(pairs, names), lora_alpha=RANK)
    assert manager.load("b", theirs).generation == info.generation
    found = weights(manager, info.task_id)
    assert set(found) == {"model.layers.0.self_attn.qkv_proj", "decoder.blocks.1.attention"}
    for layer, pair in pairs.items():
        assert all(map(torch.equal, found[names[layer]], pair))
    assert set(info.scales.values()) == {1.0}
    assert (info.path, info.report.used) == (str(tmp_path / "a.nemo"), 4)


def test_a_model_with_q_k_and_v_apart_gets_its_parts(split: Make, tmp_path: Path) -> None:
    manager, pairs = split(), draw_pairs(GQA, [0, 1], RANK, seed=2)
    info = manager.load("a", write_nemo(tmp_path / "a.nemo", GQA, pairs))
    names = {layer: f"{LAYER.format(layer)}.qkv_proj" for layer in pairs}
    theirs = write_adapter(tmp_path / "b", as_peft(pairs, names), lora_alpha=RANK)
    assert manager.load("b", theirs).generation == info.generation
    found = weights(manager, info.task_id)
    for layer, (a, b) in pairs.items():
        of_layer = [found[f"{LAYER.format(layer)}.{part}_proj"] for part in "qkv"]
        assert all(torch.equal(pair[0], a) for pair in of_layer)
        assert torch.equal(torch.cat([pair[1] for pair in of_layer]), b)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_it_answers_as_the_same_adapter_in_a_directory(tmp_path: Path, family: str) -> None:
    """On a fused model (Phi-3) and on a split one; neither answers like the base model."""
    config = tiny_config(family)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, size)
    assert heads.groups < heads.heads
    pairs = draw_pairs(heads, range(config.num_hidden_layers), 4, seed=3)
    names = {layer: f"{LAYER.format(layer)}.qkv_proj" for layer in pairs}
    fields = heads.fields(adapter_dim=4, alpha=12)
    adapters = {
        "nemo": write_nemo(tmp_path / "a.nemo", heads, pairs, fields=fields),
        "peft": write_adapter(tmp_path / "b", as_peft(pairs, names), lora_alpha=12),
    }
    with LLM(
        build_tiny_model(family),
        lora_config=LoraConfig(allow_pickle=True),
        peft_cache_config=SMALL_CACHE,
    ) as llm:
        for name, path in adapters.items():
            llm.load_lora(name, path)
        prompts = [[5, 9, 2, 33, 7]] * 3
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts, greedy, ["nemo", "peft", None])
        nemo, peft, base = (list(output.outputs[0].token_ids) for output in outputs)
    assert nemo == peft != base


SCALES: list[tuple[dict[str, Any], float]] = [
    ({}, 1.0),
    ({"adapter_dim": RANK}, 1.0),
    ({"alpha": None, "adapter_dim": RANK}, 1.0),
    ({"alpha": 6, "adapter_dim": RANK}, 2.0),
    ({"alpha": 1.5}, 0.5),
]


@pytest.mark.parametrize(("lora", "scale"), SCALES)
def test_the_scale_is_alpha_over_dim_or_one_without_an_alpha(
    fused: Make, tmp_path: Path, lora: dict[str, Any], scale: float
) -> None:
    pairs = draw_pairs(GQA, [0], RANK, seed=1)
    path = write_nemo(tmp_path / "a.nemo", GQA, pairs, fields=GQA.fields(**lora))
    assert set(fused().register("a", path).scales.values()) == {scale}
    assert set(probe_adapter(path, allow_pickle=True).scales.values()) == {scale}


def test_recipes_have_the_model_in_a_section_of_its_own(fused: Make, tmp_path: Path) -> None:
    """As the files in TensorRT-LLM's tests, in JSON, which is YAML."""
    model = {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 4, "num_query_groups": 2}
    fields = {"model": model, "lora": {"rank": RANK, "target_modules": ["attn_qkv"]}}
    pairs = draw_pairs(GQA, [0, 1], RANK, seed=1)
    manager = fused()
    plain = manager.load("plain", write_nemo(tmp_path / "a.nemo", GQA, pairs))
    path = write_nemo(tmp_path / "b.nemo", GQA, pairs, fields=json.dumps(fields).encode())
    assert manager.load("recipe", path).generation == plain.generation


@pytest.mark.parametrize(
    "prefix", ["", "model.", "model.decoder.", "model.language_model.encoder."]
)
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dot", ["", "./"])
def test_all_ways_to_pack_it_are_one_adapter(
    fused: Make, tmp_path: Path, prefix: str, zipped: bool, dot: str
) -> None:
    manager, pairs = fused(), draw_pairs(GQA, [0, 1], RANK, seed=1)
    plain = manager.load("plain", write_nemo(tmp_path / "a.nemo", GQA, pairs))
    state = state_of(GQA, pairs, prefix)
    state[f"{prefix}layers.0.{KQV}.linear_in._extra_state"] = None
    path = write_nemo(tmp_path / "b.nemo", GQA, pairs, state=state, zipped=zipped, prefix=dot)
    assert manager.load("other", path).generation == plain.generation


def test_it_is_read_again_without_its_file_which_is_forgotten_with_the_name(
    fused: Make, tmp_path: Path, private_root: Path
) -> None:
    manager, pairs = fused(), draw_pairs(GQA, [0, 1], RANK, seed=1)
    info = manager.load("a", write_nemo(tmp_path / "a.nemo", GQA, pairs))
    (tmp_path / "a.nemo").unlink()
    manager.cache_manager.evict_unowned("host")
    found = weights(manager, info.task_id)
    assert torch.equal(found["decoder.blocks.1.attention"][1], pairs[1][1])
    assert manager.cache_manager.stats.source_rereads == 1
    assert len(list(private_root.iterdir())) == 1
    manager.unload("a")
    gc.collect()
    assert list(private_root.iterdir()) == []


def test_what_a_path_is_can_be_said_where_its_name_does_not(fused: Make, tmp_path: Path) -> None:
    manager, pairs = fused(), draw_pairs(GQA, [0], RANK, seed=1)
    path = write_nemo(tmp_path / "a.nemo", GQA, pairs)
    archive = shutil.copy(path, tmp_path / "archive.tar")
    assert manager.load_from_nemo("a", archive, pinned=True).pinned
    manager.unpin("a")
    with pytest.raises(AdapterNotFoundError):
        manager.load("b", archive)
    with pytest.raises(AdapterNotFoundError):
        manager.load_from_hf("b", path)
    tensors = as_peft(pairs, {0: "model.layers.0.self_attn.qkv_proj"})
    directory = write_adapter(tmp_path / "directory.nemo", tensors, lora_alpha=RANK)
    assert manager.load("b", directory).generation == manager.get("a").generation
    assert [info.name for info in manager.list()] == ["a", "b"]


# ---- refusals ----------------------------------------------------------------------------------


def refuse(
    manager: LoraManager, path: Path, error: type[PagedLoraError], words: str
) -> PagedLoraError:
    """Loads, expects a typed error, and that nothing is left."""
    with pytest.raises(error, match=words) as caught:
        manager.load("a", path)
    assert len(manager) == 0
    check_pages(manager.cache_manager)
    assert len(str(caught.value)) < 1000
    raised = caught.value.with_traceback(None)
    raised.__context__ = None
    del caught
    gc.collect()
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    return raised


def test_its_pickle_needs_to_be_allowed(fused: Make, tmp_path: Path) -> None:
    trusting = fused()
    manager = LoraManager(trusting._parts.table.config, trusting.cache_manager)
    path = write_nemo(tmp_path / "a.nemo", GQA, draw_pairs(GQA, [0], RANK, seed=1))
    error = refuse(manager, path, UnsupportedAdapterError, "a pickle: .*allow_pickle=True")
    assert getattr(error, "field", "") == "model_weights.ckpt"
    with pytest.raises(UnsupportedAdapterError):
        probe_adapter(path)


Field = tuple[dict[str, Any], type[PagedLoraError], str]
FIELDS: list[Field] = [
    ({"num_attention_heads": None}, UnsupportedAdapterError, "no num_attention_heads.*Way out"),
    ({"hidden_size": None}, UnsupportedAdapterError, "no hidden_size"),
    ({"num_attention_heads": "4"}, AdapterFormatError, "num_attention_heads '4': a number"),
    ({"num_attention_heads": 2**40}, AdapterFormatError, "num_attention_heads 1099511627776"),
    ({"num_query_groups": True}, AdapterFormatError, "num_query_groups True"),
    ({"num_query_groups": 0}, AdapterFormatError, "num_query_groups 0"),
    ({"num_query_groups": 3}, AdapterFormatError, "4 heads in 3 groups"),
    ({"hidden_size": 18}, AdapterFormatError, "hidden_size 18, which 4 heads"),
    (
        {"kv_channels": 8},
        AdapterFormatError,
        r"shape \[32, 3\]: 4 heads .*8 features need \[64, 3\]",
    ),
    ({"num_query_groups": 4}, AdapterFormatError, r"4 query groups .*need \[48, 3\]"),
    ({"megatron_legacy": True}, UnsupportedAdapterError, "megatron_legacy=True"),
    ({"rotary_interleaved": True}, UnsupportedAdapterError, "rotary_interleaved=True"),
]


@pytest.mark.parametrize(("changed", "error", "words"), FIELDS)
def test_configurations_that_leave_the_rows_unknown_are_refused(
    fused: Make, tmp_path: Path, changed: dict[str, Any], error: type[PagedLoraError], words: str
) -> None:
    pairs = draw_pairs(GQA, [0], RANK, seed=1)
    fields = {**GQA.fields(), **changed}
    path = write_nemo(tmp_path / "a.nemo", GQA, pairs, fields=fields)
    refuse(fused(), path, error, words)


def test_without_groups_each_head_is_one(fused: Make, tmp_path: Path) -> None:
    """As NeMo, which has num_query_groups null then."""
    pairs = draw_pairs(MHA, [0], RANK, seed=1)
    fields = {**MHA.fields(), "num_query_groups": None}
    path = write_nemo(tmp_path / "a.nemo", MHA, pairs, fields=fields)
    manager = fused(MHA)
    info = manager.load("a", path)
    assert torch.equal(weights(manager, info.task_id)[next(iter(info.ranks))][1], pairs[0][1])


@pytest.mark.parametrize(
    ("lora", "error", "words"),
    [
        ({"weight_tying": True}, UnsupportedAdapterError, "weight_tying=True"),
        ({"alpha": "x"}, AdapterFormatError, "alpha 'x'"),
        ({"alpha": 0}, AdapterFormatError, "alpha 0"),
        ({"alpha": True}, AdapterFormatError, "alpha True"),
        ({"alpha": float("inf")}, AdapterFormatError, "alpha inf"),
        ({"alpha": float("nan")}, AdapterFormatError, "alpha nan"),
        ({"adapter_dim": 4}, AdapterFormatError, "has rank 3, the configuration 4"),
        ({"adapter_dim": -1}, AdapterFormatError, "adapter_dim -1"),
    ],
)
def test_settings_of_the_adapter_that_cannot_be_are_refused(
    fused: Make, tmp_path: Path, lora: dict[str, Any], error: type[PagedLoraError], words: str
) -> None:
    pairs = draw_pairs(GQA, [0], RANK, seed=1)
    path = write_nemo(tmp_path / "a.nemo", GQA, pairs, fields=GQA.fields(**lora))
    refuse(fused(), path, error, words)


IN, OUT = f"model.layers.0.{KQV}.linear_in.weight", f"model.layers.0.{KQV}.linear_out.weight"
State = dict[str, Any]
STATES: list[tuple[Callable[[State], Any], type[PagedLoraError], str]] = [
    (lambda s: {}, AdapterFormatError, "has no tensors"),
    (list, AdapterFormatError, "list instead of tensors by name"),
    (lambda s: {**s, 7: s[IN]}, UnsupportedAdapterError, "tensor '7'.*cannot be used"),
    (
        lambda s: {**s, "model.layers.0.mlp.adapter_layer.lora_hto4h_adapter.linear_in.weight": 1},
        UnsupportedAdapterError,
        "lora_hto4h_adapter.*cannot be used",
    ),
    (
        lambda s: {**s, OUT.replace("_kqv", "_unfused_kqv"): s[OUT]},
        UnsupportedAdapterError,
        "lora_unfused_kqv_adapter.*cannot be used",
    ),
    (lambda s: {**s, IN + "_extra": s[IN]}, UnsupportedAdapterError, "weight_extra'"),
    (lambda s: {**s, IN.replace("weight", "bias"): s[IN]}, UnsupportedAdapterError, "bias'"),
    (lambda s: {**s, f"decoder.{IN}": s[IN]}, AdapterFormatError, "second one for layer 0"),
    (lambda s: {IN: s[IN]}, AdapterFormatError, "linear_out.weight'.*is missing"),
    (lambda s: {OUT: s[OUT]}, AdapterFormatError, "linear_in.weight'.*is missing"),
    (lambda s: {**s, IN: 7}, AdapterFormatError, "linear_in.weight'.*is a int"),
    (lambda s: {**s, IN: s[IN][0]}, AdapterFormatError, r"shape \[16\]: a matrix"),
    (lambda s: {**s, OUT: s[OUT].t()}, AdapterFormatError, r"shape \[3, 32\].*need \[32, 3\]"),
    (lambda s: {**s, OUT: s[OUT][:, :2]}, AdapterFormatError, r"shape \[32, 2\]"),
    (lambda s: {**s, IN: s[IN].double()}, AdapterFormatError, "dtype F64"),
    (lambda s: {**s, IN: s[IN] / 0}, AdapterFormatError, "infinite|not finite|NaN|inf"),
    (lambda s: {**s, IN: s[IN][:, :15]}, AdapterFormatError, r"shape \[3, 15\]; the model needs"),
    (
        lambda s: {n.replace("layers.0", "layers.9"): t for n, t in s.items()},
        AdapterFormatError,
        r"of layer 9, and the model has no LoRA target modules .*\(attn_qkv\)",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), STATES)
def test_weights_that_do_not_fit_are_refused_by_name(
    fused: Make,
    tmp_path: Path,
    change: Callable[[State], Any],
    error: type[PagedLoraError],
    words: str,
) -> None:
    pairs = draw_pairs(GQA, [0], RANK, seed=1)
    state = change(state_of(GQA, pairs))
    refuse(fused(), write_nemo(tmp_path / "a.nemo", GQA, pairs, state=state), error, words)


def test_another_number_of_groups_than_the_models_is_refused(
    fused: Make, split: Make, tmp_path: Path
) -> None:
    """Three heads of two groups and six of one: as many outputs, in other places."""
    mine, theirs = Heads(heads=4, groups=2, size=4), Heads(heads=6, groups=1, size=4)
    assert sum(mine.parts) == sum(theirs.parts)
    pairs = {0: (torch.ones(RANK, 16), torch.ones(32, RANK))}
    fields = {**theirs.fields(), "kv_channels": 4}
    path = write_nemo(tmp_path / "a.nemo", theirs, pairs, fields=fields)
    words = r"of \(24, 4, 4\) outputs, and '.*qkv_proj' of the model has \(16, 8, 8\)"
    for manager in (fused(mine, fused_modules=fused_modules(mine)), split(mine)):
        refuse(manager, path, AdapterFormatError, words)
        good = write_nemo(tmp_path / "good.nemo", mine, pairs)
        manager.register("good", good)  # of an equal header: what was parsed of it is not taken
        with pytest.raises(AdapterFormatError, match=words):
            manager.register("a", path)
        manager.unload("good")


def test_a_directory_that_looks_like_an_archive_is_parsed_as_a_directory(
    fused: Make, tmp_path: Path
) -> None:
    """Of equal settings and an equal header, whichever was parsed first."""
    pairs = draw_pairs(GQA, [0], RANK, seed=1)
    archive = write_nemo(tmp_path / "a.nemo", GQA, pairs, fields=GQA.fields(alpha=6))
    tensors = as_peft(pairs, {0: "layers.0.attn_qkv"})
    plain = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    directory = write_adapter(tmp_path / "a", plain, lora_alpha=6)
    save_file(plain, directory / WEIGHTS_FILE, {"q, k, v": str(GQA.parts)})
    manager = fused()
    manager.load("archive", archive)
    with pytest.raises(AdapterFormatError, match="which the model does not have"):
        manager.load("directory", directory)
    manager.unload("archive")


def test_a_model_with_q_k_and_v_apart_needs_to_know_them_fused(split: Make, tmp_path: Path) -> None:
    path = write_nemo(tmp_path / "a.nemo", GQA, draw_pairs(GQA, [0], RANK, seed=1))
    refuse(split(fused_modules=None), path, AdapterFormatError, r"1 of id 1 \(attn_q\)")


def test_it_must_lie_in_the_root_and_be_a_file(fused: Make, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    outside = write_nemo(tmp_path / "a.nemo", GQA, draw_pairs(GQA, [0], RANK, seed=1))
    manager = fused(adapter_root=tmp_path / "root")
    (tmp_path / "root" / "link.nemo").symlink_to(outside)
    refuse(manager, Path("link.nemo"), AdapterPathError, "adapter_root|root")
    refuse(manager, outside, AdapterPathError, "adapter_root|root")
    refuse(manager, Path("missing.nemo"), AdapterNotFoundError, "missing.nemo")
    shutil.copy(outside, tmp_path / "root" / "in.nemo")
    assert manager.load("a", "in.nemo").path == str(tmp_path / "root" / "in.nemo")
    assert manager.load("a").tiers == ("host",)


def test_models_from_hugging_face_have_the_ids(make_cache: Callable[..., Cache]) -> None:
    """So that layers are found: Phi-3's fused module, and Llama's q."""
    for family, last, number in (("phi3", "qkv_proj", 0), ("llama", "q_proj", 1)):
        config = LoraModelConfig.from_module(build_tiny_model(family))
        ids = {module.module_id for module in config.modules if module.name.endswith(last)}
        assert ids == {number}
