"""Float32 matrix products with all of float32's bits, whatever torch was told elsewhere.

On a GPU torch may be allowed to round the factors to TF32, of 11 significant bits, which no
comparison in float32 survives. torch keeps that per process: so does this, and counts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_depth = 0  # blocks that are open; guarded by _lock
_before: Any = None  # the user's setting while one is


def _after_fork() -> None:
    """Nobody holds the lock in a child process: the others' threads are not there."""
    global _lock  # noqa: PLW0603 - the process's
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def full_float32() -> Iterator[None]:
    """Within the block CUDA's matrix products of float32 do not use TF32.

    Afterwards, when no thread is in such a block any more, they do what they did before.
    """
    global _depth, _before  # noqa: PLW0603 - the setting is the process's
    with _lock:
        if _depth == 0:
            _before = _setting()
            _set(_exact())
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _set(_before)


def _has_precision() -> bool:
    """Whether torch has the setting that took the place of `allow_tf32`, and warns of the old."""
    return hasattr(torch.backends.cuda.matmul, "fp32_precision")


def _exact() -> Any:
    return "ieee" if _has_precision() else False


def _setting() -> Any:
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision if _has_precision() else matmul.allow_tf32


def _set(value: Any) -> None:
    """Nothing if it is so already."""
    if _setting() != value:
        setattr(
            torch.backends.cuda.matmul,
            "fp32_precision" if _has_precision() else "allow_tf32",
            value,
        )
