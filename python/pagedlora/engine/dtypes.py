"""Element types as torch and as the core name them."""

from __future__ import annotations

import torch

from pagedlora import _core
from pagedlora.errors import InvalidArgumentError
from pagedlora.shown import shown

_CORE_DTYPES = {
    torch.float32: _core.Dtype.float32,
    torch.float16: _core.Dtype.float16,
    torch.bfloat16: _core.Dtype.bfloat16,
}


def to_core_dtype(dtype: torch.dtype) -> _core.Dtype:
    """The core's name of a torch element type.

    Args:
        dtype: float32, float16 or bfloat16.

    Returns:
        The same type as the core spells it.

    Raises:
        InvalidArgumentError: The core does not compute in this type.
    """
    try:
        return _CORE_DTYPES[dtype]
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"dtype must be float32, float16 or bfloat16, not {shown(dtype)}"
        ) from None
