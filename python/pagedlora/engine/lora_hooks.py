"""Adds adapters' outputs to a live model's modules by forward hooks.

Which rows of a module's input belong to which request is a row map. A step has two: all rows of
the row, and the sampled rows alone, which is what the output embedding gets. Each hook reads the
map of its call site, so a hook never guesses from a number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagedlora import _core
from pagedlora.engine.dtypes import to_core_dtype
from pagedlora.engine.gpu_lora import GpuLora, GpuLoraSizes, GpuRowMap
from pagedlora.engine.row_map import RowMap
from pagedlora.engine.step import StepBatch
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError
from pagedlora.model_config import describe_module
from pagedlora.shown import counted, quoted


@dataclass(frozen=True, slots=True)
class _Site:
    """A call site: its rows, and what computes for them."""

    row_map: RowMap
    operator: _core.LoraOperator | GpuLora


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

    def __init__(self, site: _Site, module: _core.LoraModule, index: int) -> None:
        self._operator = site.operator
        self._name: str = module.name
        self._in_features: int = module.in_features
        self._out_features: int = module.out_features
        self._index = index
        self._row_map = site.row_map
        # The dtype of the last call, and the core's name of it.
        self._dtype = torch.float32
        self._core_dtype = to_core_dtype(torch.float32)

    def _batch(self) -> _core.LoraBatch | None:
        """None where no adapter of the step touches the module, and between steps."""
        touched = self._row_map.touched
        if touched is None or not touched[self._index]:
            return None
        return self._row_map.batch

    def _input(
        self, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """What the module was called with."""
        given = args[0] if args else kwargs.get("input")
        if given is None:
            raise UnsupportedModelError(
                f"module {quoted(self._name)} was called without its input as first argument or as "
                "'input'. Leave the module out of the target modules"
            )
        return given

    def _other_rows(self, num_rows: int) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"module {quoted(self._name)} was called with {counted(num_rows, 'row')} where the "
            f"step has {self._row_map.num_rows}: it cannot be told which adapter each row uses. "
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
        batch = self._batch()
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
                f"module {quoted(self._name)} takes {x.dtype} and returns {dtype}; adapters need "
                "one dtype"
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
        if self._row_map.long_runs is not None:
            self._row_map.long_runs.add(
                self._index, x.view(num_rows, -1), y.view(num_rows, -1), bias
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
        batch = self._batch()
        if batch is None:
            return None
        token_ids = self._input(args, kwargs).to(torch.int64).contiguous()
        y = output.contiguous()
        num_rows = y.numel() // self._out_features
        if num_rows != self._row_map.num_rows or token_ids.numel() != num_rows:
            raise self._other_rows(num_rows)
        if y.dtype is not self._dtype:
            self._set_dtype(y.dtype)
        factor = _factor(module)
        self._operator.apply_embedding(
            batch,
            self._index,
            token_ids.data_ptr(),
            y.data_ptr(),
            num_rows,
            self._out_features,
            self._core_dtype,
            factor,
        )
        if self._row_map.long_runs is not None:
            self._row_map.long_runs.add_embedding(
                self._index, token_ids.view(-1), y.view(num_rows, -1), factor
            )
        return None if y is output else y


def _factor(module: nn.Module) -> float:
    """By which some embeddings scale what they look up; PEFT scales what it adds as well."""
    # Beside a tensor of the same value, which a GPU would have to be waited for.
    number = getattr(module, "scalar_embed_scale", None)
    return float(getattr(module, "embed_scale", 1.0) if number is None else number)


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
        *,
        gpu_sizes: GpuLoraSizes | None = None,
        samples_output: bool = True,
    ) -> None:
        """Puts a hook on every module of `config`.

        Args:
            model: The live model; left without hooks if this fails.
            config: Its modules, by their names in `model.named_modules()`.
            weights_dtype: Of the adapters in the cache.
            gpu_sizes: Of the tables, if the modules are on a GPU.
            samples_output: Whether the output embedding gets the sampled rows alone.

        Raises:
            InvalidArgumentError: The model has no such module, of another size, or on a device that
                these hooks do not compute on.
        """
        output_embeddings = _output_embeddings(model) if samples_output else None
        modules = [_find_module(model, spec) for spec in config.modules]
        device = _device_of(modules, gpu_sizes)
        self._has_output_site = any(module is output_embeddings for module in modules)
        all_rows = _make_site(config, weights_dtype, device, gpu_sizes)
        sampled_rows = (
            _make_site(config, weights_dtype, device, gpu_sizes)
            if self._has_output_site
            else all_rows
        )
        self._all_rows = all_rows.row_map
        self._sampled_rows = sampled_rows.row_map if self._has_output_site else RowMap()
        hooks: list[_LinearHook | _EmbeddingHook] = []
        for index, (module, spec) in enumerate(zip(modules, config.modules, strict=True)):
            site = sampled_rows if module is output_embeddings else all_rows
            kind = _EmbeddingHook if isinstance(module, nn.Embedding) else _LinearHook
            hooks.append(kind(site, spec, index))
        self._handles = [
            module.register_forward_hook(hook, with_kwargs=True)
            for module, hook in zip(modules, hooks, strict=True)
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
    def row_map(self) -> RowMap:
        """What the hooks read, but for that of an output embedding which gets the sampled rows."""
        return self._all_rows

    def remove(self) -> None:
        """Takes all hooks off the model; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    find: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    return find()


def _device_of(modules: list[nn.Module], gpu_sizes: GpuLoraSizes | None) -> torch.device:
    """Where all of the modules lie."""
    wanted = "cpu" if gpu_sizes is None else "cuda"
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    if len(devices) > 1 or any(device.type != wanted for device in devices):
        raise InvalidArgumentError(
            f"modules with adapters lie on {', '.join(sorted(map(str, devices)))}; all of them "
            f"must lie on one device, of the type '{wanted}'"
        )
    return next(iter(devices), torch.device(wanted))


def _make_site(
    config: _core.LoraModelConfig,
    weights_dtype: _core.Dtype,
    device: torch.device,
    gpu_sizes: GpuLoraSizes | None,
) -> _Site:
    if gpu_sizes is None:
        return _Site(RowMap(), _core.LoraOperator(weights_dtype))
    lora = GpuLora(config, gpu_sizes, device)
    return _Site(GpuRowMap(lora), lora)


def _find_module(model: nn.Module, spec: _core.LoraModule) -> nn.Module:
    try:
        module: nn.Module = model.get_submodule(spec.name)
    except AttributeError as error:
        raise InvalidArgumentError(f"the model has no module {quoted(spec.name)}") from error
    found = describe_module(spec.name, module)
    sizes = (spec.in_features, spec.out_features)
    if found is None or (found.in_features, found.out_features) != sizes or found.kind != spec.kind:
        what = "no linear module or embedding" if found is None else repr(found)
        raise InvalidArgumentError(
            f"module {quoted(spec.name)} of the model is {what}, the configuration says {spec!r}"
        )
    return module
