"""Where a device tier lies, as users name it."""

from __future__ import annotations

import re

from pagedlora import _core
from pagedlora.errors import InvalidArgumentError
from pagedlora.memory import available_memory_bytes


def core_device_of(device: object) -> _core.Device | None:
    """The device of the C++ core.

    Args:
        device: "cpu", "cuda", "cuda:N", torch's device of such a name, or a device of the core.

    Returns:
        None for the CPU.

    Raises:
        InvalidArgumentError: Another name.
        GpuUnavailableError: There is no such GPU, or this build has no GPU part.
    """
    if isinstance(device, _core.Device):
        return device
    if str(device) == "cpu":
        return None
    gpu = re.fullmatch(r"cuda(?::(\d{1,4}))?", str(device))
    if gpu is None:
        raise InvalidArgumentError(f"device is {device!r}: use 'cpu', 'cuda' or 'cuda:N'")
    return _core.make_cuda_device(int(gpu.group(1) or 0))


def free_bytes_of(device: _core.Device | None) -> int:
    """Memory of the device that can be taken now, in bytes; None is the CPU."""
    return available_memory_bytes() if device is None else device.memory_info()[0]
