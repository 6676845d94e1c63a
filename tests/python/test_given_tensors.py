"""Adapters given as tensors: the same as from files, and nothing of them stays with the caller."""

from __future__ import annotations

import gc
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.support.adapters import (
    PREFIX,
    Tensors,
    adapter_config,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, Call, add_and_wait, check_pages, wait_until
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterReadError,
    InvalidArgumentError,
    LlmRequest,
    LoraManager,
    PagedLoraError,
    PagedLoraWarning,
    PeftTensors,
    UnsupportedAdapterError,
)
from pagedlora.loaders.pickled import PrivateCopy


@pytest.fixture(autouse=True)
def private_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made in these tests."""
    root = tmp_path / "private"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def tensors_of(cache: Cache, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return adapter_tensors(cache.config.modules, 4, seed, dtype=dtype)


def stored(cache: Cache, task_id: int) -> Mapping[str, Any]:
    """What the host tier has of a task."""
    request = LlmRequest(1, lora_task_id=task_id)
    add_and_wait(cache.peft, request)
    weights = cache.peft.task_weights(task_id, "host")
    cache.peft.mark_request_done(request)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_the_adapter_that_a_file_of_them_is(
    small_cache: Cache, tmp_path: Path, dtype: torch.dtype
) -> None:
    """One generation, one task, whichever came first (design 3.5)."""
    manager, tensors = small_cache.adapters, tensors_of(small_cache, dtype=dtype)
    given = manager.load_from_tensors("a", adapter_config(tensors), tensors)
    file = manager.load("b", write_adapter(tmp_path / "b", tensors))
    assert given.generation is not None
    assert (given.generation, given.task_id) == (file.generation, file.task_id)
    assert (given.ranks, given.scales, given.report) == (file.ranks, file.scales, file.report)
    assert (given.path, given.tiers) == ("(tensors)", ("host",))
    assert_same_weights(stored(small_cache, given.task_id), weights_of(tensors, torch.float32))


def test_they_are_copied_read_again_and_forgotten_with_the_name(
    small_cache: Cache, private_root: Path
) -> None:
    manager, tensors = small_cache.adapters, tensors_of(small_cache)
    expected = weights_of({name: each.clone() for name, each in tensors.items()}, torch.float32)
    info = manager.load_from_tensors("a", adapter_config(tensors), tensors)
    for tensor in tensors.values():
        tensor.zero_()
    small_cache.peft.evict_unowned("host")
    assert small_cache.peft.resident_tasks("host") == 0
    assert_same_weights(stored(small_cache, info.task_id), expected)
    assert small_cache.peft.stats.source_rereads == 1
    [directory] = private_root.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    manager.unload("a")
    gc.collect()
    assert list(private_root.iterdir()) == []


def test_nothing_of_them_is_kept_in_memory(small_cache: Cache) -> None:
    """Adapter bytes live in the tiers and in files, and nowhere else (design L7)."""
    tensors = tensors_of(small_cache)
    config = adapter_config(tensors)
    refs = [weakref.ref(tensor) for tensor in tensors.values()]
    small_cache.adapters.load_from_tensors("a", config, tensors)
    del tensors
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_pinned_one_stays_in_the_host_tier(small_cache: Cache) -> None:
    tensors = tensors_of(small_cache)
    info = small_cache.adapters.load_from_tensors(
        "a", adapter_config(tensors), tensors, pinned=True
    )
    small_cache.peft.evict_unowned("host")
    assert (info.pinned, small_cache.adapters.get("a").tiers) == (True, ("host",))
    small_cache.adapters.unpin("a")


def with_shared_storage(tensors: Tensors) -> Tensors:
    """The same values, all in one storage."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "transposed": lambda tensors: {n: t.t().contiguous().t() for n, t in tensors.items()},
    "one storage": with_shared_storage,
    "parameters": lambda tensors: {n: torch.nn.Parameter(t) for n, t in tensors.items()},
    "lazily negated": lambda tensors: {n: torch._neg_view(-t) for n, t in tensors.items()},
    "without prefix": lambda tensors: {n.removeprefix(PREFIX): t for n, t in tensors.items()},
}


@pytest.mark.parametrize("name", FORMS)
def test_how_tensors_lie_in_memory_does_not_count(small_cache: Cache, name: str) -> None:
    tensors = tensors_of(small_cache)
    config = adapter_config(tensors)
    plain = small_cache.adapters.load_from_tensors("a", config, tensors)
    other = small_cache.adapters.load_from_tensors("b", config, FORMS[name](tensors))
    assert plain.generation == other.generation


def test_pefts_own_configuration_does_as_its_dictionary_does(small_cache: Cache) -> None:
    """With its set of targets and its enumerations."""
    manager, tensors = small_cache.adapters, tensors_of(small_cache)
    targets = adapter_config(tensors)["target_modules"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    assert isinstance(config.to_dict()["target_modules"], set)
    first = manager.load_from_tensors("a", config.to_dict(), tensors)
    second = manager.load_from_tensors("b", config, tensors)
    assert first.generation == second.generation
    assert set(first.scales.values()) == {1.5}


# ---- names -------------------------------------------------------------------------------------


def test_a_name_is_loaded_again_with_the_same_and_not_with_other_tensors(
    small_cache: Cache, tmp_path: Path, private_root: Path
) -> None:
    manager, tensors = small_cache.adapters, tensors_of(small_cache)
    config, others = adapter_config(tensors), tensors_of(small_cache, seed=2)
    first = manager.load_from_tensors("a", config, tensors)
    again = manager.load_from_tensors("a", dict(config), {n: t.clone() for n, t in tensors.items()})
    assert again.task_id == first.task_id
    for source in (PeftTensors(config, others), PeftTensors({**config, "lora_alpha": 1}, tensors)):
        with pytest.raises(InvalidArgumentError, match=r"use reload\(\)"):
            manager.load("a", source)
        with pytest.raises(InvalidArgumentError):
            manager.register("a", source)
    with pytest.raises(InvalidArgumentError, match=r"use reload\(\)"):
        manager.load("a", write_adapter(tmp_path / "a", tensors))
    gc.collect()
    assert manager.get("a").generation == first.generation
    assert len(list(private_root.iterdir())) == 1


def test_a_name_is_reloaded_with_other_tensors(small_cache: Cache, private_root: Path) -> None:
    manager, tensors = small_cache.adapters, tensors_of(small_cache)
    others = tensors_of(small_cache, seed=2)
    first = manager.load_from_tensors("a", adapter_config(tensors), tensors)
    second = manager.reload(
        "a", PeftTensors(adapter_config(others), others), expected_generation=first.generation
    )
    assert second.generation != first.generation
    assert_same_weights(stored(small_cache, second.task_id), weights_of(others, torch.float32))
    gc.collect()
    assert len(list(private_root.iterdir())) == 1


def test_reloads_of_the_same_tensors_keep_two_files_at_most(
    small_cache: Cache, private_root: Path
) -> None:
    manager, tensors = small_cache.adapters, tensors_of(small_cache)
    config = adapter_config(tensors)
    task = manager.load_from_tensors("a", config, tensors).task_id
    for _ in range(4):
        assert manager.reload("a", PeftTensors(config, tensors)).task_id == task
    gc.collect()
    assert len(list(private_root.iterdir())) == 2


def test_a_reload_of_the_same_tensors_mends_what_lost_its_files(
    small_cache: Cache, private_root: Path
) -> None:
    """Somebody cleaned the directory for temporary files."""
    manager, tensors = small_cache.adapters, tensors_of(small_cache)
    source = PeftTensors(adapter_config(tensors), tensors)
    manager.load("a", source)
    for _ in range(3):
        manager.reload("a", source)
        for directory in private_root.iterdir():
            shutil.rmtree(directory)
    info = manager.reload("a", source)
    small_cache.peft.evict_unowned("host")
    assert_same_weights(stored(small_cache, info.task_id), weights_of(tensors, torch.float32))


def test_tensors_for_a_name_that_cannot_have_them_are_not_copied(
    small_cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, tensors = small_cache.adapters, tensors_of(small_cache)
    source = PeftTensors(adapter_config(tensors), tensors)
    manager.register("a", source)
    monkeypatch.setattr(tempfile, "mkdtemp", None)
    with pytest.raises(InvalidArgumentError, match="already registered"):
        manager.register("a", source)
    with pytest.raises(AdapterNotFoundError, match="no adapter 'b'"):
        manager.reload("b", source)


def test_a_child_process_leaves_the_files_to_its_parent(
    private_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with copies of the parent's objects, and the parent still reads the files."""
    copy = PrivateCopy("x")
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        del copy
        gc.collect()
    assert len(list(private_root.iterdir())) == 1
    copy = PrivateCopy("y")
    del copy
    gc.collect()
    assert len(list(private_root.iterdir())) == 1


def test_a_root_does_not_confine_what_is_no_path(small_cache: Cache, tmp_path: Path) -> None:
    manager = LoraManager(small_cache.config, small_cache.peft, adapter_root=tmp_path)
    tensors = tensors_of(small_cache)
    assert manager.load_from_tensors("a", adapter_config(tensors), tensors).tiers == ("host",)
    manager.unload("a")


def test_a_peft_directory_is_loaded_by_its_own_name_too(small_cache: Cache, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", tensors_of(small_cache))
    info = small_cache.adapters.load_from_hf("a", path, pinned=True)
    assert (info.path, info.pinned) == (str(path), True)
    small_cache.adapters.unpin("a")


# ---- refusals ----------------------------------------------------------------------------------


def refuse(
    cache: Cache, config: Any, tensors: Any, *errors: type[PagedLoraError]
) -> PagedLoraError:
    """Loads, expects one of the errors, and that nothing is left."""
    with pytest.raises(errors or (AdapterFormatError, UnsupportedAdapterError)) as caught:
        cache.adapters.load_from_tensors("mine", config, tensors)
    assert len(cache.adapters) == 0
    check_pages(cache.peft)
    assert len(str(caught.value)) < 1000
    error = caught.value.with_traceback(None)  # its frames keep what was given
    error.__context__ = None
    del caught
    gc.collect()
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    return error


def first_name(tensors: Tensors) -> str:
    return next(iter(tensors))


BROKEN: dict[str, Callable[[Tensors], Any]] = {
    "nothing": lambda tensors: {},
    "an empty tensor": lambda tensors: {**tensors, first_name(tensors): torch.ones(0, 48)},
    "a tensor too many": lambda tensors: {**tensors, "x": torch.ones(3)},
    "half a pair": lambda tensors: {n: t for n, t in tensors.items() if n != first_name(tensors)},
    "float64": lambda tensors: {n: t.double() for n, t in tensors.items()},
    "integers": lambda tensors: {n: t.int() for n, t in tensors.items()},
    "float8": lambda tensors: {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()},
    "complex": lambda tensors: {n: t.to(torch.complex64) for n, t in tensors.items()},
    "infinity": lambda tensors: {n: t.float() / 0 for n, t in tensors.items()},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_file_is_refused_for_they_are_refused_for(
    small_cache: Cache, tmp_path: Path, name: str
) -> None:
    tensors = tensors_of(small_cache)
    broken, config = BROKEN[name](tensors), adapter_config(tensors)
    error = refuse(small_cache, config, broken)
    assert "tensors of adapter 'mine'" in str(error)
    path = write_adapter(tmp_path / "a", broken, **config)
    with pytest.raises(PagedLoraError) as caught:
        small_cache.adapters.load("file", path)
    assert (type(error), error.code) == (type(caught.value), caught.value.code)
    assert getattr(error, "tensor", "") == getattr(caught.value, "tensor", "")


class Wrapper(torch.Tensor):
    """Has its values in other tensors, as distributed and packed ones do."""

    inner: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.Tensor._make_wrapper_subclass(Wrapper, tensor.shape, dtype=tensor.dtype)
        whole.inner = tensor
        return whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [each.inner if isinstance(each, Wrapper) else each for each in args]
        return Wrapper.of(func(*inner, **(kwargs or {})))


class WithAShape(torch.Tensor):
    """Says that it has the shape which the model needs."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([4, 48])


def test_a_shape_that_is_not_the_tensors_own_is_not_believed(small_cache: Cache) -> None:
    """Else memory behind its values would be read."""
    tensors = tensors_of(small_cache)
    tensors[first_name(tensors)] = torch.ones(2, 3).as_subclass(WithAShape)
    error = refuse(small_cache, adapter_config(tensors, r=4), tensors)
    assert "has rank 2 (shape [2, 3])" in str(error)


def test_tensors_that_are_there_only_when_they_are_asked_for_are_asked_once(
    small_cache: Cache,
) -> None:
    """What was checked is what is copied."""

    class Lazy(dict[str, Any]):
        asked = 0

        def items(self) -> Any:
            self.asked += 1
            return super().items() if self.asked == 1 else {"x": 7}.items()

    tensors = tensors_of(small_cache)
    info = small_cache.adapters.load_from_tensors("a", adapter_config(tensors), Lazy(tensors))
    assert_same_weights(stored(small_cache, info.task_id), weights_of(tensors, torch.float32))


NO_TENSORS: dict[str, Callable[[Tensors], Any]] = {
    "a list": lambda tensors: list(tensors.values()),
    "None": lambda tensors: None,
    "a number as a name": lambda tensors: {**tensors, 7: torch.ones(3)},
    "an array": lambda tensors: {n: t.float().numpy() for n, t in tensors.items()},
    "without values": lambda tensors: {n: t.to("meta") for n, t in tensors.items()},
    "sparse": lambda tensors: {n: t.to_sparse() for n, t in tensors.items()},
    "quantised": lambda tensors: {
        n: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint8) for n, t in tensors.items()
    },
    "nested": lambda tensors: {
        n: torch.nested.nested_tensor([t], layout=torch.jagged) for n, t in tensors.items()
    },
    "nested and strided": lambda tensors: {
        n: torch.nested.nested_tensor([t]) for n, t in tensors.items()
    },
    "a wrapper's": lambda tensors: {n: Wrapper.of(t) for n, t in tensors.items()},
    "fake": lambda tensors: {n: FakeTensorMode().from_tensor(t) for n, t in tensors.items()},
    "not initialised": lambda tensors: {n: UninitializedParameter() for n in tensors},
    "a view of more than there is memory": lambda tensors: {
        n: torch.ones(1, 1).expand(1 << 20, 1 << 20) for n in tensors
    },
    "a name of no text": lambda tensors: {"\ud800": torch.ones(3)},
    "the name of metadata": lambda tensors: {**tensors, "__metadata__": torch.ones(3)},
}


@pytest.mark.parametrize("name", NO_TENSORS)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor", "ignore:.*nested tensors")
def test_what_no_file_could_have_is_refused_by_the_adapters_name(
    small_cache: Cache, name: str
) -> None:
    tensors = tensors_of(small_cache)
    error = refuse(
        small_cache, adapter_config(tensors), NO_TENSORS[name](tensors), AdapterFormatError
    )
    assert "tensors of adapter 'mine'" in str(error)


class Colour(Enum):
    """No value of PEFT's."""

    RED = object()


def circular() -> dict[str, Any]:
    config: dict[str, Any] = {"r": 4}
    config["runtime_config"] = config
    return config


@pytest.mark.parametrize(
    "config",
    [
        None,
        [("r", 4)],
        "r=4",
        {"r": 4, "x": object()},
        {"r": 4, "x": Colour.RED},
        pytest.param({"r": 4, "x": {1, "a"}}, id="a set without an order"),
        {("r",): 4},
        {"r": 4, "x": b"y"},
        circular(),
        {},
        {"r": "4", "lora_alpha": 8, "target_modules": ["q_proj"]},
    ],
    ids=lambda config: f"{config!r:.20}",
)
def test_a_configuration_that_no_file_could_have_is_refused(
    small_cache: Cache, config: Any
) -> None:
    error = refuse(small_cache, config, tensors_of(small_cache), AdapterFormatError)
    assert "config of adapter 'mine'" in str(error)


def test_what_is_ignored_is_warned_of_by_the_adapters_name(small_cache: Cache) -> None:
    """Else the second one would be silent: Python shows equal warnings once."""
    manager = LoraManager(small_cache.config, small_cache.peft, strict=False)
    tensors = tensors_of(small_cache)
    config = adapter_config(tensors, tomorrow=1)
    for name in ("first", "second"):
        with pytest.warns(PagedLoraWarning, match=f"adapter '{name}': ignored tomorrow=1"):
            manager.register(name, PeftTensors(config, tensors))


def test_fields_are_refused_as_those_of_a_file(small_cache: Cache) -> None:
    tensors = tensors_of(small_cache)
    config = adapter_config(tensors, layer_replication=[[0, 1]])
    error = refuse(small_cache, config, tensors, UnsupportedAdapterError)
    assert getattr(error, "field", "") == "layer_replication"
    whole = {**tensors, "base_model.model.lm_head.weight": torch.ones(3, 4)}
    config = adapter_config(tensors, modules_to_save=["lm_head"])
    error = refuse(small_cache, config, whole, UnsupportedAdapterError)
    assert re.search(r"'tensors of adapter 'mine'' has 1 such tensor of 48 bytes", str(error))


def test_without_room_for_the_copy_nothing_is_registered(
    small_cache: Cache, private_root: Path
) -> None:
    tensors = tensors_of(small_cache)
    private_root.rmdir()
    with pytest.raises(AdapterReadError, match="temporary file"):
        small_cache.adapters.load_from_tensors("a", adapter_config(tensors), tensors)
    assert len(small_cache.adapters) == 0
    private_root.mkdir()


def test_calls_for_one_name_at_once_have_one_result(small_cache: Cache, private_root: Path) -> None:
    """Those with the same tensors; others are refused, whoever comes first."""
    manager = small_cache.adapters
    contents = [tensors_of(small_cache, seed) for seed in (1, 1, 2, 1, 2, 1)]
    configs = [adapter_config(tensors) for tensors in contents]
    calls = [
        Call(manager.load_from_tensors, "a", config, tensors)
        for config, tensors in zip(configs, contents, strict=True)
    ]
    results: list[set[int]] = [set(), set()]
    for call, content in zip(calls, (0, 0, 1, 0, 1, 0), strict=True):
        try:
            results[content].add(call.result().task_id)
        except InvalidArgumentError:
            results[content].add(-1)
    assert sorted(results, key=max) == [{-1}, {manager.task_id("a")}]
    del calls, call

    def is_one_kept() -> bool:
        gc.collect()  # threads end a little after their results
        return len(list(private_root.iterdir())) == 1

    assert wait_until(is_one_kept)
