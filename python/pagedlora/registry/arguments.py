"""What a `LoraManager` is made of: a cache of the same model, and options of the right types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedlora import _core
from pagedlora.arguments import check_type
from pagedlora.errors import InvalidArgumentError
from pagedlora.sharding import sharding_of
from pagedlora.shown import counted, quoted, shown

if TYPE_CHECKING:
    from pagedlora.peft_cache import PeftCacheManager

_WAY_OUT = "give both the same LoraModelConfig"


def check_fitting(model_config: _core.LoraModelConfig, cache: PeftCacheManager) -> None:
    """Refuses what is no configuration, no cache, or the cache of another model or rank.

    Their maximum ranks may differ: the cache has no limit of its own.

    Raises:
        InvalidArgumentError: Names the first difference with both values.
    """
    check_type(model_config, _core.LoraModelConfig, "model_config")
    theirs = getattr(cache, "model_config", None)
    if not isinstance(theirs, _core.LoraModelConfig) or not hasattr(cache, "core"):
        raise InvalidArgumentError(
            f"cache_manager is {shown(cache)}: it must be a PeftCacheManager"
        )
    if theirs is model_config:
        return
    difference = _difference(model_config, theirs)
    if difference:
        raise InvalidArgumentError(
            f"the cache was made for another model configuration: {difference}; {_WAY_OUT}"
        )


def check_options(base_weights: object, **flags: object) -> None:
    """Refuses weights that cannot be asked for, and flags that are neither true nor false.

    Raises:
        InvalidArgumentError: Names the argument.
    """
    if base_weights is not None and not callable(base_weights):
        raise InvalidArgumentError(
            f"base_weights is {shown(base_weights)}: it must be called with a module's name, such "
            "as ModelWeights(model)"
        )
    for name, value in flags.items():
        check_type(value, bool, name)


def _difference(mine: _core.LoraModelConfig, theirs: _core.LoraModelConfig) -> str:
    if mine.dtype != theirs.dtype:
        return f"its dtype is {theirs.dtype.name}, not {mine.dtype.name}"
    my_modules, their_modules = mine.modules, theirs.modules
    if len(my_modules) != len(their_modules):
        return f"it has {counted(len(their_modules), 'module')}, not {len(my_modules)}"
    for index, (a, b) in enumerate(zip(my_modules, their_modules, strict=True)):
        if a != b:
            return f"its module {index} is {quoted(repr(b))}, not {quoted(repr(a))}"
    ranks = [None if s is None else s.parallel for s in (sharding_of(mine), sharding_of(theirs))]
    if ranks[0] != ranks[1]:
        return f"it is that of {ranks[1] or 'a whole model'}, not of {ranks[0] or 'a whole model'}"
    return ""
