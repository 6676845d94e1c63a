"""The base model's weights, which DoRA adapters are measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pagedlora.errors import UnsupportedAdapterError
from pagedlora.shown import quoted

if TYPE_CHECKING:
    import torch
    from torch import nn


class BaseWeights(Protocol):
    """Gives the weight of one of the base model's modules when asked by name."""

    def __call__(self, module_name: str) -> torch.Tensor:
        """Its weight [out_features, in_features], of any floating-point type.

        An embedding's in_features are its vocabulary.

        Raises:
            UnsupportedAdapterError: It has none of that form.
        """
        ...


class ModelWeights:
    """The weights of a live model, which must not change. Thread-safe."""

    def __init__(self, model: nn.Module) -> None:
        """Keeps the model, not copies of its weights."""
        self._model = model

    @property
    def module_names(self) -> list[str]:
        """Names of all modules."""
        return [name for name, _ in self._model.named_modules()]

    def can_carry_lora(self, module_name: str) -> bool:
        """Whether a module is of a kind that LoRA is for."""
        from pagedlora.model_config import describe_module

        return describe_module(module_name, self._model.get_submodule(module_name)) is not None

    def __call__(self, module_name: str) -> torch.Tensor:
        """As `BaseWeights`."""
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        try:
            module = self._model.get_submodule(module_name)
        except (AttributeError, TypeError):
            raise UnsupportedAdapterError(
                f"the base model has no module {quoted(module_name)}, whose weight is asked for",
                field="use_dora",
            ) from None
        weight: torch.Tensor | None = getattr(module, "weight", None)
        if weight is None or not weight.is_floating_point():
            raise UnsupportedAdapterError(
                f"use_dora needs the weight of module {quoted(module_name)}, a "
                f"{type(module).__name__}, which has no floating-point one: serve the adapter on "
                "a base model that is not quantised",
                field="use_dora",
            )
        weight = weight.detach()
        return weight.T if isinstance(module, (nn.Embedding, Conv1D)) else weight


class SizesOnly(ModelWeights):
    """Stands for the weights of a model without any, where adapters are only measured.

    What is planned with it must not be used: the scales of DoRA are zeros.
    """

    def __call__(self, module_name: str) -> torch.Tensor:
        """Refuses.

        Raises:
            UnsupportedAdapterError: Always.
        """
        raise UnsupportedAdapterError(
            f"there is no weight of module {quoted(module_name)}: adapters are only measured here",
            field="use_dora",
        )
