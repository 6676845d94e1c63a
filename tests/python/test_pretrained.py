"""Directories that are no model, or another one than is needed: the message says what they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.support.adapters import write_random_adapter
from tests.support.encoders import build_classifier
from tests.support.tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM

from pagedlora import LLM, KvCacheConfig, LoraModelConfig, ModelLoadError
from pagedlora.engine import pretrained
from pagedlora.engine.pretrained import load_pretrained, skeleton


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LoraModelConfig.from_module(build_tiny_model("llama"))
    return write_random_adapter(tmp_path_factory.mktemp("adapter"), config, rank=2, seed=1)


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("layers.0.mlp.up", r"lack 1 weight: 'model\.layers\.0\.mlp\.up_proj\.weight'; give a dir"),
        ("layers.0.mlp", r"lack 3 weights: '[^']*', '[^']*', '[^']*'; give a directory"),
        ("mlp", r"lack 6 weights: '[^']*', '[^']*', '[^']*' and 3 more; give a directory"),
    ],
)
def test_a_few_of_the_missing_weights_are_named(
    saved: Path, tmp_path: Path, without: str, words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        load_pretrained(_without(saved, tmp_path / "new", without), None)


def test_files_of_another_kind_of_model_say_which(tmp_path: Path) -> None:
    build_classifier().save_pretrained(tmp_path)
    words = r"it is a BertForSequenceClassification, and .*BertLMHeadModel, .* more; .*attach\(\)"
    with pytest.raises(ModelLoadError, match=words):
        load_pretrained(str(tmp_path), None)


@pytest.mark.parametrize(("base", "words"), [("some/model", ", 'some/model', and"), (None, " and")])
def test_an_adapter_in_the_place_of_its_model(
    adapter: Path, tmp_path: Path, base: str | None, words: str
) -> None:
    adapter = _copied(adapter, tmp_path / "adapter", base)
    for use in (LLM, skeleton):
        with pytest.raises(ModelLoadError) as refused:
            use(adapter)  # type: ignore[operator]
        assert f"'{adapter}' cannot be loaded: it is an adapter" in str(refused.value)
        assert f"its base model{words} the adapter to load_lora()" in str(refused.value)
        assert refused.value.source == str(adapter)


@pytest.mark.parametrize("base", ["some/model", "itself", None])
def test_an_adapter_beside_its_model_is_refused_with_a_way_out_that_works(
    saved: Path, adapter: Path, tmp_path: Path, base: str | None
) -> None:
    """transformers would put it into the model: every answer would have it."""
    both = tmp_path / "both"
    _copied(adapter, both, str(both) if base == "itself" else base)
    shutil.copytree(saved, both, dirs_exist_ok=True)
    for use in (LLM, skeleton):
        with pytest.raises(ModelLoadError) as refused:
            use(both)  # type: ignore[operator]
        assert f"'{both}' cannot be loaded: beside the model is an adapter" in str(refused.value)
        assert "move adapter_config.json and adapter_model.* into a directory" in str(refused.value)
        assert "base model" not in str(refused.value), "it is there already"
        assert refused.value.source == str(both)
    (tmp_path / "own").mkdir()
    for file in [both / "adapter_config.json", *both.glob("adapter_model.*")]:
        file.rename(tmp_path / "own" / file.name)
    with LLM(both, kv_cache_config=KvCacheConfig(num_blocks=8)) as llm:
        llm.load_lora("a", tmp_path / "own")


def test_an_adapter_beside_its_model_is_refused_before_weights_are_read(
    saved: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = _copied(adapter, tmp_path / "both", None)
    shutil.copytree(saved, both, dirs_exist_ok=True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ModelLoadError, match="beside the model is an adapter"):
        load_pretrained(str(both), None)


def test_an_adapter_that_transformers_put_into_its_model_is_noticed(
    saved: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hub id it is not known before."""
    both = _copied(adapter, tmp_path / "both", str(saved))
    shutil.copytree(saved, both, dirs_exist_ok=True)
    monkeypatch.setattr(pretrained, "_check_directory", lambda source: None)
    with pytest.raises(ModelLoadError, match="it is an adapter"):
        load_pretrained(str(both), None)


def _without(saved: Path, new: Path, words: str) -> str:
    shutil.copytree(saved, new)
    weights = load_file(new / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if words not in name}
    save_file(kept, new / "model.safetensors", {"format": "pt"})
    return str(new)


def _copied(adapter: Path, new: Path, base: str | None) -> Path:
    shutil.copytree(adapter, new)
    file = new / "adapter_config.json"
    fields = json.loads(file.read_text()) | {"base_model_name_or_path": base}
    file.write_text(json.dumps(fields))
    return new
