"""What PEFT answers with each of some adapters, alone on any model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from tests.support.row_kinds import silent_peft
from torch import nn


class PeftJudge:
    """A model and its adapters in PEFT."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Path]) -> None:
        """Takes the model; it is PEFT's from then on."""
        self._model: Any = None
        with silent_peft():
            for name, path in adapters.items():
                label = self._label(name)
                if self._model is None:
                    self._model = peft.PeftModel.from_pretrained(model, path, adapter_name=label)
                else:
                    self._model.load_adapter(path, adapter_name=label)
        self._model.eval()

    def logits(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        """Of one adapter, for one sequence [1, tokens]."""
        with silent_peft(), torch.inference_mode():
            self._model.set_adapter(self._label(name), inference_mode=True)
            return self._model(input_ids=inputs).logits[0]

    @staticmethod
    def _label(name: str) -> str:
        return name.replace(".", "_")  # PEFT allows no dots
