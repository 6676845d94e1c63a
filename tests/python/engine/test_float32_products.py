"""Comparisons in float32 are made in float32, and what the user allowed is allowed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.cache_fixtures import Call
from tests.support.tiny_models import build_tiny_model

from pagedlora.engine import float32_products, self_check
from pagedlora.engine.float32_products import full_float32

MATMUL = torch.backends.cuda.matmul


class OlderTorch:
    """The setting as torch had it before `fp32_precision`."""

    def __init__(self) -> None:
        self.allow_tf32 = True


@pytest.fixture(params=["tf32", "ieee", "none"])
def allowed(request: pytest.FixtureRequest) -> Iterator[str]:
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = request.param
    yield request.param
    MATMUL.fp32_precision = before


def test_within_the_block_all_bits_count(allowed: str) -> None:
    with full_float32():
        assert MATMUL.fp32_precision == "ieee"
        with full_float32():
            assert MATMUL.fp32_precision == "ieee"
        assert MATMUL.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == allowed
    with pytest.raises(ZeroDivisionError), full_float32():
        raise ZeroDivisionError
    assert MATMUL.fp32_precision == allowed


def test_blocks_of_threads_overlap(allowed: str) -> None:
    """The one that began first ends first: the other still has what it needs."""
    first = full_float32()
    first.__enter__()

    def enter() -> object:
        second = full_float32()
        second.__enter__()
        return second

    second = Call(enter).result()
    first.__exit__(None, None, None)
    assert MATMUL.fp32_precision == "ieee"
    second.__exit__(None, None, None)
    assert MATMUL.fp32_precision == allowed


def test_an_older_torch_has_an_older_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = OlderTorch()
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    with full_float32():
        assert matmul.allow_tf32 is False
    assert matmul.allow_tf32 is True
    assert not float32_products._has_precision()


def test_the_self_check_is_made_with_all_bits(
    allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in ("_eager_logits", "_paged_logits"):
        function = getattr(self_check, name)

        def watched(*args: object, function: Callable[..., object] = function) -> object:
            seen.append(MATMUL.fp32_precision)
            return function(*args)

        monkeypatch.setattr(self_check, name, watched)
    self_check.self_check(build_tiny_model("llama"))
    assert seen == ["ieee", "ieee"]
    assert MATMUL.fp32_precision == allowed
