"""Holding a live model: our attention switched on, dropout off, and everything put back.

transformers keeps the name of the attention implementation in configuration objects, which models
may share. So what was there before is remembered per configuration object and counted: it returns
when the last model that holds the object is released.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from pagedlora.engine.attention import ATTENTION_NAME
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError
from pagedlora.shown import quoted


class _Turn:
    """Who computes with a model: the hooks of all that hold it are on the same modules."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: int | None = None  # that has it


@contextmanager
def turn_of(model: nn.Module) -> Iterator[None]:
    """Waits until no other engine computes with the model, and keeps the others waiting.

    Raises:
        InvalidArgumentError: This thread has its turn already, as inside another engine's step.
    """
    with _lock:
        turn = _turns.setdefault(model, _Turn())
    if turn.thread == threading.get_ident():
        raise InvalidArgumentError(
            "a step was called from inside another engine's step on the same model: call it after"
        )
    with turn.lock:
        turn.thread = threading.get_ident()
        try:
            yield
        finally:
            turn.thread = None


def check_not_attached(model: nn.Module) -> None:
    """Raises InvalidArgumentError if `attach` has hooks on the model: both would act in a step."""
    for name, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()
        if any(type(hook).__module__ == "pagedlora.attachment" for hook in hooks):
            raise InvalidArgumentError(
                f"module {quoted(name)} is attached: detach() it before the model is given to "
                "an LLM"
            )


@dataclass(slots=True)
class _HeldConfig:
    config: PreTrainedConfig  # keeps the object, and so its id, alive
    implementation: str | None
    holders: int = 0


_lock = threading.Lock()
_held_configs: dict[int, _HeldConfig] = {}  # by id(config); guarded by _lock
_turns: WeakKeyDictionary[nn.Module, _Turn] = WeakKeyDictionary()  # guarded by _lock


def _after_fork() -> None:
    """Nobody holds the lock or has a turn in a child process: the others' threads are not there."""
    global _lock, _turns
    _lock, _turns = threading.Lock(), WeakKeyDictionary()


os.register_at_fork(after_in_child=_after_fork)


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
        self._configs: list[PreTrainedConfig] = []  # those that this hold counts in
        self._training_modules: list[nn.Module] = []
        try:
            with _lock:
                for config in _iter_configs(model):
                    self._hold_config(config)
                _switch_attention(model)
            self._training_modules = [module for module in model.modules() if module.training]
            model.eval()
        except BaseException:  # whatever foreign model code raises, and Ctrl-C
            self.release()
            raise

    def _hold_config(self, config: PreTrainedConfig) -> None:
        """Remembers and counts a configuration; the caller holds the lock."""
        held = _held_configs.setdefault(
            id(config), _HeldConfig(config, config._attn_implementation)
        )
        self._configs.append(config)
        held.holders += 1

    def release(self) -> None:
        """Gives the model back as it was; idempotent."""
        with _lock:
            # In the order of _iter_configs: the setter also sets the configurations inside, which
            # follow.
            while self._configs:
                _release_config(self._configs.pop(0))
        for module in self._training_modules:
            module.training = True
        self._training_modules.clear()


def _release_config(config: PreTrainedConfig) -> None:
    """Restores a configuration if nobody holds it any more; the caller holds the lock."""
    held = _held_configs[id(config)]
    held.holders -= 1
    if held.holders == 0:
        del _held_configs[id(config)]
        config._attn_implementation = held.implementation


def _switch_attention(model: PreTrainedModel) -> None:
    """Makes the model call our attention function; the caller holds the lock.

    Raises:
        UnsupportedModelError: It keeps its own.
    """
    try:
        model.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take a custom attention function: {error}"
        ) from error
    if model.config._attn_implementation != ATTENTION_NAME:
        raise UnsupportedModelError(f"{type(model).__name__} keeps its own attention")
