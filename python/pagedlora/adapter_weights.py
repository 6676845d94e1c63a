"""Adapter weights that a request carries instead of naming a registered adapter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedlora import _core
from pagedlora.errors import AdapterFormatError
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.peft_config import parse_peft_config
from pagedlora.loaders.rows import AdapterTensors, StoredTensor, make_rows, pair_tensors

if TYPE_CHECKING:
    import torch

_DESCRIPTION = "request weights"
_DTYPE_NAMES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class AdapterWeights:
    """Weights of one adapter in memory; immutable, thread-safe.

    The tensors are copied once at construction, so that later changes to them cannot change what
    a request answers.
    """

    def __init__(
        self, buffer: bytearray, tensors: AdapterTensors, scale: float, digest: str
    ) -> None:
        """Use `from_tensors`."""
        self._buffer = buffer
        self._tensors = tensors
        self._scale = scale
        self._digest = digest
        self._carried: tuple[_core.LoraModelConfig, _core.CarriedWeights] | None = None

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> AdapterWeights:
        """Takes tensors named as PEFT names them.

        Args:
            tensors: `...<module>.lora_A.weight` [r, in_features] and `...lora_B.weight`
                [out_features, r], float32, float16 or bfloat16, on any device.
            config: Fields as in PEFT's `adapter_config.json`.

        Returns:
            The weights.

        Raises:
            AdapterFormatError: A tensor is missing, or of an impossible shape or type.
            UnsupportedAdapterError: The configuration asks for more than plain LoRA.
        """
        parsed = parse_peft_config(config, _DESCRIPTION)
        buffer, packed = _pack(tensors)
        pairs = pair_tensors(packed, parsed, _DESCRIPTION)
        digest = hashlib.sha256(
            json.dumps([parsed.scale, [(t.name, t.dtype, t.shape) for t in packed]]).encode()
        )
        digest.update(buffer)
        return cls(buffer, pairs, parsed.scale, digest.hexdigest())

    @property
    def digest(self) -> str:
        """SHA-256 over names, types, shapes, bytes and the scale."""
        return self._digest

    def carried(self, model_config: _core.LoraModelConfig) -> _core.CarriedWeights:
        """What the core takes, for one model.

        Raises:
            AdapterFormatError: The weights do not fit the model.
            UnsupportedAdapterError: The rank is over the maximum.
        """
        if self._carried is None or self._carried[0] is not model_config:
            source = _core.make_memory_source(self._buffer, _DESCRIPTION)
            rows = make_rows(self._tensors, ModuleTable(model_config), self._scale, _DESCRIPTION)
            plan = _core.AdapterPlan(model_config, rows, source)
            self._carried = (model_config, _core.CarriedWeights(plan, self._digest))
        return self._carried[1]


def _pack(tensors: Mapping[str, torch.Tensor]) -> tuple[bytearray, list[StoredTensor]]:
    """All tensors back to back, by name, so that equal content gives an equal digest."""
    import torch

    buffer = bytearray()
    packed = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        dtype = _DTYPE_NAMES.get(str(tensor.dtype))
        if dtype is None:
            raise AdapterFormatError(
                f"tensor '{name}' of the {_DESCRIPTION} has dtype {tensor.dtype}: float32, "
                "float16 and bfloat16 are possible",
                path=_DESCRIPTION,
                tensor=name,
            )
        packed.append(StoredTensor(name, dtype, list(tensor.shape), len(buffer)))
        buffer += tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return buffer, packed
