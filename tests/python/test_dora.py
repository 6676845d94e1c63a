"""The scale of DoRA against PEFT's own layer (design 3.5)."""

from __future__ import annotations

import peft
import pytest
import torch
from tests.support.peft_oracle import quiet_peft
from torch import nn
from transformers.pytorch_utils import Conv1D

from pagedlora import dora
from pagedlora.base_weights import ModelWeights
from pagedlora.dora import dora_scale, squared_row_norms
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError

IN, OUT, RANK = 24, 40, 5


def build(kind: str) -> nn.Module:
    module: nn.Module
    if kind == "linear":
        module = nn.Linear(IN, OUT)
    elif kind == "conv1d":
        module = Conv1D(OUT, IN)
    else:
        module = nn.Embedding(IN, OUT)
    return nn.Sequential(module)


def trained(kind: str) -> tuple[nn.Module, nn.Module]:
    """A base model, and PEFT's layer on a copy of it, with random weights everywhere."""
    torch.manual_seed(3)
    base = build(kind)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=7,
        target_modules=["0"],
        use_dora=True,
        fan_in_fan_out=kind == "conv1d",
    )
    wrapped = build(kind)
    wrapped.load_state_dict(base.state_dict())
    with quiet_peft():
        layer = peft.get_peft_model(wrapped, config).base_model.model[0]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "base_layer" not in name:
                parameter.copy_(torch.randn(parameter.shape).abs_().add_(0.5))
    return base, layer.eval()


def matrices(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    if layer.lora_embedding_A:
        return layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def scale_of(base: nn.Module, layer: nn.Module) -> torch.Tensor:
    norms = squared_row_norms(ModelWeights(base)("0"), *matrices(layer), layer.scaling["default"])
    return dora_scale(layer.lora_magnitude_vector["default"].weight, norms, "0")


@pytest.mark.parametrize("kind", ["linear", "conv1d", "embedding"])
def test_it_is_what_peft_multiplies_by(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dora, "_CHUNK_ELEMENTS", 7 * IN)  # several pieces, the last one shorter
    base, layer = trained(kind)
    x = torch.tensor([0, 5, 23]) if kind == "embedding" else torch.randn(3, IN)
    with torch.no_grad():
        y, theirs = base[0](x), layer(x)
        a, b = matrices(layer)
        if kind == "embedding":
            delta, bias = a.T[x] @ b.T, torch.zeros(OUT)
        else:
            delta, bias = x @ a.T @ b.T, base[0].bias
        scale = scale_of(base, layer)
        ours = y + (scale - 1) * (y - bias) + scale * layer.scaling["default"] * delta
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_shards_of_the_inputs_add_up() -> None:
    weight, a, b = torch.randn(OUT, IN), torch.randn(RANK, IN), torch.randn(OUT, RANK)
    parts = [
        squared_row_norms(weight[:, columns], a[:, columns], b, 0.5)
        for columns in (slice(0, 10), slice(10, IN))
    ]
    torch.testing.assert_close(parts[0] + parts[1], squared_row_norms(weight, a, b, 0.5))


def test_a_row_of_zeros_is_refused() -> None:
    weight = torch.randn(OUT, IN)
    weight[17] = 0
    norms = squared_row_norms(weight, torch.zeros(RANK, IN), torch.zeros(OUT, RANK), 1.0)
    with pytest.raises(AdapterFormatError, match="output 17 of module 'proj' is not finite"):
        dora_scale(torch.ones(OUT), norms, "proj")


def test_quantised_weights_are_refused_by_name() -> None:
    base = build("linear")
    base[0].weight = nn.Parameter(torch.zeros(OUT, IN, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedAdapterError, match="not quantised") as caught:
        ModelWeights(base)("0")
    assert caught.value.field == "use_dora"
