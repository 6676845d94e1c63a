"""Values that no adapter can have are found when its content is first read (design 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.adapters import (
    Tensors,
    adapter_config,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache

from pagedlora import AdapterFormatError, AdapterWeights, LoraManager
from pagedlora.loaders import source_file

Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
INF, NAN = float("inf"), float("nan")
STORED = [torch.float32, torch.bfloat16, torch.float16]
MakeCache = Callable[..., Cache]
Use = Callable[[LoraManager, Path], object]


def write_with(
    cache: Cache, path: Path, value: float, dtype: torch.dtype = torch.float32, at: int = -1
) -> Path:
    """An adapter with one special value in one B."""
    tensors = adapter_tensors(cache.config.modules, 4, seed=1, dtype=dtype)
    tensors[Q_B].view(-1)[at] = value
    return write_adapter(path, tensors)


def _reload(manager: LoraManager, path: Path) -> None:
    tensors = adapter_tensors(manager._describer._table.config.modules, 4, seed=2)
    manager.register("a", write_adapter(path.parent / "before", tensors))
    try:
        manager.reload("a", path)
    finally:
        assert manager.get("a").path == str(path.parent / "before")
        manager.unload("a")


def _with_registered(use: Callable[[LoraManager], object]) -> Use:
    def run(manager: LoraManager, path: Path) -> None:
        manager.register("a", path)
        try:
            use(manager)
        finally:
            manager.unload("a")

    return run


USES: dict[str, Use] = {
    "load": lambda manager, path: manager.load("a", path),
    "pin": _with_registered(lambda manager: manager.pin("a")),
    "cache_salt": _with_registered(lambda manager: manager.cache_salt("a")),
    "reload": _reload,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF], ids=repr)
def test_whoever_reads_the_whole_content_finds_it(
    small_cache: Cache, tmp_path: Path, use: str, value: float
) -> None:
    path = write_with(small_cache, tmp_path / "a", value)
    with pytest.raises(AdapterFormatError, match="NaN or infinite") as caught:
        USES[use](small_cache.adapters, path)
    assert caught.value.tensor == Q_B.removeprefix("base_model.model.")
    assert str(path) in caught.value.path
    assert len(small_cache.adapters) == 0
    assert small_cache.peft.resident_tasks("host") == 0


@pytest.fixture(params=[7, 64, 1 << 20])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in pieces of so many bytes, which may cut values."""
    monkeypatch.setattr(source_file, "CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("at", [0, 5, 100, -1])
def test_it_is_found_wherever_it_lies(
    small_cache: Cache, tmp_path: Path, dtype: torch.dtype, at: int
) -> None:
    small_cache.adapters.load("good", write_with(small_cache, tmp_path / "good", 1.5, dtype, at))
    with pytest.raises(AdapterFormatError, match="NaN or infinite"):
        small_cache.adapters.load("a", write_with(small_cache, tmp_path / "a", INF, dtype, at))


OVER = [
    (torch.float32, torch.float16, 65520.0),
    (torch.float32, torch.float16, -1e5),
    (torch.bfloat16, torch.float16, 65536.0),
    (torch.float32, torch.bfloat16, -3.4e38),
    (torch.float32, torch.bfloat16, 2.0**128 - 2.0**119),
]
WITHIN = [
    (torch.float32, torch.float16, 65519.99),
    (torch.float32, torch.float16, 1e-30),
    (torch.bfloat16, torch.float16, -65280.0),
    (torch.float16, torch.float16, 65504.0),
    (torch.float32, torch.bfloat16, 3.39e38),
    (torch.bfloat16, torch.bfloat16, -3.38e38),
    (torch.float16, torch.bfloat16, 65504.0),
    (torch.float32, torch.float32, -3.4e38),
    (torch.bfloat16, torch.float32, 3.38e38),
]


@pytest.mark.parametrize(("stored", "kept", "value"), OVER, ids=str)
def test_a_value_over_the_range_of_the_cache_is_refused(
    make_cache: MakeCache, tmp_path: Path, stored: torch.dtype, kept: torch.dtype, value: float
) -> None:
    assert torch.tensor(value, dtype=stored).isfinite()
    assert torch.tensor(value, dtype=stored).to(kept).isinf()
    cache = make_cache(kept)
    with pytest.raises(AdapterFormatError, match="over the range of the cache's type"):
        cache.adapters.load("a", write_with(cache, tmp_path, value, stored))


@pytest.mark.parametrize(("stored", "kept", "value"), WITHIN, ids=str)
def test_a_value_within_the_range_of_the_cache_loads(
    make_cache: MakeCache, tmp_path: Path, stored: torch.dtype, kept: torch.dtype, value: float
) -> None:
    assert torch.tensor(value, dtype=stored).to(kept).isfinite()
    cache = make_cache(kept)
    path = write_with(cache, tmp_path, value, stored)
    info = cache.adapters.load("a", path)
    tensors: Tensors = adapter_tensors(cache.config.modules, 4, seed=1, dtype=stored)
    tensors[Q_B].view(-1)[-1] = value
    weights = cache.peft.task_weights(info.task_id, "host")
    assert_same_weights(weights, weights_of(tensors, kept))


def first_use(cache: Cache, adapters: LoraManager, path: Path) -> SimpleNamespace:
    """A request for an adapter whose content nobody has read before."""
    adapters.register(path.name, path)
    request = SimpleNamespace(
        request_id=len(path.name), lora_task_id=adapters.task_id(path.name), lora_weights=None
    )
    cache.peft.add_request_peft(request)
    assert cache.peft.wait_idle()
    return request


@pytest.mark.parametrize(("stored", "kept", "value"), OVER, ids=str)
def test_the_first_use_finds_it_too(
    make_cache: MakeCache, tmp_path: Path, stored: torch.dtype, kept: torch.dtype, value: float
) -> None:
    """Of an adapter that was only registered; others go on."""
    cache = make_cache(kept)
    for name, bad in (("nan", NAN), ("infinite", INF), ("over", value)):
        path = write_with(cache, tmp_path / name, bad, stored)
        request = first_use(cache, cache.adapters, path)
        assert cache.peft.adapter_state(request) == "failed"
        error = cache.peft.adapter_error(request)
        assert isinstance(error, AdapterFormatError)
        assert error.tensor.endswith("q_proj.lora_B")
        assert error.path == str(path / "adapter_model.safetensors")
        assert cache.peft.resident_tasks("host") == 0
        cache.peft.mark_request_done(request)
    good = first_use(cache, cache.adapters, write_with(cache, tmp_path / "good", 1.0, stored))
    assert cache.peft.adapter_state(good) == "ready"


def test_nobody_looks_at_a_first_use_where_that_is_not_wanted(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager = LoraManager(small_cache.config, small_cache.peft, check_values=False)
    request = first_use(small_cache, manager, write_with(small_cache, tmp_path / "a", NAN))
    assert small_cache.peft.adapter_state(request) == "ready"
    small_cache.peft.mark_request_done(request)


def test_nobody_looks_where_that_is_not_wanted(small_cache: Cache, tmp_path: Path) -> None:
    manager = LoraManager(small_cache.config, small_cache.peft, check_values=False)
    info = manager.load("a", write_with(small_cache, tmp_path, NAN))
    assert info.tiers == ("host",)
    manager.unload("a")


def test_weights_that_a_request_carries_are_checked(small_cache: Cache) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 4, seed=1)
    config = adapter_config(tensors)
    AdapterWeights.from_tensors(tensors, config)
    tensors[Q_B].view(-1)[3] = NAN
    with pytest.raises(AdapterFormatError, match="NaN or infinite"):
        AdapterWeights.from_tensors(tensors, config)
