"""Small inputs that other engines met in the field: odd ranks, names and paths, and long lives."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.support.adapters import (
    PREFIX,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
    write_random_adapter,
)
from tests.support.cache_fixtures import Cache, add_and_wait
from tests.support.row_kinds import randomise_layer, silent_peft
from torch import nn

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    UnsupportedAdapterError,
    attach,
)

# ---- ranks and targets -------------------------------------------------------------------------

ROUNDS = 100
"""Of loads, reloads and unloads between two looks at the memory."""
RANKS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 31, 32, 33, 64, 96, 128, 256)


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_up_to_the_maximum_is_in_the_pages_as_it_was_trained(
    make_cache: Callable[..., Cache], tmp_path: Path, rank: int
) -> None:
    cache = make_cache(max_lora_rank=256, num_layers=1, host_pages=2000, device_pages=2000)
    tensors = adapter_tensors(cache.config.modules, rank, seed=rank, integers=False)
    info = cache.adapters.register("a", write_adapter(tmp_path / "a", tensors, lora_alpha=rank))
    assert set(info.ranks.values()) == {rank}
    add_and_wait(cache.peft, cache.request(1, "a"))
    with cache.peft.ensure_batch([cache.request(1, "a")], []):
        for tier in ("host", "device"):
            stored = cache.peft.task_weights(info.task_id, tier)
            assert_same_weights(stored, weights_of(tensors, torch.float32))
    cache.peft.mark_request_done(cache.request(1, "a"))
    over = adapter_tensors(cache.config.modules[:1], 257, seed=1)
    with pytest.raises(UnsupportedAdapterError, match="257 is greater than max_lora_rank 256"):
        cache.adapters.register("b", write_adapter(tmp_path / "b", over))


@pytest.mark.parametrize("targets", ["all", "q", ["proj"], ["Q_PROJ"], [""]], ids=repr)
def test_targets_that_mean_none_of_the_files_modules_are_refused(
    small_cache: Cache, tmp_path: Path, targets: Any
) -> None:
    """PEFT finds no module either: "all" is a regular expression like any other."""
    directory = write_random_adapter(
        tmp_path / "a", small_cache.config, rank=2, seed=1, target_modules=targets
    )
    with pytest.raises(AdapterFormatError, match="the configuration does not target"):
        small_cache.adapters.register("a", directory)


# ---- names of modules --------------------------------------------------------------------------


class OddNames(nn.Module):
    """Modules whose names end in a number, or are on nobody's list."""

    def __init__(self) -> None:
        super().__init__()
        self.to_out = nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.1))
        self.proj = nn.Sequential(nn.Linear(24, 16))
        self.in_proj_qkvz = nn.Linear(16, 40, bias=False)
        self.experts = nn.ModuleList(nn.Linear(40, 8) for _ in range(11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_proj_qkvz(self.proj(self.to_out(x)))
        return torch.stack([expert(x) for expert in self.experts], dim=1)


ODD_TARGETS: dict[str, Any] = {
    "one of two with the same end": ["to_out.0"],
    "the other one": ["proj.0"],
    "by number": ["0"],
    "linear attention": ["in_proj_qkvz"],
    "one expert of many": ["experts.1"],
    "experts": r"experts\.\d+",
}


def build_odd() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return OddNames().eval()


def test_any_linear_module_is_meant_by_its_whole_name(tmp_path: Path) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    expected: dict[str, torch.Tensor] = {}
    for name, targets in ODD_TARGETS.items():
        with silent_peft(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            config = peft.LoraConfig(r=3, target_modules=targets)
            wrapped = peft.get_peft_model(build_odd(), config).eval()
            generator = torch.Generator().manual_seed(3)
            for module in wrapped.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    randomise_layer(module, generator)
            wrapped.save_pretrained(tmp_path / name)
            expected[name] = wrapped(x)
    model = build_odd()
    config = LoraModelConfig.from_module(model)
    cache = PeftCacheManager(
        config, PeftCacheConfig(host_cache_size=2**19, device_cache_size=2**19)
    )
    adapters = LoraManager(config, cache)
    base = build_odd()(x).detach()
    with attach(model, cache, adapters) as attached:
        for name in ODD_TARGETS:
            adapters.register(name, tmp_path / name)
            with torch.inference_mode(), attached.rows([name] * len(x)):
                torch.testing.assert_close(model(x), expected[name], rtol=1e-4, atol=1e-5)
            assert (expected[name] - base).abs().max() > 0.01
    cache.close()


# ---- paths -------------------------------------------------------------------------------------


def test_a_local_path_is_taken_in_every_form(
    small_cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_random_adapter(tmp_path / "ä b(1)", small_cache.config, rank=1, seed=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    forms: list[str | Path] = [
        directory,
        str(directory),
        f"{directory}/",
        "ä b(1)",
        "./ä b(1)/",
        Path("ä b(1)"),
        f"../{tmp_path.name}/ä b(1)",
        f"{tmp_path}//ä b(1)/.",
        "~/ä b(1)",
        Path("~") / "ä b(1)",
    ]
    generations = {small_cache.adapters.load(f"{form!r}", form).generation for form in forms}
    assert len(generations) == 1
    confined = LoraManager(small_cache.config, small_cache.peft, adapter_root=tmp_path / "ä b(1)")
    with pytest.raises(AdapterNotFoundError):  # beneath a root it is a name like any other
        confined.load("a", "~/ä b(1)")
    for missing in ("~/nobody/adapter", "somebody/adapter", "adapter@main"):
        with pytest.raises(AdapterNotFoundError):
            small_cache.adapters.load("missing", missing)


# ---- long lives --------------------------------------------------------------------------------


def open_files() -> int:
    """How many are open, without those that the garbage of earlier tests holds."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_a_long_life_of_loads_unloads_and_reloads_leaves_nothing_behind(
    small_cache: Cache, tmp_path: Path
) -> None:
    """Promise 2: memory depends on what is registered now, not on what ever was."""
    manager = small_cache.adapters
    directories = [
        write_random_adapter(tmp_path / str(seed), small_cache.config, rank=1 + seed % 2, seed=seed)
        for seed in range(4)
    ]
    manager.load("stays", directories[0])

    def live(rounds: int) -> None:
        for count in range(rounds):
            manager.load(f"name {count}", directories[count % 4])
            manager.reload("stays", directories[(count + 1) % 4])
            add_and_wait(small_cache.peft, small_cache.request(count, f"name {count}"))
            small_cache.peft.mark_request_done(small_cache.request(count, f"name {count}"))
            manager.unload(f"name {count}", timeout_s=0)

    def traced_bytes() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        live(2 * ROUNDS)  # until everything is remembered that is remembered once
        files, growth = open_files(), []
        for _ in range(3):
            before = traced_bytes()
            live(ROUNDS)
            growth.append(traced_bytes() - before)
    finally:
        tracemalloc.stop()
    # What others of the process do may add to one of them; a leak adds to each.
    assert min(growth) < 50 * ROUNDS, f"bytes that {ROUNDS} rounds have left: {growth}"
    assert open_files() <= files
    assert [info.name for info in manager.list()] == ["stays"]
    assert manager.retired() == ()
    assert small_cache.peft.resident_tasks("host") <= 1


def test_two_threads_with_adapters_of_their_own_do_not_cross(tmp_path: Path) -> None:
    """No adapter is active for the whole process: each block names its own."""
    models = [build_odd() for _ in range(2)]
    config = LoraModelConfig.from_module(models[0])
    cache = PeftCacheManager(
        config,
        PeftCacheConfig(host_cache_size=2**19, device_cache_size=2**19, max_inflight_batches=2),
    )
    adapters = LoraManager(config, cache)
    wanted = []
    x = torch.ones(3, 16)
    for seed, letter in enumerate("ab"):
        name = f"{PREFIX}in_proj_qkvz.lora_"
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(2, 16, generator=generator), torch.randn(40, 2, generator=generator)
        directory = write_adapter(
            tmp_path / letter, {f"{name}A.weight": a, f"{name}B.weight": b}, lora_alpha=2
        )
        adapters.register(letter, directory)
        merged = build_odd()
        with torch.no_grad():
            merged.in_proj_qkvz.weight += b @ a
            wanted.append(merged(x))
    errors: list[BaseException] = []
    together = threading.Barrier(2)

    def run(position: int) -> None:
        try:
            with attach(models[position], cache, adapters) as attached:
                together.wait(60)
                for _ in range(100):
                    with torch.inference_mode(), attached.rows(["ab"[position]] * 3):
                        answer = models[position](x)
                    torch.testing.assert_close(answer, wanted[position], rtol=1e-4, atol=1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(position,)) for position in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    cache.check_invariants()
    cache.close()
