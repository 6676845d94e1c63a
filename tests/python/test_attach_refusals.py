"""What cannot be answered rightly in an attached module is refused, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import attachments
from tests.support.adapters import write_random_adapter
from tests.support.attachments import Saved, Setup, assert_equal, attach_to
from tests.support.cache_fixtures import Call
from tests.support.encoders import make_batch
from tests.support.tiny_models import build_tiny_model
from torch import nn

from pagedlora import (
    LLM,
    AdapterNotFoundError,
    AdapterSourceChangedError,
    InvalidArgumentError,
    LeaseClosedError,
    LlmRequest,
    LoraCacheFullError,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    UnsupportedModelError,
    attach,
)

make_setup = attachments.make_setup
saved_models = attachments.saved_models


class Shapes(nn.Module):
    """Calls a linear module with whatever it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.other = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.other(self.proj(x))
        return result


@pytest.fixture
def shapes(make_setup: Callable[..., Setup], tmp_path: Path) -> Setup:
    module = Shapes().requires_grad_(False)
    config = LoraModelConfig.from_module(module)
    directories = {
        name: write_random_adapter(tmp_path / name, config, rank=2, seed=seed, targets=targets)
        for seed, (name, targets) in enumerate({"a": None, "b": None, "proj": ["proj"]}.items())
    }
    return make_setup(module, directories)


@pytest.mark.parametrize("shape", [(2, 3, 8), (6, 8), (4, 3, 8), (8,), (1, 3, 8)])
@pytest.mark.parametrize("is_later", [False, True])
def test_a_batch_of_another_number_of_rows_is_refused(
    shapes: Setup, shape: tuple[int, ...], is_later: bool
) -> None:
    def run() -> None:
        with torch.inference_mode(), shapes.attached.rows(["a", None, "b"]):
            if is_later:
                shapes.module(torch.ones(3, 8))
            shapes.module(torch.ones(shape))

    with pytest.raises(InvalidArgumentError, match=r"'proj' .* 3 rows: name one adapter per row"):
        run()


def test_a_module_whose_first_dimension_is_not_the_batch_is_refused(shapes: Setup) -> None:
    """As an expert's is, which gets some tokens of all rows."""

    def run() -> None:
        with torch.inference_mode(), shapes.attached.rows(["a", None, "b"]):
            x = shapes.module.proj(torch.ones(3, 2, 8))
            shapes.module.other(x.reshape(6, 8))

    with pytest.raises(UnsupportedModelError, match=r"'other' .*\(6, 8\) .* 3 rows, as many as"):
        run()


@pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (3, 5, 8), (3, 2, 2, 8), (3, 0, 8)])
def test_the_rest_of_the_shape_is_free(shapes: Setup, shape: tuple[int, ...]) -> None:
    with torch.inference_mode(), shapes.attached.rows(["a", None, "b"]):
        mixed = shapes.module(torch.ones(shape))
    plain = shapes.module(torch.ones(shape))
    assert mixed.shape == (*shape[:-1], 4)
    assert torch.equal(mixed[1], plain[1])
    if mixed.numel():
        assert not torch.equal(mixed[0], plain[0])
        assert not torch.equal(mixed[0], mixed[2])


def test_gradients_are_refused_rather_than_wrong(shapes: Setup) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="no_grad"),
        shapes.attached.rows(["a"]),
    ):
        shapes.module(torch.ones(1, 8))
    with torch.no_grad(), shapes.attached.rows(["a"]):
        shapes.module(torch.ones(1, 8))


def test_a_module_that_was_not_called_is_told(shapes: Setup) -> None:
    def run(name: str, **options: Any) -> None:
        with torch.inference_mode(), shapes.attached.rows([name], **options):
            shapes.module.proj(torch.ones(1, 8))

    with pytest.raises(UnsupportedModelError, match=r"'a' changes 1 module.*\(other\)"):
        run("a")
    run("a", partial=True)
    run("proj")
    with pytest.raises(ZeroDivisionError), shapes.attached.rows(["a"]):
        raise ZeroDivisionError  # what went wrong in the block is what is told


def test_a_module_whose_weights_are_used_without_calling_it_is_told(
    make_setup: Callable[..., Setup], tmp_path: Path
) -> None:
    """As `nn.MultiheadAttention` does with its output projection: no hook sees that."""
    module = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
    config = LoraModelConfig.from_module(module)
    directory = write_random_adapter(tmp_path, config, rank=2, seed=1)
    setup = make_setup(module, {"a": directory})
    x = torch.ones(1, 3, 8)
    with (
        torch.inference_mode(),
        pytest.raises(UnsupportedModelError, match="out_proj"),
        setup.attached.rows(["a"]),
    ):
        module(x, x, x)


def test_blocks_neither_nest_nor_overlap(shapes: Setup) -> None:
    with torch.inference_mode(), shapes.attached.rows(["a"]):
        for names in (["b"], [None]):
            with pytest.raises(InvalidArgumentError, match="open"), shapes.attached.rows(names):
                pass
        call = Call(lambda: shapes.attached.rows(["b"]).__enter__())
        with pytest.raises(InvalidArgumentError, match="open"):
            call.result()
        with pytest.raises(InvalidArgumentError, match="open"):
            shapes.attached.detach()
        shapes.module(torch.ones(1, 8))
    shapes.run(["b"], {"x": torch.ones(1, 8)})


def test_another_threads_call_in_a_block_is_refused(shapes: Setup) -> None:
    def elsewhere() -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = shapes.module(torch.ones(1, 8))
        return result

    with torch.inference_mode(), shapes.attached.rows(["a"], partial=True):
        with pytest.raises(InvalidArgumentError, match="another thread"):
            Call(elsewhere).result()
        shapes.module(torch.ones(1, 8))
    assert torch.equal(Call(elsewhere).result(), shapes.module(torch.ones(1, 8)))


def test_threads_that_take_turns_get_their_own_answers(shapes: Setup) -> None:
    expected = {name: shapes.run([name], {"x": torch.ones(1, 8)}) for name in ("a", "b")}
    turn, seen = threading.Lock(), []

    def work(name: str) -> None:
        for _ in range(50):
            with turn:
                seen.append(
                    torch.equal(shapes.run([name], {"x": torch.ones(1, 8)}), expected[name])
                )

    calls = [Call(work, name) for name in ("a", "b", "a", "b")]
    for call in calls:
        call.result()
    assert seen == [True] * 200


def test_names_that_are_wrong_leave_nothing(shapes: Setup) -> None:
    for names, error in (
        (["a", "none"], AdapterNotFoundError),
        ("a", InvalidArgumentError),
        (["a", 5], InvalidArgumentError),
        (5, InvalidArgumentError),
    ):
        with pytest.raises(error), shapes.attached.rows(names):
            pytest.fail("the block began")
        assert shapes.cache.active_tasks == {}
    shapes.run(["a"], {"x": torch.ones(1, 8)})


def test_an_adapter_that_cannot_be_read_fails_its_blocks_only(
    shapes: Setup, tmp_path: Path
) -> None:
    with (tmp_path / "b" / "adapter_model.safetensors").open("ab") as file:
        file.write(b"x")
    for _ in range(2):
        with pytest.raises(AdapterSourceChangedError), shapes.attached.rows(["a", "b"]):
            pytest.fail("the block began")
        assert shapes.cache.active_tasks == {}
    shapes.run(["a"], {"x": torch.ones(1, 8)})


def test_more_adapters_in_a_block_than_room(
    saved_models: dict[str, Saved], make_setup: Callable[..., Setup]
) -> None:
    build, directories, oracle = saved_models["classifier"]
    largest = max(i.num_pages for i in make_setup(build(), directories).adapters.list())
    setup = make_setup(build(), directories, device_pages=largest, host_pages=2 * largest)
    with pytest.raises(LoraCacheFullError), setup.attached.rows([*directories]):
        pytest.fail("the block began")
    batch = make_batch(1, 4, seed=2)
    assert_equal(setup.run(["lang"], batch), oracle(["lang"], **batch))


def test_what_does_not_belong_together_is_refused(shapes: Setup) -> None:
    with pytest.raises(InvalidArgumentError, match="adapters already"):
        attach(shapes.module, shapes.cache, shapes.adapters)
    with pytest.raises(InvalidArgumentError, match="no module 'proj'"):
        attach(nn.Linear(8, 8), shapes.cache, shapes.adapters)
    with pytest.raises(UnsupportedModelError, match="meta"):
        attach(Shapes().to("meta"), shapes.cache, shapes.adapters)
    other = PeftCacheManager(shapes.cache.model_config, PeftCacheConfig(host_cache_size="1MiB"))
    with pytest.raises(InvalidArgumentError, match="another cache"):
        attach(Shapes(), other, shapes.adapters)
    other.close()


def test_a_module_of_an_llm_is_refused() -> None:

    model = build_tiny_model("llama")
    with LLM(model) as llm, pytest.raises(InvalidArgumentError, match="adapters already"):
        attach(model, llm.peft_cache_manager, llm.lora_manager)


def test_attachments_that_share_a_cache(shapes: Setup, tmp_path: Path) -> None:
    """With one batch in flight the second block ends the first one's lease, and that is told."""
    with (
        attach_to(shapes, Shapes().requires_grad_(False)) as other,
        torch.inference_mode(),
        shapes.attached.rows(["a"], partial=True),
    ):
        with other.rows(["b"], partial=True):
            pass
        with pytest.raises(LeaseClosedError):
            shapes.module(torch.ones(1, 8))
    shapes.run(["a"], {"x": torch.ones(1, 8)})


def test_a_reload_between_blocks_changes_the_answer(shapes: Setup, tmp_path: Path) -> None:
    x = {"x": torch.ones(1, 8)}
    a, b = shapes.run(["a"], x), shapes.run(["b"], x)
    with torch.inference_mode(), shapes.attached.rows(["a"]):
        shapes.adapters.reload("a", tmp_path / "b")
        assert torch.equal(shapes.module(**x), a)  # the block keeps what it began with
    assert torch.equal(shapes.run(["a"], x), b)


def test_requests_of_the_same_cache_are_left_alone(shapes: Setup) -> None:
    requests = [LlmRequest(number) for number in range(3)]
    for request in requests:
        shapes.adapters.acquire("b", request)
        shapes.cache.add_request_peft(request)
    shapes.run(["a"], {"x": torch.ones(1, 8)})
    assert shapes.cache.active_tasks == {shapes.adapters.task_id("b"): {0, 1, 2}}
    for request in requests:
        shapes.adapters.release(request)
