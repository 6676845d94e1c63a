"""What an adapter's configuration says about single modules: which are meant, rank and scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from pagedlora.errors import AdapterFormatError
from pagedlora.loaders.patterns import (
    BadPatternError,
    Expression,
    KeyTable,
    NameSet,
    PatternTimer,
)
from pagedlora.loaders.peft_config import PeftLoraConfig
from pagedlora.loaders.peft_values import MAX_FLOAT32
from pagedlora.shown import quoted

_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."
_LAYER_OF_PATTERN = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."


class ModuleScaling(NamedTuple):
    """Rank and factor of one module, and where they come from.

    Attributes:
        rank: What its tensors must have.
        scale: The factor of B A x.
        rank_source: How errors name what says the rank: "r=8", "rank_pattern['q_proj']=4".
    """

    rank: int
    scale: float
    rank_source: str


class ModuleRules:
    """A configuration's rules for modules, by the names that they had in training.

    Remembers which keys of patterns were needed; not thread-safe.
    """

    def __init__(self, config: PeftLoraConfig, path: str) -> None:
        """Compiles the patterns.

        Args:
            config: The checked configuration.
            path: Named in errors, where the configuration does not say where it is from.

        Raises:
            AdapterFormatError: A pattern is not a regular expression, or too long.
        """
        self._config, self._path = config, config.path or path
        timer = PatternTimer()
        with self._errors("rank_pattern"):
            self._ranks = KeyTable(config.rank_pattern, timer)
        with self._errors("alpha_pattern"):
            self._alphas = KeyTable(config.alpha_pattern, timer)
        with self._errors("target_modules"):
            targets = config.target_modules
            self._targets = None if targets == "all-linear" else NameSet(targets, timer)
        with self._errors("exclude_modules"):
            excluded = config.exclude_modules
            self._excluded = NameSet(excluded, timer) if excluded else None
        with self._errors("layers_pattern"):
            self._layers = [
                Expression(pattern, timer, _LAYER_OF_PATTERN) for pattern in config.layers_pattern
            ] or [Expression(_ANY_LAYER, timer)]
        self._unused_ranks = dict.fromkeys(config.rank_pattern)
        self._unused_alphas = dict.fromkeys(config.alpha_pattern)

    @property
    def base_model(self) -> str:
        """As in the configuration."""
        return self._config.base_model

    def scaling(self, module: str) -> ModuleScaling:
        """Rank and scale of a module, as PEFT's `LoraModel` and `LoraLayer.update_layer` say.

        Raises:
            AdapterFormatError: Its scale is over float32's range, or a pattern takes too long.
        """
        config = self._config
        rank, rank_source = config.r, f"r={config.r}"
        key = self._find_key("rank_pattern", self._ranks, module)
        if key is not None:
            self._unused_ranks.pop(key, None)
            rank = config.rank_pattern[key]
            rank_source = f"rank_pattern[{key!r:.80}]={rank}"
        alpha = config.lora_alpha
        key = self._find_key("alpha_pattern", self._alphas, module)
        if key is not None:
            self._unused_alphas.pop(key, None)
            alpha = config.alpha_pattern[key]
        scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        if abs(scale) > MAX_FLOAT32:
            raise self._error(
                f"has {rank_source} and an alpha of {alpha} for {quoted(module)}: the scale is "
                "over float32's range"
            )
        return ModuleScaling(rank, scale, rank_source)

    def is_target(self, module: str) -> bool:
        """Whether PEFT would put LoRA on a linear module of that name.

        Raises:
            AdapterFormatError: A pattern takes too long.
        """
        if self._excluded is not None and self._has("exclude_modules", self._excluded, module):
            return False
        if self._targets is None:
            return True
        if not self._has("target_modules", self._targets, module):
            return False
        if not self._config.layers_to_transform or self._targets.has_exactly(module):
            return True
        with self._errors("layers_pattern"):
            return self._layer(module) in self._config.layers_to_transform

    @property
    def targets_all_linear(self) -> bool:
        """Whether the targets are "all-linear"."""
        return self._targets is None

    def unused_keys(self) -> Iterator[tuple[str, str]]:
        """Field and key of patterns that no module needed so far."""
        unused: Mapping[str, Mapping[str, None]] = {
            "rank_pattern": self._unused_ranks,
            "alpha_pattern": self._unused_alphas,
        }
        for field, keys in unused.items():
            for key in keys:
                yield field, key

    def _find_key(self, field: str, keys: KeyTable, module: str) -> str | None:
        if not keys:
            return None
        with self._errors(field):
            return keys.find(module)

    def _has(self, field: str, names: NameSet, module: str) -> bool:
        if not names.is_expression:
            return module in names
        with self._errors(field):
            return module in names

    def _layer(self, module: str) -> int | None:
        for expression in self._layers:
            digits = expression.first_group(module)
            if digits is not None:
                return int(digits)
        return None

    @contextmanager
    def _errors(self, field: str) -> Iterator[None]:
        try:
            yield
        except BadPatternError as error:
            raise self._error(f"has {field}: {error}") from None

    def _error(self, problem: str) -> AdapterFormatError:
        return AdapterFormatError(f"{quoted(self._path)} {problem}", path=self._path, tensor="")
