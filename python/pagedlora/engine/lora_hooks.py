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
from pagedlora.model_config import describe_module


class RowMap:
    """Which rows use which adapter at a call site, during the current step.

    Attributes:
        batch: The native table; None while no row uses an adapter, and between steps.
        num_rows: Rows that the table describes.
        needs_bias: Whether any adapter has DoRA, which needs the modules' own biases.
    """

    __slots__ = ("batch", "needs_bias", "num_rows")

    def __init__(self) -> None:
        self.batch: _core.LoraBatch | None = None
        self.num_rows = 0
        self.needs_bias = False

    def set(self, lease: Any, segments: list[tuple[int | None, int]]) -> None:
        """Describes a step.

        Args:
            lease: The step's lease; holds every request named.
            segments: Request id (None: base model) and number of rows, in row order.
        """
        self.num_rows = sum(rows for _, rows in segments)
        self.batch = _core.LoraBatch(lease, segments) if self.num_rows else None
        self.needs_bias = self.batch is not None and self.batch.has_dora_scales

    def clear(self) -> None:
        """Ends the step."""
        self.batch = None

    def copy_from(self, other: RowMap) -> None:
        """Describes what another map does."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))


class _Hook:
    """What the forward hooks of all kinds of modules share."""

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

    def _input(
        self, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """What the module was called with."""
        given = args[0] if args else kwargs.get("input")
        if given is None:
            raise UnsupportedModelError(
                f"module '{self._name}' was called without its input as first argument or as "
                "'input'. Leave the module out of the target modules"
            )
        return given

    def _other_rows(self, num_rows: int) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"module '{self._name}' was called with {num_rows} rows where the step has "
            f"{self._row_map.num_rows}: it cannot be told which adapter each row uses. "
            "Leave the module out of the target modules"
        )

    def _set_dtype(self, dtype: torch.dtype) -> None:
        self._core_dtype = to_core_dtype(dtype)
        self._dtype = dtype


class _LinearHook(_Hook):
    """The forward hook of a linear module."""

    __slots__ = ()

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
        x = self._input(args, kwargs).contiguous()
        y = output.contiguous()
        num_rows = y.numel() // self._out_features
        if num_rows != self._row_map.num_rows or x.numel() != num_rows * self._in_features:
            raise self._other_rows(num_rows)
        dtype = y.dtype
        if x.dtype != dtype:
            raise UnsupportedModelError(
                f"module '{self._name}' takes {x.dtype} and returns {dtype}; adapters need one "
                "dtype"
            )
        if dtype is not self._dtype:
            self._set_dtype(dtype)
        bias = _bias(module, dtype) if self._row_map.needs_bias else None
        self._operator.apply(
            batch,
            self._index,
            x.data_ptr(),
            y.data_ptr(),
            num_rows,
            self._in_features,
            self._out_features,
            self._core_dtype,
            0 if bias is None else bias.data_ptr(),
        )
        # A strided output was copied: the copy, with the adapters added, takes its place.
        return None if y is output else y


class _EmbeddingHook(_Hook):
    """The forward hook of an embedding."""

    __slots__ = ()

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
        token_ids = self._input(args, kwargs).to(torch.int64).contiguous()
        y = output.contiguous()
        num_rows = y.numel() // self._out_features
        if num_rows != self._row_map.num_rows or token_ids.numel() != num_rows:
            raise self._other_rows(num_rows)
        if y.dtype is not self._dtype:
            self._set_dtype(y.dtype)
        self._operator.apply_embedding(
            batch,
            self._index,
            token_ids.data_ptr(),
            y.data_ptr(),
            num_rows,
            self._out_features,
            self._core_dtype,
            _factor(module),
        )
        return None if y is output else y


def _factor(module: nn.Module) -> float:
    """By which some embeddings scale what they look up; PEFT scales what it adds as well."""
    return float(getattr(module, "embed_scale", 1.0))


def _bias(module: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(module, "bias", None)
    return None if bias is None else bias.detach().to(dtype).contiguous()


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
        sites: list[tuple[nn.Module, _LinearHook | _EmbeddingHook]] = []
        self._has_output_site = False
        for index, spec in enumerate(config.modules):
            module = _find_module(model, spec)
            is_output = module is output_embeddings
            self._has_output_site |= is_output
            row_map = self._sampled_rows if is_output else self._all_rows
            is_embedding = isinstance(module, nn.Embedding)
            hook = _EmbeddingHook if is_embedding else _LinearHook
            sites.append((module, hook(self._operator, spec, index, row_map)))
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
    found = describe_module(spec.name, module)
    sizes = (spec.in_features, spec.out_features)
    if found is None or (found.in_features, found.out_features) != sizes or found.kind != spec.kind:
        what = "no linear module or embedding" if found is None else repr(found)
        raise InvalidArgumentError(
            f"module '{spec.name}' of the model is {what}, the configuration says {spec!r}"
        )
    return module
