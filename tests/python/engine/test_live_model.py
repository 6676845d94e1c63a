"""Whatever interrupts the taking of a hold, the model is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.tiny_models import build_tiny_model
from transformers import PreTrainedModel

from pagedlora.engine import live_model
from pagedlora.engine.attention import ATTENTION_NAME
from pagedlora.engine.live_model import LiveModelHold
from pagedlora.errors import UnsupportedModelError


def fail_after(function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The function, and then the error."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        raise error

    return failing


@pytest.mark.parametrize("seam", ["set_attn_implementation", "eval"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (TypeError("x"), TypeError),
        (RuntimeError("x"), RuntimeError),
        (MemoryError(), MemoryError),
        (ValueError("x"), ValueError),
    ],
    ids=repr,
)
def test_a_hold_that_fails_leaves_the_model_as_it_was(
    seam: str, error: BaseException, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: PreTrainedModel = build_tiny_model("llama").train()
    held = dict(live_model._held_configs)  # by engines of other tests
    before = model.config._attn_implementation
    assert before != ATTENTION_NAME
    with monkeypatch.context() as patch:
        patch.setattr(model, seam, fail_after(getattr(model, seam), error))
        with pytest.raises((raised, UnsupportedModelError)):
            LiveModelHold(model)
    assert model.config._attn_implementation == before
    assert all(module.training for module in model.modules())
    assert live_model._held_configs == held

    hold = LiveModelHold(model)  # and it can be held again
    assert model.config._attn_implementation == ATTENTION_NAME
    hold.release()
    assert model.config._attn_implementation == before
