"""Adapters by name: what registering tells, which names are possible, what PEFT itself writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.support.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_tensors,
    assert_same_weights,
    select_modules,
    weights_of,
    write_adapter,
    write_random_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait, register_adapters
from tests.support.tiny_models import build_tiny_model
from torch import nn

from pagedlora import (
    AdapterNotFoundError,
    InvalidArgumentError,
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    probe_adapter,
)
from pagedlora.lora_manager import MAX_NAME_BYTES


def test_registering_tells_what_is_known_and_reads_no_weights(
    small_cache: Cache, tmp_path: Path
) -> None:
    directory = write_random_adapter(
        tmp_path, small_cache.config, rank=5, seed=1, targets=["q_proj"], lora_alpha=15
    )
    info = small_cache.adapters.register("a", directory)
    assert (info.name, info.path) == ("a", str(directory))
    assert info.task_id >= 2**32
    modules = [m.name for m in select_modules(small_cache.config, ["q_proj"])]
    assert info.ranks == dict.fromkeys(modules, 5)
    assert info.scales == dict.fromkeys(modules, 3.0)
    assert (info.tiers, info.owners) == ((), frozenset())
    assert info.bytes == info.num_pages * small_cache.peft.page_bytes > 0
    assert small_cache.peft.stats.source_reads == 0
    assert small_cache.adapters.get("a") == info


def test_get_and_list_tell_tiers_and_owners_as_they_are_now(
    small_cache: Cache, tmp_path: Path
) -> None:
    manager, peft = small_cache.adapters, small_cache.peft
    assert (len(manager), manager.list()) == (0, [])
    register_adapters(small_cache, tmp_path, "b", "a")
    assert [info.name for info in manager.list()] == ["b", "a"]
    assert len(manager) == 2
    assert manager.task_id("a") != manager.task_id("b")

    requests = [small_cache.request(i, "a") for i in (1, 2)]
    for request in requests:
        add_and_wait(peft, request)
    peft.mark_request_done(requests[1], pause=True)
    assert manager.get("a").tiers == ("host",)
    assert manager.is_adapter_in_cpu_cache(manager.task_id("a"))
    peft.ensure_batch(requests[:1], []).close()
    info = manager.get("a")
    assert (info.tiers, info.owners) == (("host", "device"), {1, 2})
    assert peft.determine_num_pages(requests[0]) == info.num_pages
    assert manager.get("b").tiers == ()


@pytest.mark.parametrize("rank", [1, 3, 8, 16])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_scale_is_pefts(small_cache: Cache, tmp_path: Path, rank: int, rslora: bool) -> None:
    directory = write_random_adapter(
        tmp_path, small_cache.config, rank=rank, seed=1, lora_alpha=10, use_rslora=rslora
    )
    info = small_cache.adapters.register("a", directory)
    expected = 10 / math.sqrt(rank) if rslora else 10 / rank
    assert set(info.scales.values()) == {float(torch.tensor(expected))}
    assert set(probe_adapter(directory).scales.values()) == {expected}


def test_fractional_and_zero_alphas_are_kept(small_cache: Cache, tmp_path: Path) -> None:
    for name, alpha in (("half", 0.5), ("zero", 0), ("negative", -4)):
        directory = write_random_adapter(
            tmp_path / name, small_cache.config, rank=4, seed=1, lora_alpha=alpha
        )
        info = small_cache.adapters.register(name, directory)
        assert set(info.scales.values()) == {alpha / 4}


# ---- names -------------------------------------------------------------------------------------

ODD_NAMES = ["m:1", "org/a", "a b", "ä", "..", "-", "\n", "0", "None", "x" * MAX_NAME_BYTES]


def test_odd_names_are_taken_as_they_are(small_cache: Cache, tmp_path: Path) -> None:
    directory = write_random_adapter(tmp_path, small_cache.config, rank=1, seed=1)
    for name in ODD_NAMES:
        assert small_cache.adapters.register(name, directory).name == name
    assert [info.name for info in small_cache.adapters.list()] == ODD_NAMES
    assert len({small_cache.adapters.task_id(name) for name in ODD_NAMES}) == len(ODD_NAMES)


BAD_NAMES: list[Any] = ["", "x" * 300, "ä" * (MAX_NAME_BYTES // 2 + 1), None, 7, b"a"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: f"{name!a:.12}")
def test_impossible_names_are_refused(small_cache: Cache, tmp_path: Path, name: Any) -> None:
    directory = write_random_adapter(tmp_path, small_cache.config, rank=1, seed=1)
    with pytest.raises(InvalidArgumentError, match="name"):
        small_cache.adapters.register(name, directory)
    assert len(small_cache.adapters) == 0


@pytest.mark.parametrize("source", [7, None, b"a"], ids=repr)
def test_a_source_that_is_no_path_is_refused(small_cache: Cache, source: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="source of adapter 'a'"):
        small_cache.adapters.register("a", source)


@pytest.mark.parametrize("failing", ["num_pages_of_plan", "num_pages_of_task", "register_task"])
def test_a_register_that_fails_half_way_leaves_neither_name_nor_task(
    small_cache: Cache, tmp_path: Path, failing: str
) -> None:
    directory = write_random_adapter(tmp_path, small_cache.config, rank=1, seed=1)
    core = small_cache.peft.core
    tasks: list[int] = []

    def raise_error(argument: object) -> None:
        raise MemoryError

    def register_task(plan: Any) -> int:
        tasks.append(core.register_task(plan))
        return tasks[-1]

    calls = {
        "num_pages_of_plan": core.num_pages_of_plan,
        "num_pages_of_task": core.num_pages_of_task,
        "register_task": register_task,
        failing: raise_error,
    }
    cache = SimpleNamespace(
        core=SimpleNamespace(**calls),
        model_config=small_cache.config,
        page_bytes=small_cache.peft.page_bytes,
        active_tasks={},
        paused_tasks={},
        is_task_cached=small_cache.peft.is_task_cached,
        is_task_cached_device=small_cache.peft.is_task_cached_device,
    )
    manager = LoraManager(small_cache.config, cache)  # type: ignore[arg-type]
    try:
        manager.register("a", directory)
    except MemoryError:
        assert (len(manager), tasks) == (0, [])
    else:  # it does not need that call
        assert len(manager) == len(tasks) == 1


def test_list_asks_for_the_owners_once(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a", "b", "c")

    class Counting:
        asked = 0

        def __getattr__(self, name: str) -> Any:
            self.asked += name in ("active_tasks", "paused_tasks")
            return getattr(small_cache.peft, name)

    counting = Counting()
    small_cache.adapters._cache = counting  # type: ignore[assignment]
    assert len(small_cache.adapters.list()) == 3
    assert counting.asked == 2


def test_a_name_is_given_once(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "a")
    before = small_cache.adapters.get("a")
    other = write_random_adapter(tmp_path / "other", small_cache.config, rank=2, seed=9)
    with pytest.raises(InvalidArgumentError, match="already registered"):
        small_cache.adapters.register("a", other)
    assert small_cache.adapters.list() == [before]


@pytest.mark.parametrize("name", ["b", "A", "a ", ""])
def test_an_unknown_name_is_an_error_and_never_the_base_model(
    small_cache: Cache, tmp_path: Path, name: str
) -> None:
    register_adapters(small_cache, tmp_path, "a")
    for ask in (small_cache.adapters.get, small_cache.adapters.task_id):
        with pytest.raises(AdapterNotFoundError) as caught:
            ask(name)
        assert caught.value.name == name
        assert isinstance(caught.value, KeyError)


# ---- what PEFT writes --------------------------------------------------------------------------


CHANGES: dict[str, Callable[[LoraManager, str, Path], object]] = {
    "unload": lambda manager, name, path: manager.unload(name),
    "reload": lambda manager, name, path: manager.reload(name, path),
    "unpin": lambda manager, name, path: manager.unpin(name),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "0 others are"),
        (["x\ny"], r"1 other is: 'x\\ny'"),
        (["legal", "team/spam", "sales"], "3 others are: 'team/spam', 'legal', 'sales'"),
        (
            [*(f"tenant-{i}" for i in range(20)), "Xteam/spam", "team/spom"],
            "22 others are, such as 'team/spom', 'Xteam/spam', 'tenant-0'",
        ),
    ],
    ids=["none", "one", "three", "many"],
)
def test_changing_an_unknown_name_tells_the_closest_ones(
    small_cache: Cache,
    tmp_path: Path,
    change: Callable[[LoraManager, str, Path], object],
    names: list[str],
    words: str,
) -> None:
    directory = write_random_adapter(tmp_path, small_cache.config, rank=1, seed=1)
    for name in names:
        small_cache.adapters.register(name, directory)
    with pytest.raises(AdapterNotFoundError, match=f"'team/spma' is registered; {words}$"):
        change(small_cache.adapters, "team/spma", directory)


def test_a_request_is_not_told_the_names_of_others(small_cache: Cache, tmp_path: Path) -> None:
    register_adapters(small_cache, tmp_path, "somebody's")
    with pytest.raises(AdapterNotFoundError, match=r"1 other is\. Register it") as refused:
        small_cache.adapters.acquire("nobody", LlmRequest(1))
    assert "somebody" not in str(refused.value)


def save_with_peft(directory: Path, seed: int = 0, **fields: Any) -> nn.Module:
    """Saves an adapter with the installed PEFT, B filled in; returns the PEFT model."""
    torch.manual_seed(seed)
    model = get_peft_model(build_tiny_model("llama"), LoraConfig(**fields))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"target_modules": ["down_proj", "k_proj"], "r": 3, "lora_alpha": 7},
        {"target_modules": ["layers.1.self_attn.q_proj"]},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "task_type": "CAUSAL_LM"},
        {"init_lora_weights": False, "inference_mode": True, "revision": "main"},
    ],
    ids=lambda fields: ",".join(fields) or "defaults",
)
def test_what_pefts_save_pretrained_writes_loads(
    make_cache: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    model = save_with_peft(tmp_path, **{"target_modules": ["q_proj", "v_proj"], **fields})
    config = LoraModelConfig.from_module(build_tiny_model("llama"))
    cache = make_cache(modules=config.modules)
    info = cache.adapters.register("a", tmp_path)

    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }
    assert info.ranks == {name: layer.r["default"] for name, layer in layers.items()}
    for name, layer in layers.items():
        assert info.scales[name] == pytest.approx(layer.scaling["default"], rel=1e-7)
    request = cache.request(1, "a")
    add_and_wait(cache.peft, request)
    expected = {
        name: (layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data)
        for name, layer in layers.items()
    }
    assert_same_weights(cache.peft.task_weights(request.lora_task_id, "host"), expected)


def test_every_default_of_the_installed_peft_is_known(small_cache: Cache, tmp_path: Path) -> None:
    tensors = adapter_tensors(select_modules(small_cache.config, ["q_proj"]), 8, 1)
    directory = write_adapter(tmp_path, tensors)
    config = LoraConfig(target_modules=["q_proj"], peft_type="LORA").to_dict()
    fields = {name: sorted(v) if isinstance(v, set) else v for name, v in config.items()}
    (directory / CONFIG_FILE).write_text(json.dumps(fields))
    small_cache.adapters.register("a", directory)


def test_a_probe_needs_no_model(tmp_path: Path, small_cache: Cache) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 3, 1, dtype=torch.bfloat16)
    report = probe_adapter(write_adapter(tmp_path, tensors))
    assert report.ranks == {module.name: 3 for module in small_cache.config.modules}
    assert report.num_tensors == len(tensors)
    assert report.dtypes == ["BF16"]
    assert report.parameters == sum(t.numel() for t in tensors.values())
    assert report.bytes_on_disk == (tmp_path / WEIGHTS_FILE).stat().st_size


def test_names_without_pefts_prefix_load_too(small_cache: Cache, tmp_path: Path) -> None:
    tensors = adapter_tensors(small_cache.config.modules, 2, 1)
    bare = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    small_cache.adapters.register("a", write_adapter(tmp_path, bare))
    request = small_cache.request(1, "a")
    add_and_wait(small_cache.peft, request)
    actual = small_cache.peft.task_weights(request.lora_task_id, "host")
    assert_same_weights(actual, weights_of(tensors, torch.float32))
