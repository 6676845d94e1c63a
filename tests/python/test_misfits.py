"""Adapters for another model, or for modules that carry none: what the message tells apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.support.adapters import PREFIX, write_adapter
from tests.support.tiny_models import build_tiny_model

from pagedlora import (
    AdapterFormatError,
    LoraManager,
    LoraModelConfig,
    ModelWeights,
    PeftCacheConfig,
    PeftCacheManager,
)
from pagedlora.loaders.fused_modules import fused_modules_of

Managers = dict[bool, LoraManager]
LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def managers() -> Iterator[Managers]:
    """Of a model in which q_proj alone carries LoRA: with its weights, and without them."""
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model, ["q_proj"])
    sizes = PeftCacheConfig(host_cache_size=2**20, device_cache_size=2**20)
    with closing(PeftCacheManager(config, sizes)) as cache:
        yield {
            True: LoraManager(config, cache, base_weights=ModelWeights(model)),
            False: LoraManager(config, cache),
        }


@pytest.fixture
def refuse(managers: Managers, tmp_path: Path) -> Callable[..., str]:
    def refuse(
        module: str, *, base_model: str | None, knows: bool = True, kind: str = "linear"
    ) -> str:
        a, b = ("A.weight", "B.weight") if kind == "linear" else ("embedding_A", "embedding_B")
        name = f"{PREFIX}{module}.lora_"
        tensors = {name + a: torch.ones(2, 48), name + b: torch.ones(32, 2)}
        targets = [module[module.rfind(".") + 1 :]]
        fields = {"target_modules": targets, "base_model_name_or_path": base_model}
        adapter = write_adapter(tmp_path / "adapter", tensors, r=2, **fields)
        with pytest.raises(AdapterFormatError) as refused:
            managers[knows].register("a", adapter)
        assert refused.value.tensor == name + a
        return str(refused.value)

    return refuse


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize(
    ("base_model", "end"),
    [
        (None, "; serve the model that it was trained on"),
        ("", "; serve the model that it was trained on"),
        ("some/model", "; serve the model that it was trained on, 'some/model'"),
        ("a\nb", "; serve the model that it was trained on, 'a\\nb'"),
    ],
)
def test_other_sizes_name_the_base_model(
    refuse: Callable[..., str], base_model: str | None, end: str, knows: bool
) -> None:
    message = refuse(f"{LAYER}.self_attn.q_proj", base_model=base_model, knows=knows)
    assert message.endswith(f"has shape [2, 48]; the model needs [2, 32]{end}")


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (f"{LAYER}.mlp.down_proj", "linear"),
        (f"language_model.{LAYER}.mlp.down_proj", "linear"),
        ("model.embed_tokens", "embedding"),
        ("lm_head", "linear"),
    ],
)
def test_a_module_that_is_no_target(refuse: Callable[..., str], module: str, kind: str) -> None:
    message = refuse(module, base_model="some/model", kind=kind)
    assert message.endswith(
        f"belongs to module '{module}', which the model has, but not among its LoRA target "
        'modules: name the module, lora_target_modules=["all-linear", '
        f'"{module.rpartition(".")[2]}"]'
    )


@pytest.mark.parametrize("module", ["model.norm", LAYER])
def test_a_module_that_can_carry_none(refuse: Callable[..., str], module: str) -> None:
    assert f"belongs to module '{module}', which can carry no LoRA in this model" in refuse(
        module, base_model="some/model"
    )


@pytest.mark.parametrize(
    ("family", "module", "has", "targets"),
    [
        ("phi3", "q_proj", ["qkv_proj"], '"qkv_proj"]'),
        ("llama", "qkv_proj", ["q_proj", "k_proj", "v_proj"], '"q_proj", "k_proj", "v_proj"]'),
    ],
)
def test_a_module_that_the_model_has_fused_or_split(
    tmp_path: Path, family: str, module: str, has: list[str], targets: str
) -> None:
    model = build_tiny_model(family)
    config = LoraModelConfig.from_module(model, ["down_proj"])
    sizes = PeftCacheConfig(host_cache_size=2**20, device_cache_size=2**20)
    name = f"{PREFIX}{LAYER}.self_attn.{module}.lora_"
    tensors = {f"{name}A.weight": torch.ones(2, 32), f"{name}B.weight": torch.ones(32, 2)}
    adapter = write_adapter(tmp_path / "adapter", tensors, r=2, target_modules=[module])
    with closing(PeftCacheManager(config, sizes)) as cache:
        manager = LoraManager(
            config,
            cache,
            base_weights=ModelWeights(model),
            fused_modules=fused_modules_of(model.config),
        )
        with pytest.raises(AdapterFormatError) as refused:
            manager.register("a", adapter)
    names = " and ".join(f"'{LAYER}.self_attn.{each}'" for each in has)
    assert f"which the model has as {names}, but not among" in str(refused.value)
    assert str(refused.value).endswith(targets)


def test_a_rank_of_several_does_not_know_what_the_others_have(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model, ["q_proj"], pp_size=2, pp_rank=0)
    del model.model.layers[1:]  # as the rank's
    sizes = PeftCacheConfig(host_cache_size=2**20, device_cache_size=2**20)
    name = f"{PREFIX}model.layers.1.mlp.down_proj.lora_"
    tensors = {f"{name}A.weight": torch.ones(2, 32), f"{name}B.weight": torch.ones(32, 2)}
    adapter = write_adapter(tmp_path / "adapter", tensors, r=2, target_modules=["down_proj"])
    with closing(PeftCacheManager(config, sizes)) as cache:
        manager = LoraManager(config, cache, base_weights=ModelWeights(model))
        with pytest.raises(AdapterFormatError, match="does not have or which is not among"):
            manager.register("a", adapter)


@pytest.mark.parametrize("module", ["transformer.h.0.attn.c_attn", "model.layers.2.mlp.down_proj"])
def test_a_module_that_the_model_lacks(refuse: Callable[..., str], module: str) -> None:
    assert refuse(module, base_model="some/model").endswith(
        f"belongs to module '{module}', which the model does not have; serve the model that it "
        "was trained on, 'some/model'"
    )


@pytest.mark.parametrize(("base_model", "words"), [("x/y", ", 'x/y', or"), (None, " or")])
def test_where_nobody_knows_the_model_both_ways_out_are_told(
    refuse: Callable[..., str], base_model: str | None, words: str
) -> None:
    message = refuse("model.embed_tokens", base_model=base_model, knows=False, kind="embedding")
    assert message.endswith(
        "which the model does not have or which is not among its LoRA target modules; serve the "
        f"model that it was trained on{words} name the module, "
        'lora_target_modules=["all-linear", "embed_tokens"]'
    )


@pytest.mark.parametrize("base_model", [["x"], {"x": 1}, 7, True])
def test_a_base_model_that_is_no_name_is_left_out(
    refuse: Callable[..., str], base_model: object
) -> None:
    message = refuse(f"{LAYER}.self_attn.q_proj", base_model=base_model)
    assert message.endswith("serve the model that it was trained on")
