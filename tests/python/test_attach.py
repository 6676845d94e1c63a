"""Adapters in any module, without the engine: equal to PEFT, and it comes back as it was."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.support import attachments
from tests.support.attachments import MODELS, Saved, Setup, assert_equal, attach_to
from tests.support.encoders import answer_of, make_batch

from pagedlora import InvalidArgumentError, attach

make_setup = attachments.make_setup
saved_models = attachments.saved_models


@pytest.mark.parametrize("kind", MODELS)
def test_mixed_batches_equal_peft_with_less_room_than_adapters(
    saved_models: dict[str, Saved], make_setup: Callable[..., Setup], kind: str
) -> None:
    """Promise 1, with room for the two largest adapters on the device and three in the host."""
    build, directories, oracle = saved_models[kind]
    sizes = make_setup(build(), directories)
    pages = sorted(info.num_pages for info in sizes.adapters.list())
    setup = make_setup(
        build(), directories, device_pages=sum(pages[-2:]), host_pages=sum(pages[-3:])
    )
    dice = random.Random(kind)
    for step in range(24):
        pair = dice.sample([*directories], 2)
        names = [dice.choice([*pair, None]) for _ in range(dice.randrange(1, 6))]
        batch = make_batch(len(names), dice.randrange(1, 9), seed=step)
        assert_equal(setup.run(names, batch), oracle(names, **batch))
    stats = setup.cache.stats
    assert stats.device.tasks_evicted > len(directories)
    assert stats.host.tasks_evicted > 0
    assert stats.source_reads > len(directories)


@pytest.mark.parametrize("kind", MODELS)
def test_all_adapters_answer_differently(saved_models: dict[str, Saved], kind: str) -> None:
    """Otherwise equality proves nothing."""
    oracle, names = saved_models[kind].oracle, [None, *saved_models[kind].directories]
    one = make_batch(1, 6, seed=5)
    batch = {key: value.expand(len(names), -1) for key, value in one.items()}
    answers = oracle(names, **batch)
    for row in range(len(names)):
        for other in range(row):
            assert (answers[row] - answers[other]).abs().max() > 0.1 * answers.std()


def test_several_calls_of_other_lengths_in_one_block(
    saved_models: dict[str, Saved], make_setup: Callable[..., Setup]
) -> None:
    build, directories, oracle = saved_models["classifier"]
    setup = make_setup(build(), directories)
    names = ["spam", None, "tone"]
    with torch.inference_mode(), setup.attached.rows(names):
        for length in (7, 1, 4, 7):
            batch = make_batch(3, length, seed=length)
            assert_equal(setup.module(**batch).logits, oracle(names, **batch))


def test_outside_of_blocks_and_in_blocks_of_the_base_model_nothing_is_added(
    saved_models: dict[str, Saved], make_setup: Callable[..., Setup]
) -> None:
    build, directories, _ = saved_models["classifier"]
    setup, plain = make_setup(build(), directories), build()
    batch = make_batch(3, 5, seed=1)
    for call in (lambda: setup.module(**batch).logits, lambda: setup.run([None] * 3, batch)):
        setup.run(["spam"] * 3, batch)
        assert torch.equal(call(), plain(**batch).logits)
    loss = setup.module(**batch).logits.sum()  # gradients work outside
    loss.backward()
    assert setup.module.classifier.weight.grad is not None


def test_detach_gives_the_module_back_unchanged(
    saved_models: dict[str, Saved], make_setup: Callable[..., Setup]
) -> None:
    build, directories, _ = saved_models["classifier"]
    module = build().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = {name: set(vars(child)) for name, child in module.named_modules()}
    setup = make_setup(module, directories)
    batch = make_batch(2, 5, seed=1)
    setup.run(["spam", "lang"], batch)
    assert [*module.state_dict()] == [*before]
    for _ in range(2):
        setup.attached.detach()
    assert {name: set(vars(child)) for name, child in module.named_modules()} == attributes
    assert all(child.training for child in module.modules())
    for child in module.modules():
        for name, value in vars(child).items():
            assert "hooks" not in name or not value, name
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert torch.equal(module.eval()(**batch).logits, build()(**batch).logits)
    with pytest.raises(InvalidArgumentError, match="detached"), setup.attached.rows([None]):
        pass
    with attach(module, setup.cache, setup.adapters) as again:
        assert module.classifier._forward_hooks
        plain = module(**batch).logits
        assert not torch.equal(Setup(*setup[:3], again).run(["spam"] * 2, batch), plain)
    assert not module.classifier._forward_hooks


def test_several_leases_let_blocks_of_two_modules_overlap(
    saved_models: dict[str, Saved], make_setup: Callable[..., Setup]
) -> None:
    build, directories, oracle = saved_models["encoder"]
    setup = make_setup(build(), directories, max_inflight_batches=2)
    module, batch = build(), make_batch(1, 4, seed=3)
    with (
        attach_to(setup, module) as other,
        torch.inference_mode(),
        setup.attached.rows(["code"]),
        other.rows(["legal"]),
    ):
        first, second = setup.module(**batch), module(**batch)
    assert_equal(answer_of(first), oracle(["code"], **batch))
    assert_equal(answer_of(second), oracle(["legal"], **batch))
