"""Names of tensors as different savers write them, and what stands in the report (design 3.5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.adapters import (
    PREFIX,
    Tensors,
    adapter_config,
    adapter_tensors,
    assert_same_weights,
    layered_modules,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import AdapterFormatError, AdapterWeights, UnsupportedAdapterError
from pagedlora.loaders.tensor_names import (
    AmbiguousNameError,
    NameMatcher,
    TensorKind,
    split_name,
)

MODULE = "model.layers.0.self_attn.q_proj"
KINDS = [
    (f"{MODULE}.lora_A.weight", TensorKind.A, ""),
    (f"{MODULE}.lora_B.default.weight", TensorKind.B, "default"),
    (f"{MODULE}.lora_A.weight.weight", TensorKind.A, "weight"),
    (f"{MODULE}.lora_B.bias", TensorKind.BIAS, ""),
    (f"{MODULE}.lora_B.x.bias", TensorKind.BIAS, "x"),
    (f"{MODULE}.lora_magnitude_vector", TensorKind.MAGNITUDE, ""),
    (f"{MODULE}.lora_magnitude_vector.weight", TensorKind.MAGNITUDE, ""),
    (f"{MODULE}.lora_magnitude_vector.x.weight", TensorKind.MAGNITUDE, "x"),
    (f"{MODULE}.lora_embedding_A", TensorKind.EMBEDDING_A, ""),
    (f"{MODULE}.lora_embedding_B.x", TensorKind.EMBEDDING_B, "x"),
    (f"{MODULE}.bias", TensorKind.MODULE_BIAS, ""),
    (f"{MODULE}.base_layer.bias", TensorKind.MODULE_BIAS, ""),
    (f"{MODULE}.weight", TensorKind.WHOLE, ""),
    (f"{MODULE}.base_layer.weight", TensorKind.BASE_COPY, ""),
    (f"{MODULE}.modules_to_save.weight", TensorKind.WHOLE, ""),
    (f"{MODULE}.modules_to_save.default.weight", TensorKind.WHOLE, "default"),
]


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", PREFIX])
def test_names_of_very_many_wrappers_are_not_taken_apart(wrapper: str) -> None:
    """Which takes minutes for the longest that a file can have."""
    suffix = "q_proj.lora_A.weight"
    count = (1000 - len(suffix)) // len(wrapper)
    assert split_name(wrapper * count + suffix).module == "q_proj"
    for longer in (count + 1, 100_000):
        name = wrapper * longer + suffix
        assert split_name(name) == (name, TensorKind.UNKNOWN, "", name)


@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize(
    ("name", "kind", "adapter"), KINDS, ids=[k[0][len(MODULE) :] for k in KINDS]
)
def test_a_name_is_taken_apart(prefix: str, name: str, kind: TensorKind, adapter: str) -> None:
    parts = split_name(prefix + name)
    assert (parts.module, parts.raw, parts.kind, parts.adapter) == (MODULE, MODULE, kind, adapter)


@pytest.mark.parametrize(
    "name", ["", "x", ".", "lora_A.weight", ".lora_A.weight", "x.lora_C.weight"]
)
def test_what_is_no_part_of_an_adapter_is_unknown(name: str) -> None:
    assert split_name(name).kind == TensorKind.UNKNOWN


# ---- savers ------------------------------------------------------------------------------------

SAVERS: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "PEFT": (lambda name: name, []),
    "no prefix": (lambda name: name.removeprefix(PREFIX), []),
    "adapter name": (
        lambda name: name.replace(".weight", ".default.weight"),
        ["adapter name 'default' taken away"],
    ),
    "DDP": (lambda name: f"module.{name}", ["module. taken away"]),
    "DDP inside": (
        lambda name: name.replace(PREFIX, f"{PREFIX}module."),
        ["module. taken away"],
    ),
    "compiled": (lambda name: f"_orig_mod.{name}", ["_orig_mod. taken away"]),
    "compiled inside": (
        lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."),
        ["_orig_mod. taken away"],
    ),
    "compiled layers": (
        lambda name: name.replace(".self_attn", "._orig_mod.self_attn").replace(
            ".mlp", "._orig_mod.mlp"
        ),
        ["_orig_mod. taken away"],
    ),
    "FSDP": (
        lambda name: f"_fsdp_wrapped_module.{name}".replace(
            ".layers.", "._fsdp_wrapped_module.layers."
        ),
        ["_fsdp_wrapped_module. taken away"],
    ),
    "checkpointed layers": (
        lambda name: name.replace(".lora_", "._checkpoint_wrapped_module.lora_"),
        ["_checkpoint_wrapped_module. taken away"],
    ),
    "all of them": (
        lambda name: f"module._orig_mod.{name}".replace(".weight", ".a.weight"),
        ["_orig_mod. taken away", "adapter name 'a' taken away", "module. taken away"],
    ),
    "multi-modal": (
        lambda name: name.replace(f"{PREFIX}model.", f"{PREFIX}language_model.model."),
        ["language_model. taken away"],
    ),
    "multi-modal, inside": (
        lambda name: name.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."),
        ["language_model. taken away"],
    ),
}


def load(cache: Cache, tensors: Tensors, directory: Path) -> Tensors:
    """What the cache holds of an adapter with these tensors."""
    cache.adapters.register(
        "a", write_adapter(directory, tensors, r=3, target_modules="all-linear")
    )
    request = cache.request(1, "a")
    add_and_wait(cache.peft, request)
    return cache.peft.task_weights(request.lora_task_id, "host")


@pytest.mark.parametrize("saver", SAVERS)
def test_names_of_every_saver_find_their_modules(
    small_cache: Cache, tmp_path: Path, saver: str
) -> None:
    rename, changes = SAVERS[saver]
    tensors = adapter_tensors(small_cache.config.modules, 3, seed=1)
    saved = {rename(name): tensor for name, tensor in tensors.items()}
    actual = load(small_cache, saved, tmp_path)
    assert_same_weights(actual, weights_of(tensors, torch.float32))
    report = small_cache.adapters.get("a").report
    assert report.renamed == tuple((change, len(small_cache.config.modules)) for change in changes)
    assert (report.used, report.ignored, report.missing) == (len(tensors), (), 0)
    small_cache.adapters.load("a")
    plain = write_adapter(tmp_path / "b", tensors)
    assert (
        small_cache.adapters.load("b", plain).generation == small_cache.adapters.get("a").generation
    )


@pytest.mark.parametrize("prefix", ["language_model.model.layers", "model.language_model.layers"])
def test_text_adapters_find_the_text_model_inside(
    make_cache: Callable[..., Cache], tmp_path: Path, prefix: str
) -> None:
    shapes = {"self_attn.q_proj": (48, 64)}
    modules = layered_modules(2, shapes, prefix) + layered_modules(2, shapes, "vision.layers")
    cache = make_cache(modules=modules)
    tensors = adapter_tensors(layered_modules(2, shapes, "model.layers"), 3, seed=1)
    actual = load(cache, tensors, tmp_path)
    expected = {
        name.replace("model.layers", prefix): pair
        for name, pair in weights_of(tensors, torch.float32).items()
    }
    assert_same_weights(actual, expected)
    report = cache.adapters.get("a").report
    assert report.renamed == (("language_model. put in", 2),)
    assert report.missing == 2  # the vision tower is targeted, too


def test_a_wrapped_model_finds_what_was_saved_without_the_wrapper(
    make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    shapes = {"self_attn.q_proj": (48, 64)}
    cache = make_cache(modules=layered_modules(2, shapes, "_orig_mod.model.layers"))
    tensors = adapter_tensors(layered_modules(2, shapes, "model.layers"), 3, seed=1)
    assert set(load(cache, tensors, tmp_path)) == {module.name for module in cache.config.modules}
    assert cache.adapters.get("a").report.renamed == (("_orig_mod. put in", 2),)


def test_a_module_that_could_be_two_is_an_error(
    make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    shapes = {"q_proj": (48, 64)}
    modules = layered_modules(1, shapes, "language_model.layers")
    modules += layered_modules(1, shapes, "x.language_model.layers")
    modules += layered_modules(1, shapes, "language_model.x.layers")
    cache = make_cache(modules=modules)
    exact = adapter_tensors(modules[1:2], 3, seed=1)
    assert set(load(cache, exact, tmp_path / "exact")) == {modules[1].name}
    unclear = adapter_tensors(layered_modules(1, shapes, "x.layers"), 3, seed=1)
    with pytest.raises(AdapterFormatError, match=r"could be 'language_model\.x") as caught:
        cache.adapters.register("b", write_adapter(tmp_path / "b", unclear))
    assert "'x.language_model.layers.0.q_proj'" in str(caught.value)
    assert len(cache.adapters) == 1


def test_a_module_whose_own_name_looks_like_a_wrapper_is_found() -> None:
    matcher = NameMatcher(["module.x", "x", "module.y", "language_model.z"])
    assert matcher.find("module.x", "x") == "module.x"
    assert matcher.find("x", "x") == "x"
    assert matcher.find("module.y", "y") == "module.y"
    assert matcher.find("y", "y") == "module.y"
    assert matcher.find("z", "z") == "language_model.z"
    assert matcher.find("w", "w") is None
    with pytest.raises(AmbiguousNameError, match=r"'a\.language_model' or 'language"):
        NameMatcher(["a.language_model", "language_model.a"]).find("a", "a")


def test_two_adapters_in_one_file_are_an_error(small_cache: Cache, tmp_path: Path) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 3, seed=1)
    mixed = {
        name.replace(".weight", f".{'ab'[number // 2 % 2]}.weight"): tensor
        for number, (name, tensor) in enumerate(tensors.items())
    }
    with pytest.raises(AdapterFormatError, match="tensors of 2 adapters, 'a', 'b'"):
        load(small_cache, mixed, tmp_path)


def test_two_names_of_one_module_are_an_error(
    make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    cache = make_cache(modules=layered_modules(1, {"q_proj": (48, 64)}))
    tensors = adapter_tensors(cache.config.modules, 3, seed=1)
    longer = "language_model.model.layers"
    other = {name.replace("model.layers", longer): -each for name, each in tensors.items()}
    with pytest.raises(AdapterFormatError, match=r"is a second one for module 'model\.layers\.0"):
        cache.adapters.register("a", write_adapter(tmp_path, {**tensors, **other}))


def test_the_tensor_that_says_most_is_named(small_cache: Cache, tmp_path: Path) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 4, seed=1)
    tensors["aaa.strange"] = torch.ones(2)
    tensors[f"{PREFIX}model.embed_tokens.weight"] = torch.ones(4, 4)
    with pytest.raises(UnsupportedAdapterError, match="a whole weight would replace") as caught:
        small_cache.adapters.register("a", write_adapter(tmp_path, tensors))
    assert caught.value.field == f"{PREFIX}model.embed_tokens.weight"


def test_weights_that_a_request_carries_are_named_by_the_same_rules(small_cache: Cache) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 4, seed=1)
    saved = {f"module.{n}".replace(".weight", ".x.weight"): t for n, t in tensors.items()}
    config = adapter_config(tensors)
    plain = AdapterWeights.from_tensors(tensors, config)
    renamed = AdapterWeights.from_tensors(saved, config)
    assert renamed.digest == plain.digest
    plans = [each.carried(small_cache.config).plan for each in (plain, renamed)]
    plain_rows, rows = ([(row.module, row.rank, row.scale) for row in plan.rows] for plan in plans)
    assert rows == plain_rows
