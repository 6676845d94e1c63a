"""Adapters of one shape are parsed once, and nothing of another shape is taken for theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Tensors,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import AdapterFormatError, LoraManager, PagedLoraWarning
from pagedlora.loaders import hf, shape_cache
from pagedlora.loaders.shape_cache import MAX_SHAPES, AdapterShape, ShapeCache


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights files whose headers were parsed."""
    paths: list[str] = []
    pair_tensors = hf.pair_tensors

    def record(tensors: Any, config: Any, path: str, **options: Any) -> Any:
        paths.append(path)
        return pair_tensors(tensors, config, path, **options)

    monkeypatch.setattr(hf, "pair_tensors", record)
    return paths


def tensors_of(cache: Cache, seed: int, rank: int = 4) -> Tensors:
    return adapter_tensors(cache.config.modules, rank, seed)


def test_adapters_of_one_shape_are_parsed_once_and_keep_their_own_content(
    small_cache: Cache, tmp_path: Path, parsed: list[str]
) -> None:
    contents = {str(seed): tensors_of(small_cache, seed) for seed in range(5)}
    for name, tensors in contents.items():
        info = small_cache.adapters.register(name, write_adapter(tmp_path / name, tensors))
        assert info.path == str(tmp_path / name)
    assert len(parsed) == 1
    for number, (name, tensors) in enumerate(contents.items()):
        request = small_cache.request(number, name)
        add_and_wait(small_cache.peft, request)
        weights = small_cache.peft.task_weights(request.lora_task_id, "host")
        assert_same_weights(weights, weights_of(tensors, torch.float32))
    infos = small_cache.adapters.list()
    assert len({id(info.report) for info in infos}) == 1
    assert len({small_cache.adapters.load(info.name).generation for info in infos}) == 5


def rewrite(**fields: Any) -> Callable[[Path, Tensors], object]:
    return lambda path, tensors: write_adapter(path, tensors, **fields)


def _other_order(path: Path, tensors: Tensors) -> None:
    write_adapter(path, tensors)
    fields = json.loads((path / CONFIG_FILE).read_text())
    fields["target_modules"].reverse()
    fields["lora_dropout"] = 0.5
    (path / CONFIG_FILE).write_text(json.dumps(fields, indent=8))


VARIANTS: dict[str, tuple[Callable[[Path, Tensors], object], bool]] = {
    "the same": (write_adapter, True),
    "other spelling": (_other_order, True),
    "alpha": (rewrite(lora_alpha=17), False),
    "rsLoRA": (rewrite(use_rslora=True), False),
    "alpha pattern": (rewrite(alpha_pattern={"q_proj": 3}), False),
    "key order": (rewrite(alpha_pattern={"q_proj": 3, "v_proj": 4}), False),
    "rank pattern": (rewrite(rank_pattern={"q_proj": 4}), False),
    "initialisation": (rewrite(init_lora_weights=False), False),
    "excluded": (rewrite(exclude_modules=["x"]), False),
    "targets": (rewrite(target_modules="all-linear"), False),
    "dtype": (
        lambda path, tensors: write_adapter(path, {n: t.half() for n, t in tensors.items()}),
        False,
    ),
    "rank": (
        lambda path, tensors: write_adapter(path, {n: _two(n, t) for n, t in tensors.items()}),
        False,
    ),
    "names": (
        lambda path, tensors: write_adapter(path, {f"module.{n}": t for n, t in tensors.items()}),
        False,
    ),
    "fewer": (lambda path, tensors: write_adapter(path, dict(list(tensors.items())[2:])), False),
}


def _two(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return (tensor[:2] if ".lora_A." in name else tensor[:, :2]).contiguous()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_differs_in_anything_that_counts_is_parsed_itself(
    small_cache: Cache, tmp_path: Path, parsed: list[str], variant: str
) -> None:
    write, is_shared = VARIANTS[variant]
    small_cache.adapters.register("a", write_adapter(tmp_path / "a", tensors_of(small_cache, 1)))
    write(tmp_path / "b", tensors_of(small_cache, 2))
    shared = small_cache.adapters.load("b", tmp_path / "b")
    assert len(parsed) == (1 if is_shared else 2)
    alone = LoraManager(small_cache.config, small_cache.peft).load("b", tmp_path / "b")
    assert (shared.generation, shared.ranks, shared.scales) == (
        alone.generation,
        alone.ranks,
        alone.scales,
    )
    assert shared.report == alone.report


def test_another_header_of_the_same_length_is_another_shape(
    small_cache: Cache, tmp_path: Path
) -> None:
    for layer in (0, 1):
        modules = [
            m for m in small_cache.config.modules if m.name.startswith(f"model.layers.{layer}")
        ]
        path = write_adapter(tmp_path / str(layer), adapter_tensors(modules, 4, seed=1))
        info = small_cache.adapters.register(str(layer), path)
        assert set(info.ranks) == {module.name for module in modules}
    sizes = [(tmp_path / name / WEIGHTS_FILE).stat().st_size for name in ("0", "1")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("cut", [-1, 1, 100])
def test_the_same_header_over_more_or_fewer_bytes_is_refused(
    small_cache: Cache, tmp_path: Path, cut: int
) -> None:
    small_cache.adapters.register("a", write_adapter(tmp_path / "a", tensors_of(small_cache, 1)))
    broken = write_adapter(tmp_path / "b", tensors_of(small_cache, 2)) / WEIGHTS_FILE
    os.truncate(broken, broken.stat().st_size - cut)
    with pytest.raises(AdapterFormatError):
        small_cache.adapters.register("b", tmp_path / "b")
    os.truncate(broken, 9)
    with pytest.raises(AdapterFormatError, match="does not fit the file of 9"):
        small_cache.adapters.register("b", tmp_path / "b")


def test_what_was_ignored_is_said_of_every_adapter(small_cache: Cache, tmp_path: Path) -> None:
    lenient = LoraManager(small_cache.config, small_cache.peft, strict=False)
    for name in ("a", "b"):
        path = write_adapter(tmp_path / name, tensors_of(small_cache, 1), tomorrow=1)
        with pytest.warns(PagedLoraWarning, match=f"adapter '{path}': ignored tomorrow=1"):
            lenient.register(name, path)


def test_an_adapter_that_is_refused_is_not_remembered(
    small_cache: Cache, tmp_path: Path, parsed: list[str]
) -> None:
    tensors = {**tensors_of(small_cache, 1), "strange": torch.ones(2)}
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="strange"):
            small_cache.adapters.register(name, write_adapter(tmp_path / name, tensors))
    assert len(parsed) == 2


def test_the_shapes_met_last_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ShapeCache()
    made = [AdapterShape(None, None) for _ in range(MAX_SHAPES + 2)]  # type: ignore[arg-type]
    keys = [bytes([number]) for number in range(len(made))]
    for key, shape in zip(keys[:MAX_SHAPES], made, strict=False):
        shapes.add(key, shape)
    assert shapes.find(keys[0]) is made[0]
    shapes.add(keys[-2], made[-2])
    shapes.add(keys[-1], made[-1])
    assert [shapes.find(key) is None for key in keys] == [
        False,
        True,
        True,
        *[False] * (len(keys) - 3),
    ]
    shapes.clear()
    assert shapes.find(keys[0]) is None


def test_a_file_replaced_while_its_header_is_read_is_noticed(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cache.adapters.register("a", write_adapter(tmp_path / "a", tensors_of(small_cache, 1)))
    path = write_adapter(tmp_path / "b", tensors_of(small_cache, 2))
    shape_key = shape_cache.shape_key

    def replace_first(form: str, config: Any, file: Any) -> bytes | None:
        write_adapter(path, tensors_of(small_cache, 3))
        return shape_key(form, config, file)

    monkeypatch.setattr("pagedlora.registry.content.shape_key", replace_first)
    with pytest.raises(RuntimeError, match="changed after it was registered"):
        small_cache.adapters.register("b", path)
    assert len(small_cache.adapters) == 1
