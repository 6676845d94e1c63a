"""Tensors that a request carries: how they lie in memory does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.support.adapters import Tensors, adapter_config, adapter_tensors
from tests.support.cache_fixtures import model_config

from pagedlora import AdapterFormatError, AdapterWeights

TENSORS = adapter_tensors(model_config().modules, 4, seed=1)
CONFIG = adapter_config(TENSORS)
FIRST = next(iter(TENSORS))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: torch._neg_view(-tensor),
        lambda tensor: tensor.t().contiguous().t(),
        torch.nn.Parameter,
    ],
    ids=["lazily negated", "transposed", "parameters"],
)
def test_how_tensors_lie_in_memory_does_not_count(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    plain = AdapterWeights.from_tensors(TENSORS, CONFIG)
    changed = {name: change(tensor) for name, tensor in TENSORS.items()}
    assert AdapterWeights.from_tensors(changed, CONFIG).digest == plain.digest


def test_pefts_own_configuration_does_as_its_dictionary_does() -> None:
    config = LoraConfig(r=4, lora_alpha=16, target_modules=CONFIG["target_modules"])
    plain = AdapterWeights.from_tensors(TENSORS, CONFIG)
    for given in (config, config.to_dict()):
        assert AdapterWeights.from_tensors(TENSORS, given).digest == plain.digest


BAD: dict[str, Callable[[Tensors], Any]] = {
    "a list": lambda tensors: list(tensors.values()),
    "None": lambda tensors: None,
    "arrays": lambda tensors: {name: tensor.numpy() for name, tensor in tensors.items()},
    "sparse": lambda tensors: {**tensors, FIRST: tensors[FIRST].to_sparse()},
    "without values": lambda tensors: {**tensors, FIRST: tensors[FIRST].to("meta")},
    "a number as a name": lambda tensors: {**tensors, 7: torch.ones(3)},
    "more than there is memory": lambda tensors: {
        **tensors,
        FIRST: torch.ones(1, 1).expand(1 << 20, 1 << 20),
    },
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_dense_tensor_is_refused(name: str) -> None:
    with pytest.raises(AdapterFormatError, match="'request weights'"):
        AdapterWeights.from_tensors(BAD[name](TENSORS), CONFIG)


@pytest.mark.parametrize("config", [None, [], "r=4", {"r": object()}])
def test_a_configuration_that_no_file_could_have_is_refused(config: Any) -> None:
    with pytest.raises(AdapterFormatError, match="'request weights'"):
        AdapterWeights.from_tensors(TENSORS, config)
