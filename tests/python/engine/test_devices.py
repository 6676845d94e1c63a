"""Which devices a model may be run on, and what is said where that is not so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.tiny_models import build_tiny_model

from pagedlora import LLM, GpuUnavailableError, InvalidArgumentError, LoraModelConfig, _core
from pagedlora.engine import devices
from pagedlora.engine.devices import current_stream, free_memory_bytes, parse_device
from pagedlora.engine.lora_hooks import LoraHooks

AVAILABLE = {"state": "available", "num_devices": 2, "detail": ""}


def say(monkeypatch: pytest.MonkeyPatch, support: dict[str, Any], *, torch_has_one: bool) -> None:
    monkeypatch.setattr(devices._core, "gpu_support", lambda: support)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_has_one)


def test_auto_leaves_it_open_and_the_cpu_is_always_there() -> None:
    assert parse_device("auto") is None
    assert parse_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["mps", "meta", "gpu", "", "cuda:x"])
def test_other_devices_are_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="give 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        parse_device(name)


def test_the_cpu_has_no_stream_and_a_gpu_that_which_torch_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert current_stream(torch.device("cpu")) is None
    streams = {torch.device("cuda", 1): SimpleNamespace(cuda_stream=1234)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device])
    assert current_stream(torch.device("cuda", 1)) == 1234


def test_a_gpu_that_is_not_there_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(monkeypatch, {"state": "no driver", "detail": "install one"}, torch_has_one=False)
    with pytest.raises(GpuUnavailableError, match="no GPU can be used: no driver: install one"):
        parse_device("cuda")
    model = build_tiny_model("llama")
    with pytest.raises(GpuUnavailableError) as raised:
        LLM(model, device="cuda")
    assert raised.value.reason == "no driver: install one"
    assert isinstance(raised.value, RuntimeError)


def test_a_torch_without_cuda_is_told_from_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(monkeypatch, AVAILABLE, torch_has_one=False)
    with pytest.raises(GpuUnavailableError, match="install a build of torch with CUDA"):
        parse_device("cuda:0")


def test_a_gpu_beyond_the_last_is_refused_with_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(monkeypatch, AVAILABLE, torch_has_one=True)
    assert parse_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(GpuUnavailableError, match="there are cuda:0 to cuda:1, not cuda:2"):
        parse_device("cuda:2")


def test_a_live_module_elsewhere_is_left_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, AVAILABLE, torch_has_one=True)
    model = build_tiny_model("llama")
    with pytest.raises(InvalidArgumentError, match=r"module is on cpu, and device asks for cuda:1"):
        LLM(model, device="cuda:1")
    assert next(model.parameters()).device == torch.device("cpu")


def test_a_module_that_is_spread_over_devices_is_refused() -> None:
    model = build_tiny_model("llama")
    model.lm_head.to("meta")
    with pytest.raises(InvalidArgumentError, match="spread over cpu, meta: move it to one"):
        LLM(model)


def test_hooks_refuse_modules_whose_memory_they_cannot_read() -> None:
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model)
    model.to("meta")
    with pytest.raises(InvalidArgumentError, match="lie on meta; all of them must lie on one"):
        LoraHooks(model, config, _core.Dtype.float32)
    assert not any(module._forward_hooks for module in model.modules())


def test_free_memory_of_the_cpu_is_the_systems() -> None:
    assert free_memory_bytes(torch.device("cpu")) > 2**20
