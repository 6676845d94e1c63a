"""A model configuration's modules as plain Python values."""

from __future__ import annotations

from typing import NamedTuple

from pagedlora import _core
from pagedlora.base_weights import BaseWeights, ModelWeights
from pagedlora.loaders.fused_modules import FusedModules, FusedNames, last_part, renamed
from pagedlora.loaders.tensor_names import AmbiguousNameError, NameMatcher
from pagedlora.sharding import sharding_of, whole_modules


class ModuleSizes(NamedTuple):
    """One module: its index in the model, and how many features go in and come out.

    An embedding's in_features are its vocabulary. `is_in_layer`: whether it belongs to a layer.
    """

    module_index: int
    in_features: int
    out_features: int
    is_embedding: bool = False
    is_in_layer: bool = True


class ModuleTable:
    """The modules of the whole model by name, also where `config` is that of one rank; immutable.

    Made once per model: the configuration copies its modules whenever it is asked for them, and
    every attribute of a native object costs a call.

    Attributes:
        config: What the table was made from.
        names: Module index to name.
        sizes: Name to index and sizes.
        matcher: Finds modules by the names that files have for them.
        fused: Which modules other models have fused or split.
        max_lora_rank: The configuration's.
        sharding: What of the model is on this rank; None: all.
    """

    __slots__ = (
        "_base",
        "config",
        "fused",
        "matcher",
        "max_lora_rank",
        "names",
        "sharding",
        "sizes",
    )

    def __init__(
        self,
        config: _core.LoraModelConfig,
        fused: FusedModules | None = None,
        base: BaseWeights | None = None,
    ) -> None:
        """Takes what is needed of a configuration.

        Args:
            config: The modules that can carry LoRA.
            fused: Which modules other models have fused or split.
            base: Those of a live model tell which other modules it has.

        Raises:
            InvalidArgumentError: `fused` is no such map.
        """
        self.config = config
        self.max_lora_rank = config.max_lora_rank
        self.sharding = sharding_of(config)
        modules = whole_modules(config)
        self.names = tuple(module.name for module in modules)
        self.sizes = {
            module.name: ModuleSizes(
                index,
                module.in_features,
                module.out_features,
                module.kind == _core.ModuleKind.embedding,
                module.layer_id >= 0,
            )
            for index, module in enumerate(modules)
        }
        self.matcher = NameMatcher(self.names)
        self.fused = FusedNames({} if fused is None else fused)
        self._base = base if isinstance(base, ModelWeights) else None

    def base_modules(self, raw: str, module: str) -> tuple[str, ...] | None:
        """Which of the model's modules, LoRA or not, an adapter's module is. For errors: slow.

        Args:
            raw: As in `TensorName`.
            module: As in `TensorName`.

        Returns:
            Itself; or what it is fused in or split into there; empty: the model has no such module.
            None: nobody knows.
        """
        if self._base is None:
            return None
        matcher = NameMatcher(self._base.module_names)
        part = self.fused.part(module)
        own = (last_part(module),)
        for lasts in (own, self.fused.parts(module), (part.fused,) if part is not None else ()):
            found = [_find(matcher, renamed(raw, last), renamed(module, last)) for last in lasts]
            if found and None not in found:
                return tuple(name for name in found if name is not None)
        return None if self.sharding is not None else ()

    def can_carry_lora(self, base_module: str) -> bool:
        """Whether one of `base_modules` is of a kind that LoRA is for."""
        return self._base is None or self._base.can_carry_lora(base_module)


def _find(matcher: NameMatcher, raw: str, module: str) -> str | None:
    try:
        return matcher.find(raw, module)
    except AmbiguousNameError:
        return module
