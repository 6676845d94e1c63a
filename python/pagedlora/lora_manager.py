"""Adapters by name: parses their files and makes them known to the cache."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedlora import _core
from pagedlora.errors import AdapterNotFoundError, InvalidArgumentError
from pagedlora.loaders.hf import PeftDirectory, open_peft_directory
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.paths import to_path

if TYPE_CHECKING:
    from pagedlora.peft_cache import PeftCacheManager

MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What an adapter's files say, without a model.

    Attributes:
        path: Its directory.
        ranks: Module name to rank.
        scales: Module name to the factor of B A x.
        num_tensors: Tensors used; always all of the file's.
        dtypes: Types of the stored tensors.
        parameters: Numbers in the tensors.
        bytes_on_disk: Size of the weights file.
    """

    path: str
    ranks: dict[str, int]
    scales: dict[str, float]
    num_tensors: int
    dtypes: list[str]
    parameters: int
    bytes_on_disk: int


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A registered adapter as it is now.

    Attributes:
        name: How requests name it.
        path: Where it was registered from.
        task_id: Its task in the caches.
        ranks: Module name to rank.
        scales: Module name to the factor of B A x.
        num_pages: Pages it takes in either tier.
        bytes: Those pages in bytes.
        tiers: The tiers that hold it now: "host", "device".
        owners: Ids of the requests that use it, active and paused.
    """

    name: str
    path: str
    task_id: int
    ranks: dict[str, int]
    scales: dict[str, float]
    num_pages: int
    bytes: int
    tiers: tuple[str, ...]
    owners: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Registered:
    """What is kept of an adapter, small: there may be very many.

    Attributes:
        path: Where it was registered from.
        task_id: Its task in the caches.
        num_pages: Pages it takes in either tier.
        modules: Indices of its modules in the model configuration.
        ranks: Of those modules.
        scales: Of those modules.
    """

    path: str
    task_id: int
    num_pages: int
    modules: array[int]
    ranks: array[int]
    scales: array[float]


class _Residency:
    """What the cache says about all tasks at once, asked for one time."""

    def __init__(self, cache: PeftCacheManager) -> None:
        self._cache = cache
        self._owners: tuple[Mapping[int, set[int]], ...] = (cache.active_tasks, cache.paused_tasks)

    def owners(self, task_id: int) -> frozenset[int]:
        """Requests that use the task, active and paused."""
        return frozenset().union(*(owners.get(task_id, ()) for owners in self._owners))

    def tiers(self, task_id: int) -> tuple[str, ...]:
        """The tiers that hold the task."""
        host = ("host",) if self._cache.is_task_cached(task_id) else ()
        device = ("device",) if self._cache.is_task_cached_device(task_id) else ()
        return host + device


class LoraManager:
    """The registry of adapters of one model. Thread-safe.

    Registering parses the configuration and the header of the weights and reads no weights; they
    are read, and read again, whenever a request needs them.
    """

    def __init__(
        self, model_config: _core.LoraModelConfig, cache_manager: PeftCacheManager
    ) -> None:
        """Starts empty.

        Args:
            model_config: The one that the cache manager was made for.
            cache_manager: Gets a task per adapter.
        """
        self._table = ModuleTable(model_config)
        self._cache = cache_manager
        self._adapters: dict[str, _Registered] = {}
        self._lock = threading.Lock()

    def register(self, name: str, source: str | os.PathLike[str]) -> AdapterInfo:
        """Makes an adapter known under a name.

        Args:
            name: Not empty, at most 256 bytes of UTF-8; taken as it is.
            source: A PEFT directory.

        Returns:
            What is known about it.

        Raises:
            InvalidArgumentError: The name is impossible or taken, or the source is no path.
            AdapterNotFoundError: The directory or one of its files does not exist.
            AdapterReadError: The system will not read one of them.
            AdapterFormatError: A file is broken, or the adapter does not fit the model.
            UnsupportedAdapterError: It asks for something that is not supported.
        """
        _check_name(name)
        path = to_path(source, f"the source of adapter '{name}'")
        self._check_new(name)
        plan = open_peft_directory(path).plan(self._table)
        rows = plan.rows
        modules = array("I", [row.module for row in rows])
        ranks = array("I", [row.rank for row in rows])
        scales = array("f", [row.scale for row in rows])
        # Last what cannot fail, so that a call that raises leaves neither task nor name.
        num_pages = self._cache.core.num_pages_of_plan(plan)
        residency = _Residency(self._cache)
        with self._lock:
            self._check_new(name)
            task_id = self._cache.core.register_task(plan)
            adapter = _Registered(path, task_id, num_pages, modules, ranks, scales)
            self._adapters[name] = adapter
        return self._describe(name, adapter, residency)

    def get(self, name: str) -> AdapterInfo:
        """A registered adapter as it is now.

        Raises:
            AdapterNotFoundError: No adapter of that name is registered.
        """
        return self._describe(name, self._require(name), _Residency(self._cache))

    def task_id(self, name: str) -> int:
        """The task of a registered adapter.

        Raises:
            AdapterNotFoundError: No adapter of that name is registered.
        """
        return self._require(name).task_id

    def list(self) -> list[AdapterInfo]:
        """All registered adapters, in order of registration."""
        adapters = list(self._adapters.items())
        residency = _Residency(self._cache)
        return [self._describe(name, adapter, residency) for name, adapter in adapters]

    def __len__(self) -> int:
        """Number of registered adapters."""
        return len(self._adapters)

    def is_adapter_in_cpu_cache(self, task_id: int) -> bool:
        """Whether the task is resident in the host tier."""
        return self._cache.is_task_cached(task_id)

    def _require(self, name: str) -> _Registered:
        adapter = self._adapters.get(name)
        if adapter is None:
            raise AdapterNotFoundError(
                f"no adapter '{name}' is registered; {len(self._adapters)} others are. "
                "Register it, or use None for the base model",
                name=name,
            )
        return adapter

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise InvalidArgumentError(
                f"adapter '{name}' is already registered from '{self._adapters[name].path}': "
                "use another name"
            )

    def _describe(self, name: str, adapter: _Registered, residency: _Residency) -> AdapterInfo:
        modules = [self._table.names[index] for index in adapter.modules]
        return AdapterInfo(
            name=name,
            path=adapter.path,
            task_id=adapter.task_id,
            ranks=dict(zip(modules, adapter.ranks, strict=True)),
            scales=dict(zip(modules, adapter.scales, strict=True)),
            num_pages=adapter.num_pages,
            bytes=adapter.num_pages * self._cache.page_bytes,
            tiers=residency.tiers(adapter.task_id),
            owners=residency.owners(adapter.task_id),
        )


def probe_adapter(path: str | os.PathLike[str]) -> AdapterReport:
    """What an adapter's files say; checks everything that needs no model.

    Raises:
        PagedLoraError: As `LoraManager.register`, but for what depends on a model.
    """
    return _report(open_peft_directory(path))


def _report(adapter: PeftDirectory) -> AdapterReport:
    modules = adapter.tensors.modules
    tensors = [tensor for pair in modules.values() for tensor in pair]
    return AdapterReport(
        path=adapter.path,
        ranks={name: pair.rank for name, pair in modules.items()},
        scales=dict.fromkeys(modules, adapter.config.scale),
        num_tensors=adapter.tensors.num_tensors,
        dtypes=sorted({tensor.dtype for tensor in tensors}),
        parameters=sum(tensor.shape[0] * tensor.shape[1] for tensor in tensors),
        bytes_on_disk=adapter.source.size_bytes,
    )


def _check_name(name: str) -> None:
    is_text = isinstance(name, str)
    if not is_text or not 1 <= len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
        raise InvalidArgumentError(
            f"an adapter's name must be a string of 1 to {MAX_NAME_BYTES} bytes, not {name!r:.80}"
        )
