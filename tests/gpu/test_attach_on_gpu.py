"""`attach` on a GPU answers as PEFT does on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.support import attachments
from tests.support.attachments import MODELS, Saved, assert_equal, linear_modules
from tests.support.encoders import answer_of, make_batch
from tests.support.equality_bench import room_for_largest

from pagedlora import (
    Attachment,
    InvalidArgumentError,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    attach,
)

saved_models = attachments.saved_models


@contextmanager
def attached_on_gpu(
    module: torch.nn.Module, directories: dict[str, Path], num_adapters: int | None = None
) -> Iterator[tuple[Attachment, PeftCacheManager]]:
    """With room on the GPU for so many of the largest adapters, and a little more; None: all."""
    room = int(1.1 * room_for_largest(directories, num_adapters))
    config = LoraModelConfig.from_module(module, linear_modules(module), max_lora_rank=16)
    cache = PeftCacheManager(
        config,
        PeftCacheConfig(host_cache_size="4MiB", device_cache_size=room, page_size=1024),
        device="cuda",
    )
    adapters = LoraManager(config, cache)
    for name, path in directories.items():
        adapters.register(name, path)
    try:
        with attach(module, cache, adapters) as attached:
            yield attached, cache
        assert (cache.active_tasks, cache.open_lease_tasks()) == ({}, set())
        cache.check_invariants()
    finally:
        cache.close()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("room", [None, 2])
def test_mixed_batches_equal_peft(
    saved_models: dict[str, Saved], kind: str, room: int | None
) -> None:
    """With room for all, and with less than that: leases end while kernels may still run."""
    build, directories, oracle = saved_models[kind]
    module = build().to("cuda")
    dice = random.Random(kind)
    with attached_on_gpu(module, directories, room) as (attached, cache):
        assert cache.device == "cuda:0"
        answers, expected = [], []
        for step in range(24):
            pair = dice.sample([*directories], 2)
            names = [dice.choice([*pair, None]) for _ in range(dice.randrange(1, 6))]
            batch = make_batch(len(names), dice.randrange(1, 9), seed=step)
            with torch.inference_mode(), attached.rows(names):
                output = module(**{key: value.to("cuda") for key, value in batch.items()})
            answers.append(answer_of(output))
            expected.append(oracle(names, **batch))
        for ours, theirs in zip(answers, expected, strict=True):
            assert_equal(ours.cpu(), theirs)
        if room is not None:
            assert cache.stats.device.tasks_evicted > 0


def test_calls_on_another_stream(saved_models: dict[str, Saved]) -> None:
    build, directories, oracle = saved_models["classifier"]
    module = build().to("cuda")
    names = ["spam", None, "tone"]
    batch = make_batch(3, 6, seed=1)
    on_gpu = {key: value.to("cuda") for key, value in batch.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with (
        attached_on_gpu(module, directories) as (attached, _),
        torch.inference_mode(),
        attached.rows(names),
    ):
        with torch.cuda.stream(stream):
            first = answer_of(module(**on_gpu))
        torch.cuda.current_stream().wait_stream(stream)
        second = answer_of(module(**on_gpu))
    torch.cuda.synchronize()
    assert_equal(first.cpu(), oracle(names, **batch))
    assert_equal(second.cpu(), oracle(names, **batch))


def test_a_module_elsewhere_is_refused(saved_models: dict[str, Saved]) -> None:
    build, directories, _ = saved_models["classifier"]
    with (
        pytest.raises(InvalidArgumentError, match="is on cpu, and the cache's device tier on cuda"),
        attached_on_gpu(build(), directories),
    ):
        pytest.fail("it was attached")
