"""Holding a live model: our attention switched on, dropout off, and everything put back.

transformers keeps the name of the attention implementation in configuration objects, which models
may share. So what was there before is remembered per configuration object and counted: it returns
when the last model that holds the object is released.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pagedlora.engine.attention import ATTENTION_NAME
from pagedlora.errors import UnsupportedModelError


@dataclass(slots=True)
class _HeldConfig:
    config: PreTrainedConfig  # keeps the object, and so its id, alive
    implementation: str | None
    holders: int = 0


_lock = threading.Lock()
_held_configs: dict[int, _HeldConfig] = {}  # by id(config); guarded by _lock


def _iter_configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """The distinct configuration objects of a model, each before those that it contains."""
    seen: set[int] = set()
    pending = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while pending:
        config = pending.pop(0)
        if id(config) in seen:
            continue
        seen.add(id(config))
        yield config
        children = (getattr(config, name, None) for name in config.sub_configs)
        pending.extend(child for child in children if child is not None)


class LiveModelHold:
    """Makes a live model call our attention function, until `release()`.

    The model's weights are not touched. Holds on different models are independent, even if these
    share a configuration; several holds on one model are released in reverse order. Thread-safe.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Takes hold.

        Args:
            model: Not changed if this fails.

        Raises:
            UnsupportedModelError: The model keeps its own attention.
        """
        self._configs = list(_iter_configs(model))
        self._training_modules: list[nn.Module] = []
        with _lock:
            for config in self._configs:
                held = _held_configs.setdefault(
                    id(config), _HeldConfig(config, config._attn_implementation)
                )
                held.holders += 1
            self._released = False
            try:
                model.set_attn_implementation(ATTENTION_NAME)
            except (ValueError, ImportError) as error:
                self._release_configs()
                raise UnsupportedModelError(
                    f"{type(model).__name__} does not take a custom attention function: {error}"
                ) from error
            if model.config._attn_implementation != ATTENTION_NAME:
                self._release_configs()
                raise UnsupportedModelError(f"{type(model).__name__} keeps its own attention")
        self._training_modules = [module for module in model.modules() if module.training]
        model.eval()

    def _release_configs(self) -> None:
        """Restores the configurations that nobody holds any more; the caller holds the lock."""
        self._released = True
        for config in self._configs:
            held = _held_configs[id(config)]
            held.holders -= 1
            if held.holders == 0:
                del _held_configs[id(config)]
                # The setter also sets the configurations inside; those follow in our list.
                config._attn_implementation = held.implementation

    def release(self) -> None:
        """Gives the model back as it was; idempotent."""
        with _lock:
            if self._released:
                return
            self._release_configs()
        for module in self._training_modules:
            module.training = True
        self._training_modules.clear()
