"""Adapter weights that a request carries instead of naming a registered adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedlora import _core
from pagedlora.arguments import check_type
from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.binding import ZERO_BIAS, bind, dora_error
from pagedlora.loaders.digest import ModuleContent, content_digest
from pagedlora.loaders.given_tensors import config_json
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.packed import unpack
from pagedlora.loaders.peft_config import fields_of, parse_peft_config
from pagedlora.loaders.pickled import own_tensors
from pagedlora.loaders.rows import AdapterModule, AdapterTensors, pair_tensors
from pagedlora.loaders.stored import TORCH_DTYPES, MatrixPair, StoredTensor
from pagedlora.loaders.tensor_names import canonical_name
from pagedlora.loaders.values import ValueCheck
from pagedlora.shown import quoted

if TYPE_CHECKING:
    import torch

_DESCRIPTION = "request weights"
_FOLDED_SCALE = 1.0
"""Of packed weights: whoever packs them has multiplied B by the scale."""


class AdapterWeights:
    """Weights of one adapter in memory; immutable, thread-safe.

    The tensors are copied once at construction, so that later changes to them cannot change what
    a request answers.
    """

    def __init__(self, buffer: bytearray, tensors: AdapterTensors, digest: str) -> None:
        """Use `from_tensors` or `from_packed`."""
        self._buffer = buffer
        self._tensors = tensors
        self._digest = digest
        self._carried: tuple[_core.LoraModelConfig, _core.CarriedWeights] | None = None

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> AdapterWeights:
        """Takes tensors named as PEFT names them.

        Args:
            tensors: `...<module>.lora_A.weight` [r, in_features] and `...lora_B.weight`
                [out_features, r], float32, float16 or bfloat16, on any device; for an embedding
                `...lora_embedding_A` and `...lora_embedding_B`; with `lora_bias`
                `...lora_B.bias`.
            config: Fields as in PEFT's `adapter_config.json`, or PEFT's own `LoraConfig`.

        Returns:
            The weights.

        Raises:
            AdapterFormatError: A tensor is missing, or of an impossible shape or type, or has
                values that are NaN or infinite.
            UnsupportedAdapterError: The configuration asks for something that is not supported.
        """
        fields = fields_of(config_json(config, _DESCRIPTION), _DESCRIPTION)
        parsed = parse_peft_config(fields, _DESCRIPTION)
        buffer, packed = _pack(tensors)
        pairs = pair_tensors(packed, parsed, _DESCRIPTION)
        return cls(buffer, pairs, _digest(buffer, pairs, ValueCheck(_DESCRIPTION, None)))

    @classmethod
    def from_packed(
        cls, weights: torch.Tensor, config: torch.Tensor, model_config: _core.LoraModelConfig
    ) -> AdapterWeights:
        """Takes the tensors that TensorRT-LLM takes with a request.

        Their producers have folded the adapter's scale into B already, so the scale here is 1.0:
        if yours have not, multiply B before packing.

        Args:
            weights: [1, rows, W] or [rows, W], float32, float16 or bfloat16, on the CPU. A row is
                one module's A [rank, in_features], then its B [out_features, rank], flattened,
                then zeros; W is the length of the longest row, or more. Always of the sizes of
                the whole modules, also where `model_config` is that of one rank.
            config: int32 [1, rows, 3 or 4] or [rows, 3 or 4], on the CPU. A row is (module id,
                layer, rank), or (module id, layer, rank, 1 for DoRA and 0 for plain LoRA).
            model_config: Gives its modules TensorRT-LLM's ids: those of `from_module` and
                `from_hf_config` have them under the names qkv_proj, q_proj, k_proj, v_proj,
                o_proj, gate_proj, down_proj, up_proj and gate_up_proj. A row whose id and layer
                no module has is an error.

        Returns:
            The weights. The order of the rows, W and the leading and fourth dimensions do not
            count: adapters of equal content have equal digests.

        Raises:
            AdapterFormatError: A tensor is of an impossible type or shape or on another device;
                the two have different numbers of rows, or none; a row fits no module or several,
                or one that another row fits; it has too few values for its matrices, or values
                other than zero after them.
            UnsupportedAdapterError: A row is DoRA, or its rank is over the maximum.
        """
        check_type(model_config, _core.LoraModelConfig, "model_config")
        pairs = unpack(weights, config, model_config, _DESCRIPTION)
        names = {module: (f"{module}.lora_A.weight", f"{module}.lora_B.weight") for module in pairs}
        buffer, packed = _pack(
            {
                name: matrix
                for module, pair in pairs.items()
                for name, matrix in zip(names[module], pair, strict=True)
            }
        )
        stored = {tensor.name: tensor for tensor in packed}
        modules = {
            module: AdapterModule(module, MatrixPair(stored[a], stored[b]), _FOLDED_SCALE)
            for module, (a, b) in names.items()
        }
        tensors = AdapterTensors(modules, len(packed))
        return cls(buffer, tensors, _digest(buffer, tensors))

    @property
    def digest(self) -> str:
        """That of the content, in hexadecimal: see `pagedlora.loaders.digest`."""
        return self._digest

    def carried(self, model_config: _core.LoraModelConfig) -> _core.CarriedWeights:
        """What the core takes, for one model.

        Raises:
            AdapterFormatError: The weights do not fit the model.
            UnsupportedAdapterError: The rank is over the maximum, or the adapter is DoRA, which
                needs the base model's weights.
        """
        if self._carried is None or self._carried[0] is not model_config:
            adapter = bind(self._tensors, ModuleTable(model_config), _DESCRIPTION)
            for module in adapter.modules:  # on every rank, whichever has the module
                if module.vectors.magnitude is not None:
                    raise dora_error(module.vectors.magnitude)
            for copy in adapter.base_copies.values():
                raise UnsupportedAdapterError(
                    f"tensor {quoted(copy.name)} of the {_DESCRIPTION} is a copy of the base "
                    "model's weight, which cannot be compared here: leave it out",
                    field=copy.name,
                )
            buffer, offsets = self._buffer, {}
            if adapter.zero_bias_bytes:
                offsets[ZERO_BIAS] = len(buffer)
                buffer = buffer + bytes(adapter.zero_bias_bytes)
            source = _core.make_memory_source(buffer, _DESCRIPTION)
            plan = _core.AdapterPlan(model_config, adapter.rows(offsets), source)
            self._carried = (model_config, _core.CarriedWeights(plan, self._digest))
        return self._carried[1]


def _digest(buffer: bytearray, tensors: AdapterTensors, check: ValueCheck | None = None) -> str:
    view = memoryview(buffer)
    modules = (
        ModuleContent(name, module.scale, module.pair, module.vectors, module.is_embedding)
        for name, module in tensors.modules.items()
    )
    return content_digest(modules, lambda offset, size: (view[offset : offset + size],), check)


def _pack(tensors: Mapping[str, torch.Tensor]) -> tuple[bytearray, list[StoredTensor]]:
    """All tensors back to back, by name, so that equal content has equal plans."""
    import torch

    buffer = bytearray()
    packed = []
    own = own_tensors(tensors, _DESCRIPTION)
    for name in sorted(own, key=canonical_name):
        tensor = own[name]
        dtype = TORCH_DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise AdapterFormatError(
                f"tensor {quoted(name)} of the {_DESCRIPTION} has dtype {tensor.dtype}: float32, "
                "float16 and bfloat16 are possible",
                path=_DESCRIPTION,
                tensor=name,
            )
        packed.append(StoredTensor(name, dtype, list(tensor.shape), len(buffer)))
        buffer += tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return buffer, packed
