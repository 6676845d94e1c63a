"""Where a model can be run."""

from __future__ import annotations

from typing import cast

import torch

from pagedlora import _core
from pagedlora.errors import GpuUnavailableError, InvalidArgumentError
from pagedlora.memory import available_memory_bytes
from pagedlora.shown import shown


def parse_device(device: object) -> torch.device | None:
    """The device of a name; None for "auto".

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        InvalidArgumentError: Another device.
        GpuUnavailableError: A GPU that cannot be used.
    """
    if isinstance(device, str) and device == "auto":
        return None
    try:
        parsed: torch.device | None = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError):
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(
            f"device is {shown(device)}: give 'auto', 'cpu', 'cuda' or 'cuda:N'"
        )
    if parsed.type == "cuda":
        _check_gpu(parsed)
    return parsed


def gpu_index(device: torch.device) -> int:
    """The number of a GPU; torch's current one for "cuda"."""
    index = cast("int | None", device.index)
    return torch.cuda.current_device() if index is None else index


def current_stream(device: torch.device) -> int | None:
    """The number of the stream that torch launches on in this thread; None on the CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.current_stream(device).cuda_stream)


def _check_gpu(device: torch.device) -> None:
    support = _core.gpu_support()
    if support["state"] != "available":
        raise _unavailable(f"{support['state']}: {support['detail']}")
    if not torch.cuda.is_available():
        raise _unavailable(
            f"torch {torch.__version__} sees none: install a build of torch with CUDA"
        )
    if gpu_index(device) >= support["num_devices"]:
        raise _unavailable(f"there are cuda:0 to cuda:{support['num_devices'] - 1}, not {device}")


def _unavailable(reason: str) -> GpuUnavailableError:
    return GpuUnavailableError(f"no GPU can be used: {reason}", reason=reason)


def free_memory_bytes(device: torch.device) -> int:
    """Memory of the device that can be taken now, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()
