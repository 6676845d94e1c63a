"""From what a caller says about an adapter to its task."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from pagedlora.errors import AdapterNotFoundError, InvalidArgumentError
from pagedlora.paths import to_path
from pagedlora.registry.names import check_name
from pagedlora.requests import LlmRequest, LoRARequest
from pagedlora.shown import quoted


class AdapterRegistry(Protocol):
    """What is used of a `LoraManager`."""

    def register(self, name: str, source: str, /) -> Any:
        """Gives the name a source; returns its `AdapterInfo`."""

    def get(self, name: str, /) -> Any:
        """`AdapterInfo` of a registered adapter; raises AdapterNotFoundError."""

    def real_path(self, name: str, /) -> str:
        """Its directory without links, at little cost; raises AdapterNotFoundError."""

    def resolve_source(self, source: str, /) -> str:
        """The path without links, as `register` finds it; raises PagedLoraError."""

    def task_id(self, name: str, /) -> int:
        """Its task alone, at little cost; raises AdapterNotFoundError."""

    def acquire(self, name: str, request: Any, /) -> int:
        """Gives the request the adapter's task, until it is released."""

    def release(self, request: Any, /) -> None:
        """Ends that; nothing happens if it is over."""


class AdapterNames:
    """Resolves names, `LoRARequest`s, numbers and paths, and keeps them consistent.

    Thread-safe.
    """

    def __init__(self, registry: AdapterRegistry) -> None:
        """Starts without numbers and requests.

        Args:
            registry: Knows which names are registered.
        """
        self._registry = registry
        self._name_by_int_id: dict[int, str] = {}
        self._acquired: dict[int, LlmRequest] = {}
        self._lock = threading.Lock()

    def load(self, name: str, path: str | os.PathLike[str]) -> Any:
        """Registers an adapter.

        Args:
            name: Must be new, or registered from the same path.
            path: A PEFT directory.

        Returns:
            The registry's `AdapterInfo`.

        Raises:
            InvalidArgumentError: The name is registered from another path, or one of the two
                is none.
            PagedLoraError: The adapter cannot be used; nothing was registered.
        """
        check_name(name)
        source = to_path(path, f"the path of adapter {quoted(name)}")
        with self._lock:
            if self._is_registered_from(name, source):
                return self._registry.get(name)
            return self._registry.register(name, source)

    def resolve(self, lora: LoRARequest | str | None) -> int | None:
        """The task that answers.

        Args:
            lora: A registered name, a `LoRARequest` (registered now if it has a path and is not
                yet), or None for the base model.

        Returns:
            The task id; None for the base model.

        Raises:
            AdapterNotFoundError: No such name is registered and there is no path.
            InvalidArgumentError: A number or a name is already used for another adapter.
            PagedLoraError: The adapter cannot be used; nothing was registered.
        """
        if lora is None:
            return None
        if isinstance(lora, str):
            return self._registry.task_id(lora)
        with self._lock:
            return self._resolve_request(lora)

    def acquire(self, lora: LoRARequest | str | None, request: LlmRequest) -> None:
        """Gives a request what `resolve` found, until it is released.

        From then on the adapter's name is not unloaded, and what the request answers with does not
        change.

        Args:
            lora: As in `resolve`.
            request: Its `lora_task_id` is set.

        Raises:
            AdapterNotFoundError: The name was unloaded meanwhile.
        """
        if lora is None:
            return
        name = lora if isinstance(lora, str) else lora.lora_name
        self._acquired[request.request_id] = request  # first: an interrupt cannot lose it
        self._registry.acquire(name, request)

    def release(self, request: LlmRequest) -> None:
        """Gives the adapter back at the end of a request; idempotent."""
        self._registry.release(request)
        self._acquired.pop(request.request_id, None)

    def release_all(self) -> None:
        """Gives back what all requests have."""
        for request in tuple(self._acquired.values()):
            self.release(request)

    def _resolve_request(self, lora: LoRARequest) -> int:
        self._check_int_id(lora)
        name = lora.lora_name
        if lora.lora_path is not None:
            path = to_path(lora.lora_path, f"the path of adapter {quoted(name)}")
            if not self._is_registered_from(name, path):
                self._registry.register(name, path)
        task_id = self._registry.task_id(name)
        if lora.lora_int_id is not None:
            self._name_by_int_id[lora.lora_int_id] = name
        return task_id

    def _is_registered_from(self, name: str, path: str) -> bool:
        """Whether the name is registered, from that path.

        Raises:
            InvalidArgumentError: It is registered from another path.
        """
        try:
            known = self._registry.real_path(name)
        except AdapterNotFoundError:
            return False
        wanted = self._registry.resolve_source(path)
        if known != wanted:
            raise InvalidArgumentError(
                f"adapter {quoted(name)} is registered from {quoted(known)}, not from "
                f"{quoted(wanted)}: give the other one another name"
            )
        return True

    def _is_registered(self, name: str) -> bool:
        try:
            self._registry.real_path(name)
        except AdapterNotFoundError:
            return False
        return True

    def _check_int_id(self, lora: LoRARequest) -> None:
        if lora.lora_int_id is None:
            return
        other = self._name_by_int_id.get(lora.lora_int_id, lora.lora_name)
        if other != lora.lora_name and self._is_registered(other):
            raise InvalidArgumentError(
                f"lora_int_id {lora.lora_int_id} of adapter {quoted(lora.lora_name)} is the number "
                f"of adapter {quoted(other)}: give each name its own number, or none"
            )
