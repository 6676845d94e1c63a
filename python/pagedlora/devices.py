"""Where a device tier lies, as users name it."""

from __future__ import annotations

import re

from pagedlora import _core
from pagedlora.arguments import to_integer
from pagedlora.errors import InvalidArgumentError
from pagedlora.memory import available_memory_bytes
from pagedlora.shown import shown


def core_device_of(device: object) -> _core.Device | None:
    """The device of the C++ core.

    Args:
        device: "cpu", "cuda", "cuda:N", torch's device of such a name, or a device of the core,
            such as `make_cuda_device` gives.

    Returns:
        None for the CPU.

    Raises:
        InvalidArgumentError: Another name.
        GpuUnavailableError: There is no such GPU, or this build has no GPU part.
    """
    if isinstance(device, _core.Device):
        return device
    name = "" if isinstance(device, (int, float)) else str(device)
    if name == "cpu":
        return None
    gpu = re.fullmatch(r"cuda(?::(\d{1,4}))?", name)
    if gpu is None:
        raise InvalidArgumentError(f"device is {shown(device)}: use 'cpu', 'cuda' or 'cuda:N'")
    return _core.make_cuda_device(int(gpu.group(1) or 0))


def make_cuda_device(ordinal: int = 0, memory: object = None) -> _core.Device:
    """A GPU as the device of a `PeftCacheManager`.

    Args:
        ordinal: Which GPU, counted from 0.
        memory: Where the device tier lies: a tensor on that GPU, contiguous and writable, of any
            shape and type. It is anything with `__dlpack__` and `__dlpack_device__`, such as
            `torch.empty(2**30, dtype=torch.uint8, device="cuda:0")`. Of its bytes up to 4095 are
            lost to alignment; a `device_cache_percent` is one of the others. The cache writes it as
            it likes, and keeps it until the cache and this device are gone. One cache at a time
            can have it. None: the CUDA runtime gives the memory.

    Raises:
        GpuUnavailableError: There is no such GPU, or this build has no GPU part.
        InvalidArgumentError: `memory` is no tensor, lies elsewhere, has gaps, holds no byte, may
            not be written, or was taken before. It stays what it was.
        Exception: What `__dlpack__` of `memory` raises: torch refuses tensors with gradients.
    """
    return _core.make_cuda_device(to_integer(ordinal, "ordinal", 0, 2**31 - 1), memory)


def free_bytes_of(device: _core.Device | None) -> int:
    """Memory of the device that can be taken now, in bytes; None is the CPU."""
    return available_memory_bytes() if device is None else device.memory_info()[0]
