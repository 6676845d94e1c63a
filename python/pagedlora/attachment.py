"""Adapters in any `nn.Module`, without the engine: encoders, classifiers, loops of your own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagedlora import _core
from pagedlora.arguments import check_type
from pagedlora.engine import lora_hooks
from pagedlora.engine.devices import current_stream
from pagedlora.engine.gpu_lora import GpuLoraSizes
from pagedlora.engine.lora_hooks import LoraHooks
from pagedlora.errors import InvalidArgumentError, PagedLoraError, UnsupportedModelError
from pagedlora.requests import LlmRequest
from pagedlora.shown import counted, quoted, shown

if TYPE_CHECKING:
    from pagedlora.lora_manager import LoraManager
    from pagedlora.peft_cache import PeftCacheManager

_request_ids = itertools.count(2**62)
"""Far from those that callers give to requests of the same cache."""
_KNOWN_TASKS = 256
"""Adapters of which it is remembered which modules they change."""
_SHOWN_MODULES = 3
_FIRST_ROWS = 1024
_FIRST_TASKS = 16
"""Of the tables on a GPU, which grow."""


def attach(module: nn.Module, cache: PeftCacheManager, adapters: LoraManager) -> Attachment:
    """Lets a module answer with adapters, inside `with attachment.rows([...])`.

    Outside of such blocks the module computes what it did before.

    Args:
        module: Where the cache's device tier is: on the CPU, or on one GPU. Its weights are not
            touched; it gets hooks until `detach()`.
        cache: Made for `LoraModelConfig.from_module(module, ...)`: those modules carry adapters.
        adapters: A registry over that cache.

    Raises:
        InvalidArgumentError: The module is not the one that the cache was made for, is elsewhere
            than the cache's device tier, is attached already, or belongs to an `LLM`; or the
            registry is another cache's.
        UnsupportedModelError: Its weights are neither on the CPU nor on a GPU of CUDA.
        GpuCallError: The GPU has no memory for the tables of a batch, for one.
    """
    return Attachment(module, cache, adapters)


class Attachment:
    """A module that answers with adapters; made by `attach`.

    One block of `rows` is open at a time, and the module is called by the thread that opened it:
    a second block, or a call by another thread meanwhile, raises. Nobody else may be inside the
    module when a block opens. Several attachments may share a cache; their blocks may overlap if
    its `max_inflight_batches` allows as many.

    On a GPU adapters are computed on torch's current stream, that of the module's own work. Whoever
    calls modules of one block on several streams orders these, as torch asks for anyway.
    """

    def __init__(self, module: nn.Module, cache: PeftCacheManager, adapters: LoraManager) -> None:
        """As `attach`."""
        check_type(module, nn.Module, "module")
        if getattr(adapters, "cache_manager", None) is not cache or not hasattr(cache, "core"):
            raise InvalidArgumentError(
                "the LoraManager was made for another cache, or the two are none: give a "
                "PeftCacheManager and a LoraManager made for it"
            )
        config = cache.model_config
        self._device = _device_of(cache)
        _check_free(module, config, self._device)
        self._cache = cache
        self._adapters = adapters
        self._process = _core.ProcessMark()
        self._lock = threading.Lock()
        self._block: _Block | None = None
        self._modules_of_task: dict[int, frozenset[str]] = {}
        self._hooks: LoraHooks | None = LoraHooks(
            module,
            config,
            config.dtype,
            gpu_sizes=_gpu_sizes(cache) if self._device.type == "cuda" else None,
            samples_output=False,
        )
        self._handles = [
            target.register_forward_pre_hook(
                _BeforeModule(self, spec.name, spec.in_features), with_kwargs=True
            )
            for spec in config.modules
            for target in [module.get_submodule(spec.name)]
        ]

    @contextmanager
    def rows(self, names: Sequence[str | None], *, partial: bool = False) -> Iterator[None]:
        """Within the block each row of a batch is answered with its adapter.

        Every module with adapters must get inputs whose first dimension is that of the batch:
        `[N, L, features]`, `[N, features]`, or token ids `[N, L]`, whatever L. Weights are read and
        copied on entry if they are not resident, for as long as the cache's limits allow. Gradients
        must be off. Nothing is left behind by a block that ends with an error.

        Args:
            names: One registered adapter per row, None for the base model.
            partial: Whether modules that these adapters change may go uncalled within the block.

        Raises:
            AdapterNotFoundError: A name is not registered.
            LoraCacheFullError: The adapters do not fit beside those that others use now.
            InvalidArgumentError: A name is no string, a block is open, or this is detached. Within
                the block, by the module's call: the batch has another number of rows, gradients are
                on, or another thread calls.
            UnsupportedModelError: A module gets an input of another first dimension than those
                before it; or, at the end, one that an adapter changes was not called, so that the
                answer lacks it.
            PagedLoraError: An adapter cannot be read; all rows of the block go unanswered.
        """
        names = _check_names(names)
        with ExitStack() as undo:
            block = self._open_block(names)
            undo.callback(self._close_block)
            requests: dict[str, LlmRequest] = {}
            for name in dict.fromkeys(name for name in names if name is not None):
                request = requests[name] = LlmRequest(next(_request_ids), keeps_adapter=True)
                undo.callback(self._adapters.release, request)
                self._adapters.acquire(name, request)
                self._cache.add_request_peft(request)
            if requests:
                lease = self._cache.ensure_batch(list(requests.values()), [])
                undo.callback(self._close_lease, lease, block)
                for error in lease.errors.values():
                    raise error
                block.begin(
                    lease,
                    [None if name is None else requests[name].request_id for name in names],
                )
            yield
            if not partial:
                for name, request in requests.items():
                    _check_called(name, self._changed_modules(lease, request) - block.called)

    def detach(self) -> None:
        """Gives the module back as it was; idempotent.

        Raises:
            InvalidArgumentError: A block of `rows` is open; nothing was changed.
        """
        with self._lock:
            if self._block is not None:
                raise InvalidArgumentError("a block of rows() is open: leave it before detach()")
            if self._hooks is not None:
                self._hooks.remove()
                self._hooks = None
            while self._handles:
                self._handles.pop().remove()

    def __enter__(self) -> Attachment:
        """The object itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detaches."""
        self.detach()

    def _tell_hooks(self, name: str, rows: torch.Tensor, num_features: int) -> None:
        """Tells the hooks which rows of a module's input use which adapter."""
        block = self._block
        if block is None or self._hooks is None or block.lease is None:
            return
        tokens = block.check(name, rows, num_features, self._device)
        shape = (tokens, current_stream(self._device))
        if shape != block.shape:
            block.shape = None  # until all is told
            row_map, segments = self._hooks.row_map, [(user, tokens) for user in block.users]
            row_map.set(block.lease, segments, block.batches.get(tokens))
            block.batches[tokens] = row_map.batch
            block.shape = shape
            block.streams.add(shape[1])

    def _changed_modules(self, lease: _core.BatchLease, request: LlmRequest) -> frozenset[str]:
        """The modules that a request's adapter changes; a task stands for one content."""
        task_id = lease.task_of(request.request_id)
        known = self._modules_of_task.get(task_id)
        if known is None:
            if len(self._modules_of_task) == _KNOWN_TASKS:
                self._modules_of_task.clear()
            known = frozenset(entry.module_name for entry in lease[request.request_id])
            self._modules_of_task[task_id] = known
        return known

    def _open_block(self, names: Sequence[str | None]) -> _Block:
        self._process.check("this attachment")
        with self._lock:
            if self._hooks is None:
                raise InvalidArgumentError("the module was detached: attach it again")
            if self._block is not None:
                raise InvalidArgumentError(
                    "a block of rows() is open already: blocks of one attachment neither nest nor "
                    "overlap; use one block with all rows, or one attachment per thread's own copy "
                    "of the module"
                )
            self._block = _Block(len(names))
            return self._block

    def _close_block(self) -> None:
        with self._lock:
            self._block = None
            if self._hooks is not None:
                self._hooks.row_map.clear()

    def _close_lease(self, lease: _core.BatchLease, block: _Block) -> None:
        """Behind what was launched in the block: on its stream, or if there were several, any."""
        streams = block.streams or {current_stream(self._device)}
        lease.close(streams.pop() if len(streams) == 1 else None)


class _Block:
    """One block of `rows`: who uses which row.

    Attributes:
        called: Names of the modules that were called in it.
        lease: Holds the adapters; None if no row uses one.
        users: Request of each row of the batch, None for the base model.
        shape: What the hooks were told last: tokens per row of the batch, and the stream.
        batches: By tokens per row, what the hooks were told before.
        streams: On which there were calls; None is the CPU's.
    """

    def __init__(self, num_rows: int) -> None:
        """Without adapters, until `begin`."""
        self.called: set[str] = set()
        self.lease: _core.BatchLease | None = None
        self.users: list[int | None] = []
        self.shape: tuple[int, int | None] | None = None
        self.batches: dict[int, _core.LoraBatch | None] = {}
        self.streams: set[int | None] = set()
        self._num_rows = num_rows
        self._thread = threading.get_ident()

    def begin(self, lease: _core.BatchLease, users: list[int | None]) -> None:
        """Rows have users from now on; `lease` holds them."""
        self.lease = lease
        self.users = users

    def check(self, name: str, rows: torch.Tensor, num_features: int, device: torch.device) -> int:
        """Notes a call of a module; how many tokens its input has per row of the batch."""
        self._check_call(name, rows, device)
        self.called.add(name)
        return rows.numel() // (self._num_rows * num_features)

    def _check_call(self, name: str, rows: torch.Tensor, device: torch.device) -> None:
        if threading.get_ident() != self._thread:
            raise InvalidArgumentError(
                f"module {quoted(name)} was called by another thread than the one whose block of "
                "rows() is open: its rows are not those of the block"
            )
        if torch.is_grad_enabled():
            raise InvalidArgumentError(
                "gradients are on, and adapters' outputs have none: call the module under "
                "torch.inference_mode() or torch.no_grad()"
            )
        if rows.device != device:
            raise UnsupportedModelError(
                f"module {quoted(name)} was called on {rows.device}: it was attached on {device}, "
                "where the adapters are"
            )
        if rows.dim() == 0 or rows.shape[0] != self._num_rows:
            raise self._rows_error(name, tuple(rows.shape))

    def _rows_error(self, name: str, shape: tuple[int, ...]) -> PagedLoraError:
        """Whose fault an input of another first dimension is: other modules tell."""
        problem = (
            f"module {quoted(name)} was called with an input of shape {shape} where rows() names "
            f"{counted(self._num_rows, 'row')}"
        )
        if self.called and name not in self.called:
            return UnsupportedModelError(
                f"{problem}, as many as modules before it had: the first dimension of one of them "
                "is not the batch, so it cannot be told which adapter each row uses. Leave that "
                "one out of the target modules"
            )
        return InvalidArgumentError(
            f"{problem}: name one adapter per row of the batch. If there is one, the module's "
            "first dimension is not the batch: leave the module out of the target modules"
        )


class _BeforeModule:
    """The forward pre-hook of one module."""

    def __init__(self, attachment: Attachment, name: str, in_features: int) -> None:
        self._attachment = attachment
        self._name = name
        self._in_features = in_features

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = args[0] if args else kwargs.get("input")
        if isinstance(rows, torch.Tensor):  # what else is called, the module's own hook refuses
            num_features = 1 if isinstance(module, nn.Embedding) else self._in_features
            self._attachment._tell_hooks(self._name, rows, num_features)


def _check_names(names: object) -> list[str | None]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidArgumentError(f"names is {shown(names)}: it must be a list, one per row")
    for name in names:
        if name is not None and not isinstance(name, str):
            raise InvalidArgumentError(f"names has {shown(name)}: give adapters' names, or None")
    return list(names)


def _check_called(name: str, missing: frozenset[str]) -> None:
    if missing:
        first = ", ".join(sorted(missing)[:_SHOWN_MODULES])
        raise UnsupportedModelError(
            f"adapter {quoted(name)} changes {counted(len(missing), 'module')} not called in this "
            f"block ({first}{', ...' if len(missing) > _SHOWN_MODULES else ''}): the answer lacks "
            "them. Call the whole module in the block, or allow it with rows(..., partial=True); "
            "a module whose weights are used without calling it cannot carry adapters"
        )


def _device_of(cache: PeftCacheManager) -> torch.device:
    """Where the device tier lies; what is made for tests lies where the CPU can read."""
    return torch.device(cache.device if cache.device.startswith("cuda") else "cpu")


def _gpu_sizes(cache: PeftCacheManager) -> GpuLoraSizes:
    return GpuLoraSizes(cache.core.layout_params, _FIRST_ROWS, _FIRST_TASKS)


def _check_free(module: nn.Module, config: _core.LoraModelConfig, device: torch.device) -> None:
    """Raises unless all modules of `config` that there are may get hooks, and are on the device."""
    for spec in config.modules:
        try:
            target = module.get_submodule(spec.name)
        except AttributeError:
            continue  # the hooks refuse it
        hooks = [*target._forward_hooks.values()]
        if any(type(hook).__module__ == lora_hooks.__name__ for hook in hooks):
            raise InvalidArgumentError(
                f"module {quoted(spec.name)} has adapters already: detach() it, or close its "
                "LLM, first"
            )
        for parameter in target.parameters(recurse=False):
            if parameter.device.type not in ("cpu", "cuda"):
                raise UnsupportedModelError(
                    f"module {quoted(spec.name)} is on {parameter.device}: adapters are computed "
                    "on the CPU or on a GPU of CUDA; move it with module.to('cpu')"
                )
            if parameter.device != device:
                raise InvalidArgumentError(
                    f"module {quoted(spec.name)} is on {parameter.device}, and the cache's device "
                    f"tier on {device}: make the cache with PeftCacheManager(..., "
                    f"device='{parameter.device}'), or move the module with module.to('{device}')"
                )
