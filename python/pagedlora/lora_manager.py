"""Adapters by name: parses their files and makes them known to the cache.

A name stands for one *generation*: one content, with one task in the cache. Names of equal content
share a generation as soon as both contents are known, that is, were read once: `load`, `pin`,
`reload` and `cache_salt` read it, `register` does not. Owners, pins and `unload` are per name.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pagedlora import _core
from pagedlora.adapter_info import AdapterInfo, AdapterReport, probe_adapter
from pagedlora.arguments import id_of
from pagedlora.base_weights import BaseWeights
from pagedlora.errors import InvalidArgumentError
from pagedlora.loaders.fused_modules import FusedModules
from pagedlora.loaders.given_tensors import PeftTensors
from pagedlora.loaders.load_options import LoadOptions
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.shape_cache import ShapeCache
from pagedlora.paths import SourceForm
from pagedlora.registry.arguments import check_fitting, check_options
from pagedlora.registry.base_model import BaseModel
from pagedlora.registry.deadline import Deadline
from pagedlora.registry.describe import Describer
from pagedlora.registry.generations import MAX_RETIRED, GenerationTable
from pagedlora.registry.host_pins import HostPins
from pagedlora.registry.listed import ListedNames
from pagedlora.registry.loads import Loader
from pagedlora.registry.lora_dir import MAX_NAME_BYTES
from pagedlora.registry.names import NameEntry, NameTable, Owners, check_name, in_use_error
from pagedlora.registry.parts import RegistryParts
from pagedlora.registry.probing import probe
from pagedlora.registry.process_lock import ProcessLock
from pagedlora.registry.reload import Reloader
from pagedlora.registry.salt import base_identity, cache_salt, check_tenant_salt
from pagedlora.registry.sources import Sources
from pagedlora.shown import quoted

if TYPE_CHECKING:
    import torch

    from pagedlora.peft_cache import PeftCacheManager

__all__ = [
    "MAX_NAME_BYTES",
    "MAX_RETIRED",
    "AdapterInfo",
    "AdapterReport",
    "LoraManager",
    "probe_adapter",
]

Source: TypeAlias = "str | os.PathLike[str] | PeftTensors"
"""Where callers say that an adapter is."""

_LOOK_EVERY_S = 0.005
"""Owners that end without `release` are noticed so late."""


class LoraManager:
    """The registry of adapters of one model. Thread-safe.

    Registering parses the configuration and the header of the weights and reads no weights; they
    are read, and read again, whenever a request needs them. No lock is held while a call hashes,
    reads or waits. A call that raises has changed nothing, unless it says so.

    With a `lora_dir` the adapters below it have names from the start, their relative paths. Such a
    name is registered by the first call that needs it, which meets what is wrong with its files;
    one that is unknown is looked for there again. If its files, or the whole directory, were
    replaced, `acquire`, `task_id`, `load`, `pin` and `cache_salt` let the name stand for those that
    are there now, or meet what is wrong with them; requests that have the adapter keep it.
    """

    def __init__(
        self,
        model_config: _core.LoraModelConfig,
        cache_manager: PeftCacheManager,
        *,
        adapter_root: str | os.PathLike[str] | None = None,
        lora_dir: str | os.PathLike[str] | None = None,
        base_model_id: str = "",
        base_weights: BaseWeights | None = None,
        fused_modules: FusedModules | None = None,
        strict: bool = True,
        allow_pickle: bool = False,
        check_values: bool = True,
    ) -> None:
        """Starts with the names of `lora_dir`; parses nothing.

        Args:
            model_config: The one that the cache manager was made for. That of one rank of
                several: adapters are whole nevertheless, and the rank's part of them is loaded.
            cache_manager: Gets a task per generation.
            adapter_root: A directory that sources must lie in: they are relative to it, or
                absolute and inside. None: sources may be anywhere.
            lora_dir: A directory of adapters, at any depth; those that are put there later are
                found too. None: only what is registered has a name.
            base_model_id: Tells the base model's weights from others of the same shape, in
                `cache_salt`; the same in every process that shares keys.
            base_weights: Gives the base model's weights by module name, `[out_features,
                in_features]`; `ModelWeights(model)` is one. DoRA adapters need them, as do
                adapters whose files repeat the weight of an embedding: both are read when they are
                registered. None: they are refused. On a rank of several the weights of the
                rank do, but for DoRA on modules that are split by inputs, which needs whole ones.
            fused_modules: Lets adapters for parts fit fused modules of the model, and adapters for
                fused modules fit parts: `{"qkv_proj": {"q_proj": 2048, "k_proj": 512, "v_proj":
                512}}`, the parts in their order with their outputs. None: names must be the
                model's.
            strict: Refuses adapters with fields that this release does not know, and with keys of
                `rank_pattern` or `alpha_pattern` that match no module. If false, they are ignored
                with a `PagedLoraWarning` and noted in the adapter's report.
            allow_pickle: Reads `adapter_model.bin` where there is no safetensors file, and .nemo
                files, with `weights_only=True`, when they are registered; they are kept as
                safetensors files in private directories until they are unloaded.
            check_values: Whether adapters with NaN, infinity or values over the range of the
                cache's type are refused when their content is first read.

        Raises:
            InvalidArgumentError: The cache was made for another model configuration, one of the
                directories is no path, or another argument is of another type.
            AdapterNotFoundError: One of them does not exist.
            AdapterReadError: The system will not open one of them.
        """
        check_fitting(model_config, cache_manager)
        check_options(
            base_weights, strict=strict, allow_pickle=allow_pickle, check_values=check_values
        )
        self._sources = Sources(adapter_root, lora_dir)
        table = ModuleTable(model_config, fused_modules, base_weights)
        self._base_identity = base_identity(table, base_model_id)
        self._cache = cache_manager
        self._lock = ProcessLock("this LoraManager")
        self._generations = GenerationTable(cache_manager)
        self._pins = HostPins(cache_manager, self._lock)
        self._names = NameTable(cache_manager, self._generations, self._pins)
        options = LoadOptions(strict, allow_pickle, check_values)
        self._parts = parts = RegistryParts(
            table,
            options,
            BaseModel(base_weights),
            ShapeCache(),
            self._lock,
            self._generations,
            self._names,
            self._pins,
        )
        self._reloader = Reloader(parts)
        self._loader = Loader(parts, self._reloader)
        self._listed = ListedNames(self._sources, parts, self._loader, self._reloader)
        self._describer = Describer(table, cache_manager, self._names)

    # ---- names ---------------------------------------------------------------------------------

    def register(self, name: str, source: Source) -> AdapterInfo:
        """Makes an adapter known under a name; reads no content, but for what DoRA needs.

        Args:
            name: Not empty, at most 256 bytes of UTF-8; taken as it is.
            source: A PEFT directory, a .nemo file, or `PeftTensors`. The latter two are copied to
                a private file.

        Returns:
            What is known about it; its `generation` is None.

        Raises:
            InvalidArgumentError: The name is impossible or taken, or the source is no such thing.
            AdapterPathError: The directory or one of its files does not lie in `adapter_root`.
            AdapterNotFoundError: The directory or one of its files does not exist.
            AdapterReadError: The system will not read one of them.
            AdapterFormatError: A file is broken, or the adapter does not fit the model.
            UnsupportedAdapterError: It asks for something that is not supported.
        """
        check_name(name)
        with self._lock:
            self._names.check_new(name)
        place = self._sources.place(source, _called(name))
        self._sources.check_not_listed(name, place)
        owners = Owners(self._cache)
        entry = self._loader.register(name, place)
        with self._lock:
            return self._describer.name(entry, owners)

    def load(
        self,
        name: str,
        source: Source | None = None,
        *,
        pinned: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterInfo:
        """Reads an adapter's content and brings it into the host tier; waits until it is there.

        A name that is not registered yet is registered. If another call loads the same name from
        the same source already, waits for that one and has its result.

        Args:
            name: As in `register`.
            source: As in `register`; None: the name is registered.
            pinned: Adds a pin, as `pin` does. Without, the adapter may be evicted again at once.
            timeout_s: Seconds, 0 or more; None: until the cache's own limits end the load. One
                read of a file that hangs is not interrupted.

        Returns:
            What is known about it, with its `generation`.

        Raises:
            InvalidArgumentError: The name is registered, or being loaded, from another source.
            AdapterNotFoundError: It is not registered and there is no source, or was unloaded
                meanwhile.
            AdapterLoadTimeout: Time is up.
            PagedLoraError: As `register`, `AdapterSourceChangedError`, or what the load failed by.
                A name that this call registered is not registered any more.
        """
        return self._load(name, source, "auto", pinned, timeout_s)

    def load_from_hf(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        pinned: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterInfo:
        """`load` from a PEFT directory, whatever its name; same arguments, result and errors."""
        return self._load(name, path, "hf", pinned, timeout_s)

    def load_from_nemo(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        pinned: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterInfo:
        """`load` from a NeMo archive, whatever its name; see `pagedlora.loaders.nemo`.

        Its weights are a pickle: the manager needs `allow_pickle`. Same arguments, result and
        errors as `load`.
        """
        return self._load(name, path, "nemo", pinned, timeout_s)

    def load_from_tensors(
        self,
        name: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        pinned: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterInfo:
        """`load` of an adapter that the caller has in memory.

        The tensors are copied to a private file before the call returns, and read from there as
        those of a directory are, with the same checks and the same digest; the file is removed
        when neither this name nor another one of its content, nor a request, needs it any more. To
        give a name other tensors: `reload(name, PeftTensors(...))`.

        Args:
            name: As in `register`.
            config: Fields as in PEFT's `adapter_config.json`, or PEFT's own `LoraConfig`.
            tensors: PEFT's name to the tensor; of any device.
            pinned: As in `load`.
            timeout_s: As in `load`.

        Returns:
            As `load`; its `path` is "(tensors)".

        Raises:
            InvalidArgumentError: The name stands for an adapter that was not given in these words,
                whether its content is the same or not.
            AdapterReadError: There is no room for the file in the temporary directory.
            PagedLoraError: As `load`.
        """
        return self.load(name, PeftTensors(config, tensors), pinned=pinned, timeout_s=timeout_s)

    def unload(self, name: str, *, timeout_s: float = 30.0) -> None:
        """Gives up a name, with its pins, after its requests have ended.

        From the start of the call new requests are refused; other names of the same content go on.
        A name of `lora_dir` comes back when it is asked for again: remove its directory first.

        Args:
            name: The adapter.
            timeout_s: Seconds to wait for its requests, 0 or more.

        Raises:
            AdapterNotFoundError: No such name is registered, or it is being unloaded already.
            AdapterInUseError: Some of its requests have not ended, `owners`; the name works again.
        """
        deadline = Deadline(timeout_s)
        with self._lock:
            entry = self._names.require(name, for_change=True)
            entry.is_unloading = True
            try:
                while users := self._names.users(entry, Owners(self._cache)):
                    if deadline.has_passed:
                        raise in_use_error(entry, users, timeout_s)
                    self._lock.wait(deadline.left_s(_LOOK_EVERY_S))
                self._names.remove(entry)
            finally:
                entry.is_unloading = False
            self._generations.collect()

    def reload(
        self,
        name: str,
        source: Source,
        *,
        expected_generation: str | None = None,
    ) -> AdapterInfo:
        """Lets a name stand for the content of a source, after parsing and reading it.

        Content that is the name's already changes only where it is read from. Other content is
        another generation: requests of the name that have started stay with the one that they
        have, which is *retired* until they end; the others move, with their `lora_task_id`. Those
        that are owners are added again; where the cache is full they are left out, and wait.
        Requests that move must not be put in a batch at the same time.

        Args:
            name: A registered adapter.
            source: As in `register`.
            expected_generation: The digest that the name must have; None: any.

        Returns:
            What the name stands for now.

        Raises:
            AdapterNotFoundError: No such name is registered, or the source does not exist.
            GenerationConflictError: The name's generation is not the expected one.
            AdapterInUseError: `MAX_RETIRED` generations are retired.
            LoraCacheFullError: The name is pinned, and the new generation finds no room beside.
            PagedLoraError: As `register`, or what the load of a pinned adapter failed by.
        """
        self._listed.register(name)
        with self._lock:
            entry = self._names.require(name, for_change=True)
        place = self._sources.place(source, _called(name))
        self._reloader.reload(entry, place, expected_generation, self._listed.files_of(name, place))
        return self.get(name)

    # ---- pins ----------------------------------------------------------------------------------

    def pin(self, name: str) -> None:
        """Keeps an adapter in the host tier, after reading it, until as many `unpin`.

        Raises:
            AdapterNotFoundError: No such name is registered.
            LoraCacheFullError: There is no room, or the pinned ones would leave none for the
                largest known adapter.
            PagedLoraError: It cannot be read; it is not pinned then.
        """
        self._loader.hold(self._require(name), Deadline(None), keep=True)

    def unpin(self, name: str) -> None:
        """Takes one `pin` of the name back.

        Raises:
            AdapterNotFoundError: No such name is registered.
            InvalidArgumentError: The name is not pinned.
        """
        with self._lock:
            entry = self._names.get(name, for_change=True)
            if entry.pins == 0:
                raise InvalidArgumentError(f"adapter {quoted(name)} is not pinned")
            entry.pins -= 1
            self._pins.give_back(entry.generation)

    # ---- requests ------------------------------------------------------------------------------

    def acquire(self, name: str, request: Any) -> int:
        """Remembers that a request uses the name, until `release`; idempotent.

        The name is not unloaded before the request ends: before it is released or, if it was
        seen to own its task in the cache, was marked done there. If it has a true
        `keeps_adapter`, only `release` ends it, and `reload` does not move it.

        Args:
            name: A registered adapter.
            request: Has a `request_id`, unique among live requests. Its `lora_task_id` is set.
                Kept until `release`.

        Returns:
            The task of the adapter.

        Raises:
            AdapterNotFoundError: No such name is registered, or it is being unloaded.
            RequestConflictError: A live request of that id uses an adapter already.
            InvalidArgumentError: The request's `lora_task_id` cannot be set.
        """
        self._require(name)
        with self._lock:
            entry = self._names.require(name)
            return self._names.acquire(entry, request, entry.generation.task_id)

    def release(self, request: Any) -> None:
        """Forgets what the request uses, at its end; nothing happens if it uses nothing.

        If it owns its task in the cache still, it is marked done.
        """
        id_of(request)
        with self._lock:
            self._names.release(request)
            self._lock.notify_all()

    # ---- queries -------------------------------------------------------------------------------

    def probe(self, source: Source) -> AdapterReport:
        """What `register` would find, without registering anything; warns of nothing.

        Args:
            source: As in `register`.

        Returns:
            What the adapter says, what becomes of its tensors in this model, and how many pages it
            would take: whether a tier has as many, now or at all, is not looked at.

        Raises:
            PagedLoraError: As `register`, for an adapter that cannot be used.
        """
        self._lock.check()
        place = self._sources.place(source, "the adapter that is probed")
        return probe(place, self._parts, self._cache)

    @property
    def cache_manager(self) -> PeftCacheManager:
        """Where the adapters' tasks are."""
        return self._cache

    def get(self, name: str) -> AdapterInfo:
        """A registered adapter as it is now.

        Raises:
            AdapterNotFoundError: No adapter of that name is registered.
            PagedLoraError: It is one of `lora_dir` that nobody used before, and cannot be used.
        """
        self._listed.register(name)
        owners = Owners(self._cache)
        with self._lock:
            return self._describer.name(self._names.get(name), owners)

    def task_id(self, name: str) -> int:
        """The task of a registered adapter.

        Raises:
            AdapterNotFoundError: No adapter of that name is registered, or it is being unloaded.
        """
        return self._require(name).generation.task_id

    def real_path(self, name: str) -> str:
        """Where a registered adapter was registered from, without links; of tensors no path.

        Raises:
            AdapterNotFoundError: No adapter of that name is registered.
            PagedLoraError: As `get`.
        """
        self._listed.register(name)
        with self._lock:
            return self._names.get(name).real_path

    def resolve_source(self, source: str | os.PathLike[str]) -> str:
        """The path of a source without links, as `register` would find it.

        Raises:
            InvalidArgumentError: It is no path.
            AdapterPathError: It leads out of `adapter_root`.
            AdapterNotFoundError: There is an `adapter_root`, and nothing of that name in it.
        """
        return self._sources.resolve(source)

    @property
    def names(self) -> tuple[str, ...]:
        """All names: those registered, in that order, then those of `lora_dir` not used yet."""
        with self._lock:
            registered = {entry.name: None for entry in self._names.entries}
        return (*registered, *sorted(self._sources.listed - registered.keys()))

    def list(self) -> builtins.list[AdapterInfo]:
        """All registered adapters, in order of registration.

        Those of `lora_dir` that nobody has used are not parsed and not among them; `names` has
        theirs.
        """
        owners = Owners(self._cache)
        with self._lock:
            self._generations.collect()
            entries = self._names.entries
        infos: builtins.list[AdapterInfo] = []
        for entry in entries:
            with self._lock:  # one by one: there may be very many
                infos.append(self._describer.name(entry, owners))
        return infos

    def retired(self) -> tuple[AdapterInfo, ...]:
        """Generations that no name stands for any more, and some request still uses."""
        owners = Owners(self._cache)
        with self._lock:
            self._generations.collect()
            generations = self._generations.retired
            return tuple(self._describer.generation(each, owners) for each in generations)

    def __len__(self) -> int:
        """Number of registered adapters."""
        return len(self._names)

    def is_adapter_in_cpu_cache(self, task_id: int) -> bool:
        """Whether the task is resident in the host tier."""
        return self._cache.is_task_cached(task_id)

    def cache_salt(self, name: str, tenant_salt: bytes = b"") -> bytes:
        """What tells keys and values of this adapter from those of others, the same everywhere.

        SHA-256 of the content's digest, the base model (its `base_model_id`, the modules' names
        and sizes and the cache's dtype) and the tenant, each with its length. Reads the content if
        it is not known yet.

        Args:
            name: A registered adapter.
            tenant_salt: Keeps tenants apart.

        Returns:
            32 bytes.

        Raises:
            AdapterNotFoundError: No such name is registered, or its file is gone.
            InvalidArgumentError: `tenant_salt` is not bytes.
            PagedLoraError: The content cannot be read.
        """
        check_tenant_salt(tenant_salt)
        digest = self._reloader.identify(self._require(name), Deadline(None))
        return cache_salt(digest, self._base_identity, tenant_salt)

    def _load(
        self,
        name: str,
        source: Source | None,
        form: SourceForm,
        pinned: bool,
        timeout_s: float | None,
    ) -> AdapterInfo:
        self._lock.check()
        check_name(name)
        deadline = Deadline(timeout_s)
        if source is None:
            self._require(name)
            self._loader.load(name, None, None, pinned, deadline)
        else:
            place = self._sources.place(source, _called(name), form)
            real_path = place.real_path()
            self._sources.check_not_listed(name, place)
            self._loader.load(name, place, real_path, pinned, deadline)
        return self.get(name)

    def _require(self, name: str) -> NameEntry:
        self._listed.follow(name)
        with self._lock:
            return self._names.require(name)


def _called(name: object) -> str:
    return f"adapter {quoted(name)}"
