"""DoRA's scale of a module's outputs: the trained magnitude over the norm of the weight.

PEFT computes y = base + (m/n - 1) (base - bias) + (m/n) s B A x (`DoraLinearLayer.forward`), with n
the norms of the rows of W + s B A. m/n depends on the adapter and the base model alone, so it is
computed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedlora.errors import AdapterFormatError
from pagedlora.shown import quoted

if TYPE_CHECKING:
    import torch

_CHUNK_ELEMENTS = 1 << 20
"""Of the weight that are in memory at a time, in float32."""


def squared_row_norms(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Squared norms of the rows of W + s B A; those of shards of the inputs add up.

    Args:
        weight: [out, in], any floating-point type; converted piece by piece.
        a: [rank, in] float32.
        b: [out, rank] float32.
        scale: The factor of B A x.

    Returns:
        [out] float64.
    """
    import torch

    out, in_features = weight.shape
    rows = max(1, _CHUNK_ELEMENTS // in_features)
    norms = torch.empty(out, dtype=torch.float64)
    for first in range(0, out, rows):
        piece = slice(first, first + rows)
        changed = weight[piece].to("cpu", torch.float32) + scale * (b[piece] @ a)
        norms[piece] = changed.square_().sum(dim=1, dtype=torch.float64)
    return norms


def dora_scale(
    magnitude: torch.Tensor, squared_norms: torch.Tensor, name: str, path: str = ""
) -> torch.Tensor:
    """m/n of a module.

    Args:
        magnitude: [out], as trained.
        squared_norms: [out] float64.
        name: Of the module, for errors.
        path: Of the adapter, for errors.

    Returns:
        [out] float32.

    Raises:
        AdapterFormatError: A scale is not finite: a row of the weight is 0, or a value is not
            finite.
    """
    import torch

    scale = (magnitude.double() / squared_norms.sqrt()).to(torch.float32)
    if not bool(torch.isfinite(scale).all()):
        row = int((~torch.isfinite(scale)).nonzero()[0])
        raise AdapterFormatError(
            f"the DoRA scale of output {row} of module {quoted(name)} is not finite: its "
            f"magnitude is {float(magnitude[row])}, the norm of its weight "
            f"{float(squared_norms[row]) ** 0.5}",
            path=path,
            tensor=f"{name}.lora_magnitude_vector",
        )
    return scale
