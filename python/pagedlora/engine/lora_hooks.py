"""Adds adapters' outputs to a live model's modules by forward hooks.

Which rows of a module's input belong to which request is a row map. A step has two: all rows of
the row, and the sampled rows alone, which is what the output embedding gets. Each hook reads the
map of its call site, so a hook never guesses from a number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pagedlora import _core
from pagedlora.engine.dtypes import to_core_dtype
from pagedlora.engine.step import StepBatch
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError


class RowMap:
    """Which rows use which adapter at a call site, during the current step.

    Attributes:
        batch: The native table; None while no row uses an adapter, and between steps.
        num_rows: Rows that the table describes.
    """

    __slots__ = ("batch", "num_rows")

    def __init__(self) -> None:
        self.batch: _core.LoraBatch | None = None
        self.num_rows = 0

    def set(self, lease: Any, segments: list[tuple[int | None, int]]) -> None:
        """Describes a step.

        Args:
            lease: The step's lease; holds every request named.
            segments: Request id (None: base model) and number of rows, in row order.
        """
        self.num_rows = sum(rows for _, rows in segments)
        self.batch = _core.LoraBatch(lease, segments) if self.num_rows else None

    def clear(self) -> None:
        """Ends the step."""
        self.batch = None

    def copy_from(self, other: RowMap) -> None:
        """Describes what another map does."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))


class _ModuleHook:
    """The forward hook of one module."""

    __slots__ = (
        "_core_dtype",
        "_dtype",
        "_in_features",
        "_index",
        "_name",
        "_operator",
        "_out_features",
        "_row_map",
    )

    def __init__(
        self, operator: _core.LoraOperator, module: _core.LoraModule, index: int, row_map: RowMap
    ) -> None:
        self._operator = operator
        self._name: str = module.name
        self._in_features: int = module.in_features
        self._out_features: int = module.out_features
        self._index = index
        self._row_map = row_map
        # The dtype of the last call, and the core's name of it.
        self._dtype = torch.float32
        self._core_dtype = to_core_dtype(torch.float32)

    def __call__(
        self,
        module: nn.Module,
        args: tuple[torch.Tensor, ...],
        kwargs: dict[str, torch.Tensor],
        output: torch.Tensor,
    ) -> torch.Tensor | None:
        batch = self._row_map.batch
        if batch is None:
            return None
        given = args[0] if args else kwargs.get("input")
        if given is None:
            raise UnsupportedModelError(
                f"module '{self._name}' was called without its input as first argument or as "
                "'input'. Leave the module out of the target modules"
            )
        x = given.contiguous()
        y = output.contiguous()
        num_rows = y.numel() // self._out_features
        if num_rows != self._row_map.num_rows or x.numel() != num_rows * self._in_features:
            raise UnsupportedModelError(
                f"module '{self._name}' was called with {num_rows} rows where the step has "
                f"{self._row_map.num_rows}: it cannot be told which adapter each row uses. "
                "Leave the module out of the target modules"
            )
        dtype = y.dtype
        if x.dtype != dtype:
            raise UnsupportedModelError(
                f"module '{self._name}' takes {x.dtype} and returns {dtype}; adapters need one "
                "dtype"
            )
        if dtype is not self._dtype:
            self._core_dtype = to_core_dtype(dtype)
            self._dtype = dtype
        self._operator.apply(
            batch,
            self._index,
            x.data_ptr(),
            y.data_ptr(),
            num_rows,
            self._in_features,
            self._out_features,
            self._core_dtype,
        )
        # A strided output was copied: the copy, with the adapters added, takes its place.
        return None if y is output else y


class LoraHooks:
    """The hooks of a model, from construction to `remove()`; thread-compatible."""

    def __init__(
        self,
        model: nn.Module,
        config: _core.LoraModelConfig,
        weights_dtype: _core.Dtype,
    ) -> None:
        """Puts a hook on every module of `config`.

        Args:
            model: The live model; left without hooks if this fails.
            config: Its modules, by their names in `model.named_modules()`.
            weights_dtype: Of the adapters in the cache.

        Raises:
            InvalidArgumentError: The model has no such module, or of another size.
        """
        self._all_rows = RowMap()
        self._sampled_rows = RowMap()
        self._operator = _core.LoraOperator(weights_dtype)
        get_output_embeddings: Callable[[], nn.Module | None] = getattr(
            model, "get_output_embeddings", lambda: None
        )
        output_embeddings = get_output_embeddings()
        sites: list[tuple[nn.Module, _ModuleHook]] = []
        self._has_output_site = False
        for index, spec in enumerate(config.modules):
            module = _find_module(model, spec)
            is_output = module is output_embeddings
            self._has_output_site |= is_output
            row_map = self._sampled_rows if is_output else self._all_rows
            sites.append((module, _ModuleHook(self._operator, spec, index, row_map)))
        self._handles = [
            module.register_forward_hook(hook, with_kwargs=True) for module, hook in sites
        ]

    @contextmanager
    def step(self, step: StepBatch, lease: Any) -> Iterator[None]:
        """Makes the hooks act on one step until the block ends.

        Args:
            step: The row.
            lease: Holds the adapters of all sequences with `uses_adapter`; not read if there are
                none.

        Raises:
            InvalidArgumentError: Sequences use adapters, but there is no lease.
        """
        if not step.any_adapter:
            yield
            return
        if lease is None:
            raise InvalidArgumentError("sequences of the step use adapters: a lease is needed")
        users = [s.request_id if s.uses_adapter else None for s in step.sequences]
        try:
            self._all_rows.set(
                lease,
                [(u, len(s.token_ids)) for u, s in zip(users, step.sequences, strict=True)],
            )
            if self._has_output_site:
                self._sampled_rows.set(
                    lease, [(u, 1) for u, s in zip(users, step.sequences, strict=True) if s.sample]
                )
            yield
        finally:
            self._all_rows.clear()
            self._sampled_rows.clear()

    @property
    def row_maps(self) -> tuple[RowMap, RowMap]:
        """What the hooks read: that of the output embedding last, that of all others first."""
        return self._all_rows, self._sampled_rows

    def remove(self) -> None:
        """Takes all hooks off the model; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _find_module(model: nn.Module, spec: _core.LoraModule) -> nn.Module:
    try:
        module: nn.Module = model.get_submodule(spec.name)
    except AttributeError as error:
        raise InvalidArgumentError(f"the model has no module '{spec.name}'") from error
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    if sizes != (spec.in_features, spec.out_features):
        raise InvalidArgumentError(
            f"module '{spec.name}' has in and out features {sizes}, the configuration says "
            f"{(spec.in_features, spec.out_features)}"
        )
    return module
