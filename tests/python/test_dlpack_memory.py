"""Memory of a GPU that is handed over by DLPack: who owns the tensor when, and what is refused.

The tensors are made by hand, and say that they lie on a GPU. Without one the device cannot be made
after all: so that a tensor was taken shows in its deleter, which runs then.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from pagedlora import GpuUnavailableError, InvalidArgumentError, _core, make_cuda_device

CUDA = 2
HAS_GPU = _core.gpu_support()["state"] == "available"
without_gpu = pytest.mark.skipif(HAS_GPU, reason="there is a GPU, whose memory this is not")
pytestmark = pytest.mark.skipif(
    _core.gpu_support()["state"] == "built without CUDA", reason="built without CUDA"
)

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype = ctypes.c_char_p
capsule_name.argtypes = [ctypes.py_object]
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_: ClassVar = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
    ]


class _Versioned(ctypes.Structure):
    _fields_: ClassVar = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class Exporter:
    """A tensor of bytes that says it lies on a GPU.

    Attributes:
        capsule: What `__dlpack__` gives.
        num_deleted: How often it was let go of.
        deleted_by: The thread that did so.
    """

    def __init__(
        self,
        *,
        versioned: bool = True,
        size: int = 4096,
        device: tuple[int, int] = (CUDA, 0),
        stride: int = 1,
        flags: int = 0,
        has_deleter: bool = True,
    ) -> None:
        self.num_deleted = 0
        self.deleted_by: threading.Thread | None = None
        self._content = ctypes.create_string_buffer(8192)
        self._shape = ctypes.c_int64(size)
        self._stride = ctypes.c_int64(stride)
        tensor = _Tensor(
            ctypes.addressof(self._content),
            *device,
            1,
            1,
            8,
            1,
            ctypes.pointer(self._shape),
            ctypes.pointer(self._stride),
            0,
        )
        deleter = Deleter(self._delete) if has_deleter else Deleter()
        self._managed: ctypes.Structure
        if versioned:
            self._managed = _Versioned(1, 0, None, deleter, flags, tensor)
            self._name = b"dltensor_versioned"
        else:
            self._managed = _Managed(tensor, None, deleter)
            self._name = b"dltensor"
        self._device = device
        self.capsule: Any = new_capsule(ctypes.addressof(self._managed), self._name, None)

    def _delete(self, address: int) -> None:
        assert address == ctypes.addressof(self._managed)
        self.num_deleted += 1
        self.deleted_by = threading.current_thread()

    @property
    def name(self) -> bytes:
        name: bytes = capsule_name(self.capsule)
        return name

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        assert max_version == (1, 0)
        return self.capsule


class OldExporter(Exporter):
    """Has never heard of versions."""

    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.capsule


@without_gpu
@pytest.mark.parametrize("make", [Exporter, OldExporter])
@pytest.mark.parametrize("versioned", [True, False])
def test_a_tensor_that_was_taken_is_let_go_of_once(make: type[Exporter], versioned: bool) -> None:
    memory = make(versioned=versioned)
    name = memory.name
    with pytest.raises(GpuUnavailableError):
        make_cuda_device(0, memory)
    assert memory.num_deleted == 1
    assert memory.deleted_by is threading.current_thread()
    assert memory.name == b"used_" + name
    with pytest.raises(InvalidArgumentError, match="taken before"):
        make_cuda_device(0, memory)
    del memory.capsule
    gc.collect()
    assert memory.num_deleted == 1


@without_gpu
def test_a_tensor_may_have_no_deleter() -> None:
    with pytest.raises(GpuUnavailableError):
        make_cuda_device(0, Exporter(has_deleter=False))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stride": 2}, r"shape \(4096\) with strides \(2\).* contiguous"),
        ({"size": 0}, r"shape \(0\) without a byte"),
        ({"device": (CUDA, 1)}, r"lies on cuda:1, the device is cuda:0"),
        ({"device": (1, 0)}, r"lies on the CPU, the device is cuda:0"),
        ({"device": (3, 0)}, r"type 3"),
    ],
)
def test_a_tensor_that_is_refused_stays_with_its_owner(
    versioned: bool, changes: dict[str, Any], problem: str
) -> None:
    memory = Exporter(versioned=versioned, **changes)
    name = memory.name
    with pytest.raises(InvalidArgumentError, match=problem):
        make_cuda_device(0, memory)
    assert memory.num_deleted == 0
    assert memory.name == name


def test_a_tensor_that_may_only_be_read_is_refused() -> None:
    memory = Exporter(flags=1)
    with pytest.raises(InvalidArgumentError, match="may only be read"):
        make_cuda_device(0, memory)
    assert memory.num_deleted == 0


@pytest.mark.parametrize("memory", [torch.zeros(8), np.zeros(8)])
def test_memory_of_the_cpu_is_refused(memory: object) -> None:
    with pytest.raises(InvalidArgumentError, match="lies on the CPU, the device is cuda:0"):
        make_cuda_device(memory=memory)


@pytest.mark.parametrize("memory", [b"bytes", 1 << 30, [1, 2]])
def test_what_is_no_tensor_is_refused(memory: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"which has no __dlpack__: give a tensor"):
        make_cuda_device(memory=memory)


def test_what_is_no_capsule_is_refused() -> None:
    memory = Exporter()
    memory.capsule = object()
    with pytest.raises(InvalidArgumentError, match=r"gave <object .* which is no tensor"):
        make_cuda_device(memory=memory)


def test_an_error_of_the_tensor_itself_is_passed_on() -> None:
    class Stubborn(Exporter):
        def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
            raise BufferError("it has gradients")

    with pytest.raises(BufferError, match="it has gradients"):
        make_cuda_device(memory=Stubborn())


@without_gpu
def test_without_memory_it_is_a_gpu_like_cuda() -> None:
    with pytest.raises(GpuUnavailableError) as caught:
        make_cuda_device(3)
    assert caught.value.reason == _core.gpu_support()["detail"]
