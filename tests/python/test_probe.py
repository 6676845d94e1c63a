"""`LoraManager.probe` says what `register` would find, for every way in, and registers nothing."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    WEIGHTS_FILE,
    adapter_config,
    adapter_tensors,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, check_pages
from tests.support.nemo import Heads, draw_pairs, write_nemo

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterPathError,
    InvalidArgumentError,
    LoraManager,
    PeftTensors,
    UnsupportedAdapterError,
    probe_adapter,
)

HEADS = Heads(heads=4, groups=1, size=16)
FUSED = {"qkv_proj": dict(zip(("q_proj", "k_proj", "v_proj"), HEADS.parts, strict=True))}
Source = Callable[[Cache, Path], Any]


@pytest.fixture(autouse=True)
def private_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made in these tests."""
    root = tmp_path / "private"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def tensors_of(cache: Cache) -> dict[str, torch.Tensor]:
    return adapter_tensors(cache.config.modules, 4, seed=1, dtype=torch.bfloat16)


def a_directory(cache: Cache, tmp_path: Path) -> Any:
    return write_adapter(tmp_path / "a", tensors_of(cache))


def a_pickle(cache: Cache, tmp_path: Path) -> Any:
    path = write_adapter(tmp_path / "a", tensors_of(cache))
    (path / WEIGHTS_FILE).unlink()
    torch.save(tensors_of(cache), path / "adapter_model.bin")
    return path


def in_memory(cache: Cache, tmp_path: Path) -> Any:
    tensors = tensors_of(cache)
    return PeftTensors(adapter_config(tensors), tensors)


def an_archive(cache: Cache, tmp_path: Path) -> Any:
    """For the models' q, k and v, whose inputs are fewer than its outputs."""
    pairs = {layer: (a[:, :48], b) for layer, (a, b) in draw_pairs(HEADS, [0, 1], 4, 1).items()}
    return write_nemo(
        tmp_path / "a.nemo", HEADS, pairs, fields={**HEADS.fields(), "kv_channels": 16}
    )


SOURCES: list[Source] = [a_directory, a_pickle, in_memory, an_archive]


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    from pagedlora._core import LoraModule

    shapes = {"q": (48, 64), "k": (48, 16), "v": (48, 16)}
    modules = [
        LoraModule(f"model.layers.{layer}.self_attn.{part}_proj", *shape, layer, 1 + number)
        for layer in range(2)
        for number, (part, shape) in enumerate(shapes.items())
    ]
    return make_cache(modules=modules)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_it_is_what_register_finds_and_leaves_nothing(
    cache: Cache, tmp_path: Path, private_root: Path, source: Source
) -> None:
    manager = LoraManager(cache.config, cache.peft, allow_pickle=True, fused_modules=FUSED)
    given = source(cache, tmp_path)
    report = manager.probe(given)
    gc.collect()
    assert (len(manager), manager.names, list(private_root.iterdir())) == (0, (), [])
    check_pages(cache.peft)
    info = manager.register("a", given)
    assert (report.coverage, report.num_pages, report.bytes) == (
        info.report,
        info.num_pages,
        info.bytes,
    )
    assert set(report.scales.values()) == set(info.scales.values())
    assert report.path == info.path
    if not isinstance(given, PeftTensors):
        alone = probe_adapter(given, allow_pickle=True)
        assert (alone.ranks, alone.scales, alone.num_tensors) == (
            report.ranks,
            report.scales,
            report.num_tensors,
        )
        assert (alone.coverage, alone.num_pages, alone.bytes) == (None, None, None)


def test_it_goes_by_the_managers_options_and_model(cache: Cache, tmp_path: Path) -> None:
    probing = cache.adapters.probe
    with pytest.raises(UnsupportedAdapterError, match="allow_pickle"):
        probing(a_pickle(cache, tmp_path / "pickle"))
    tensors = adapter_tensors(cache.config.modules, 17, seed=1)
    with pytest.raises(UnsupportedAdapterError, match="rank 17 is greater than max_lora_rank 16"):
        probing(write_adapter(tmp_path / "rank", tensors))
    odd = write_adapter(tmp_path / "odd", tensors_of(cache), a_field_of_tomorrow=1)
    with pytest.raises(UnsupportedAdapterError, match="a_field_of_tomorrow"):
        probing(odd)
    lax = LoraManager(cache.config, cache.peft, strict=False)
    assert "a_field_of_tomorrow" in lax.probe(odd).ignored[0]  # and no warning, which is an error
    with pytest.raises(AdapterNotFoundError):
        probing(tmp_path / "none")
    with pytest.raises(InvalidArgumentError, match="the source of the adapter that is probed is 7"):
        probing(7)  # type: ignore[arg-type]
    with pytest.raises(AdapterFormatError, match="tensors of the adapter that is probed"):
        probing(PeftTensors({}, {"x": 7}))  # type: ignore[dict-item]
    rooted = LoraManager(cache.config, cache.peft, adapter_root=tmp_path / "rank")
    with pytest.raises(AdapterPathError):
        rooted.probe(odd)


def test_an_adapter_that_no_tier_holds_has_its_pages(make_cache: Callable[..., Cache]) -> None:
    """Whether there is room is not asked."""
    small = make_cache(host_pages=4, device_pages=4)
    tensors = adapter_tensors(small.config.modules, 16, seed=1)
    report = small.adapters.probe(PeftTensors(adapter_config(tensors), tensors))
    assert report.num_pages is not None
    assert report.num_pages > small.peft.max_host_pages
