"""Where a device tier may lie, and what is said where there is no such device."""

from __future__ import annotations

import pytest
import torch
from tests.support.async_bench import Bench

from pagedlora import GpuUnavailableError, InvalidArgumentError, PeftCacheManager, _core
from pagedlora.devices import core_device_of, free_bytes_of
from pagedlora.memory import total_memory_bytes

HAS_GPU = _core.gpu_support()["state"] == "available"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu_needs_no_device(device: object) -> None:
    assert core_device_of(device) is None
    assert 0 < free_bytes_of(None) <= total_memory_bytes()


def test_a_device_of_the_core_is_taken_as_it_is() -> None:
    device = _core.FakeDevice()
    assert core_device_of(device) is device
    assert device.name == "fake"
    free, total = device.memory_info()
    assert free_bytes_of(device) == free <= total


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:12345", "CUDA", None]
)
def test_other_names_are_refused(device: object) -> None:
    with pytest.raises(InvalidArgumentError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        core_device_of(device)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda:0")])
def test_without_a_gpu_the_error_says_what_is_missing(bench: Bench, device: str) -> None:
    with pytest.raises(GpuUnavailableError) as caught:
        PeftCacheManager(bench.peft.model_config, device=device)
    assert caught.value.reason == _core.gpu_support()["detail"]
    assert caught.value.reason in str(caught.value)
    assert caught.value.code == "gpu_unavailable"
    assert isinstance(caught.value, RuntimeError)


class _Stream:
    """As torch gives one."""

    cuda_stream = 0


@pytest.mark.parametrize("stream", [None, 0, 1234, _Stream()])
def test_a_lease_is_closed_on_a_stream_of_any_form(bench: Bench, stream: object) -> None:
    request = bench.add_and_load(1, bench.register())
    first = bench.peft.ensure_batch([request], [], stream=stream)
    second = bench.peft.ensure_batch([request], [], stream=stream)
    assert not first.is_open
    second.close(stream)
    assert not second.is_open


def test_what_is_no_stream_is_refused_and_the_lease_stays_open(bench: Bench) -> None:
    request = bench.add_and_load(1, bench.register())
    lease = bench.peft.ensure_batch([request], [])
    with pytest.raises(InvalidArgumentError, match="a stream of torch, or its number"):
        lease.close(object())
    with pytest.raises(InvalidArgumentError, match="stream is <object"):
        bench.peft.ensure_batch([request], [], stream=object())
    assert lease.is_open
