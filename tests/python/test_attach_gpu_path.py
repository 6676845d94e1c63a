"""`attach` on a GPU, with the CPU's operator behind the GPU's interface: who is told what, when."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support import attachments
from tests.support.adapters import write_random_adapter
from tests.support.attachments import MODELS, Saved, Setup, assert_equal
from tests.support.encoders import make_batch
from tests.support.gpu_path import SIZES, STREAM, GpuLoraOperatorOnTheCpu, lead_to_gpu
from torch import nn

from pagedlora import (
    BatchLease,
    GpuCallError,
    InvalidArgumentError,
    LoraModelConfig,
    PeftCacheManager,
    UnsupportedModelError,
    attach,
    attachment,
)
from pagedlora.engine import gpu_lora
from pagedlora.engine.gpu_lora import GpuLoraSizes

make_setup = attachments.make_setup
saved_models = attachments.saved_models
MakeSetup = Callable[..., Setup]


class Pooled(nn.Module):
    """The second module sees one token per row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.pooler = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.pooler(self.proj(self.proj(x))[:, 0])
        return result


@pytest.fixture(autouse=True)
def _gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    lead_to_gpu(monkeypatch)
    monkeypatch.setattr(attachment, "current_stream", lambda _: GpuLoraOperatorOnTheCpu.stream)


@pytest.fixture
def closed_on(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams on which leases are closed."""
    streams: list[object] = []
    close = BatchLease.close

    def noted(lease: BatchLease, stream: object = None) -> None:
        streams.append(stream)
        close(lease, stream)

    monkeypatch.setattr(BatchLease, "close", noted)
    return streams


def make_pooled(make_setup: MakeSetup, directory: Path) -> Setup:
    module = Pooled().requires_grad_(False)
    config = LoraModelConfig.from_module(module)
    directories = {
        name: write_random_adapter(directory / name, config, rank=2, seed=seed)
        for seed, name in enumerate("abc")
    }
    return make_setup(module, directories)


@pytest.mark.parametrize("kind", MODELS)
def test_mixed_batches_equal_peft(
    saved_models: dict[str, Saved], make_setup: MakeSetup, kind: str
) -> None:
    build, directories, oracle = saved_models[kind]
    setup = make_setup(build(), directories)
    dice = random.Random(kind)
    for step in range(6):
        names = [dice.choice([*directories, None]) for _ in range(dice.randrange(1, 6))]
        batch = make_batch(len(names), dice.randrange(1, 9), seed=step)
        assert_equal(setup.run(names, batch), oracle(names, **batch))


def test_the_batch_is_told_when_its_shape_changes(make_setup: MakeSetup, tmp_path: Path) -> None:
    setup = make_pooled(make_setup, tmp_path)
    (lora,) = GpuLoraOperatorOnTheCpu.made
    setup.run(["a", None], {"x": torch.ones(2, 5, 8)})
    assert lora.num_batches == 2  # five tokens per row, then one
    assert [count for _, count in lora.segments] == [1, 1]
    with torch.inference_mode(), setup.attached.rows(["a", None]):
        for _ in range(3):
            setup.module(torch.ones(2, 1, 8))
    assert lora.num_batches == 3
    setup.run([None, None], {"x": torch.ones(2, 5, 8)})
    assert lora.num_batches == 3  # nobody's adapter
    assert lora.batch is None, "the lease is let go when a block ends"


def test_tables_grow_with_the_batches(
    make_setup: MakeSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to_gpu(monkeypatch, GpuLoraSizes(SIZES.layout, max_rows=4, max_tasks=1))
    setup = make_pooled(make_setup, tmp_path)
    for names, tokens in (("a", 4), ("a", 5), ("a", 40), ("ab", 1), ("abc", 9), ("bc", 2)):
        setup.run([*names], {"x": torch.ones(len(names), tokens, 8)})
    sizes = [lora.sizes for lora in GpuLoraOperatorOnTheCpu.made]
    assert sizes == [(4, 1), (8, 1), (40, 1), (40, 2), (40, 4)]


def test_tables_that_do_not_fit_fail_their_block_alone(
    make_setup: MakeSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_to_gpu(monkeypatch, GpuLoraSizes(SIZES.layout, max_rows=4, max_tasks=1))
    setup = make_pooled(make_setup, tmp_path)
    large, small = {"x": torch.ones(1, 9, 8)}, {"x": torch.ones(1, 3, 8)}
    before = setup.run(["a"], small)
    with monkeypatch.context() as full:
        full.setattr(gpu_lora._core, "GpuLoraOperator", _fail)
        for _ in range(2):
            with pytest.raises(GpuCallError):
                setup.run(["a"], large)
        assert torch.equal(setup.run(["a"], small), before)
    assert not torch.equal(setup.run(["a"], large), setup.run(["b"], large))


def _fail(*_: object, **__: object) -> None:
    raise GpuCallError("cudaMalloc: out of memory")


def test_leases_are_closed_behind_the_work(
    make_setup: MakeSetup,
    tmp_path: Path,
    closed_on: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the stream of the calls; if there were several, behind all that the GPU does."""
    setup = make_pooled(make_setup, tmp_path)
    x = torch.ones(1, 5, 8)
    setup.run(["a"], {"x": x})
    with setup.attached.rows(["a"], partial=True):
        pass
    with pytest.raises(ZeroDivisionError), setup.attached.rows(["a"]):
        raise ZeroDivisionError
    assert closed_on == [STREAM] * 3

    def switch(stream: int) -> None:
        monkeypatch.setattr(GpuLoraOperatorOnTheCpu, "stream", stream)

    with torch.inference_mode(), setup.attached.rows(["a"]):
        switch(STREAM + 1)
        first = setup.module(x)
        switch(STREAM)
    assert closed_on.pop() == STREAM + 1
    with torch.inference_mode(), setup.attached.rows(["a"]):
        setup.module(x)
        switch(STREAM + 1)
        assert torch.equal(setup.module(x), first)
    assert closed_on.pop() is None


def test_a_module_elsewhere_than_the_cache_is_refused(
    make_setup: MakeSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make_pooled(make_setup, tmp_path)
    assert setup.cache.device == "cpu"
    setup.attached.detach()
    monkeypatch.setattr(PeftCacheManager, "device", "cuda:1")
    with pytest.raises(
        InvalidArgumentError,
        match=r"'proj' is on cpu, and the cache's device tier on cuda:1.*device='cpu'.*"
        r"module.to\('cuda:1'\)",
    ):
        attach(setup.module, setup.cache, setup.adapters)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in setup.module.modules())


def test_an_input_from_elsewhere_is_refused(make_setup: MakeSetup, tmp_path: Path) -> None:
    setup = make_pooled(make_setup, tmp_path)
    with (
        torch.inference_mode(),
        setup.attached.rows(["a"], partial=True),
        pytest.raises(UnsupportedModelError, match="called on meta: it was attached on cpu"),
    ):
        setup.module.proj(torch.ones(1, 5, 8, device="meta"))
