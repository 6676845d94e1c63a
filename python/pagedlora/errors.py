"""Every failure a caller can meet.

All derive from `PagedLoraError` and from the built-in that a caller would expect, carry their
numbers as attributes and a stable `code`, and print plainly. Those that the C++ core raises are
its classes of the same name, translated field by field.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, ClassVar

from pagedlora.shown import printable

_MAX_MESSAGE_CHARS = 2000


class PagedLoraError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: Stable identifier, the same in every release.
        message: What is wrong, with which numbers, and what to change. One printable line, whatever
            the names and paths in it: fields have these as they are.
    """

    code: ClassVar[str] = "pagedlora_error"

    def __init__(self, message: str, **fields: Any) -> None:
        self.message = printable(message, _MAX_MESSAGE_CHARS)
        super().__init__(self.message)
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        """The message alone: KeyError would print its repr."""
        return self.message


class PagedLoraWarning(UserWarning):
    """Something of an adapter was ignored because the caller allowed it, `strict=False`."""


def warn_caller(message: str) -> None:
    """Warns with `PagedLoraWarning`, where this package was called."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("pagedlora."):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(printable(message, _MAX_MESSAGE_CHARS), PagedLoraWarning, stacklevel=depth)


class InvalidArgumentError(PagedLoraError, ValueError):
    """An argument that no state of the system would make valid."""

    code = "invalid_argument"


class ModelLoadError(InvalidArgumentError, OSError):
    """A model or a tokenizer is not where it is looked for, or its files cannot be read.

    Attributes:
        source: The path or hub id.
    """

    code = "model_load_failed"
    source: str


class LoraCacheFullError(PagedLoraError, MemoryError):
    """The tier cannot hold the adapter now; nothing was changed, and waiting may help.

    Attributes:
        tier: "host" or "device".
        needed_pages: Pages that the claim needs.
        free_pages: Pages that nobody owns.
        evictable_pages: Pages that eviction could free.
    """

    code = "lora_cache_full"
    tier: str
    needed_pages: int
    free_pages: int
    evictable_pages: int


class AdapterTooLargeError(PagedLoraError, ValueError):
    """The adapter can never fit the tier, whatever is evicted.

    Attributes:
        tier: "host" or "device".
        needed_pages: Pages that the adapter needs.
        total_pages: Pages that the tier has.
        page_bytes: Size of a page.
    """

    code = "adapter_too_large"
    tier: str
    needed_pages: int
    total_pages: int
    page_bytes: int


class PeftTaskNotCachedError(PagedLoraError, KeyError):
    """A request names a task without a source and carries no weights for it.

    Attributes:
        task_id: The task.
    """

    code = "peft_task_not_cached"
    task_id: int


class AdapterNotFoundError(PagedLoraError, KeyError):
    """No adapter of that name is registered, or its files do not exist.

    Attributes:
        name: The name or path that was looked for.
    """

    code = "adapter_not_found"
    name: str


class AdapterFormatError(PagedLoraError, ValueError):
    """A file of the adapter is not what its format says, or does not fit the model.

    Attributes:
        path: The file.
        tensor: The tensor at fault; "" when it is the file as a whole.
    """

    code = "adapter_format"
    path: str
    tensor: str


class UnsupportedAdapterError(PagedLoraError, ValueError):
    """The adapter asks for something that would change its answers and is not supported.

    Attributes:
        field: The field of its configuration.
    """

    code = "unsupported_adapter"
    field: str


class UnsupportedModelError(PagedLoraError, ValueError):
    """The model cannot be run with certainty of right answers."""

    code = "unsupported_model"


class AdapterSourceChangedError(PagedLoraError, RuntimeError):
    """A file was replaced, truncated or written to after it was registered.

    Attributes:
        path: The file.
    """

    code = "adapter_source_changed"
    path: str


class AdapterReadError(PagedLoraError, OSError):
    """The operating system would not read a file of the adapter.

    Attributes:
        path: The file.
        errno: The system's error number.
    """

    code = "adapter_read_failed"
    path: str


class AdapterPathError(PagedLoraError, PermissionError):
    """A path, or a symbolic link on its way, leads out of the directory that adapters must lie in.

    Attributes:
        path: The file or directory.
        root: `adapter_root`, or `lora_dir`.
    """

    code = "adapter_path"
    path: str
    root: str


class AdapterLoadTimeout(PagedLoraError, TimeoutError):  # noqa: N818 - the public name
    """A source or a device did not answer in time; asking again starts the load anew.

    Attributes:
        limit_seconds: The limit, `PeftCacheConfig.load_timeout_s`.
        stuck_readers: How many earlier loads block every worker; 0 if this load was begun.
    """

    code = "adapter_load_timeout"
    limit_seconds: float
    stuck_readers: int


class AdapterInUseError(PagedLoraError, RuntimeError):
    """An adapter cannot be unloaded or replaced while somebody uses it.

    Attributes:
        task_id: Its task in the caches.
        num_owners: Requests that use it.
        owners: Their ids, where the error comes from an adapter's name.
    """

    code = "adapter_in_use"
    task_id: int
    num_owners: int
    owners: frozenset[int] = frozenset()


class GenerationConflictError(PagedLoraError, ValueError):
    """An adapter is not of the generation that the caller takes it for; nothing was changed.

    Attributes:
        name: The adapter.
        expected: The digest that the caller gave.
        actual: That of what the name stands for.
    """

    code = "generation_conflict"
    name: str
    expected: str
    actual: str | None


class RequestNotLeasedError(PagedLoraError, KeyError):
    """A lease is asked for a request that it has no adapter of.

    Attributes:
        request_id: The request.
    """

    code = "request_not_leased"
    request_id: int


class RequestConflictError(PagedLoraError, ValueError):
    """A live request was added again for another task or with other weights."""

    code = "request_conflict"


class LeaseClosedError(PagedLoraError, RuntimeError):
    """A batch lease, or what hangs on it, was used after `close()`."""

    code = "lease_closed"


class OutOfMemoryError(PagedLoraError, MemoryError):
    """A pool could not be allocated.

    Attributes:
        tier: "host" or "device".
        bytes: What was asked for.
    """

    code = "out_of_memory"
    tier: str
    bytes: int


class GpuUnavailableError(PagedLoraError, RuntimeError):
    """There is no GPU that this process can use, or it has failed and cannot be used any more.

    Attributes:
        reason: What is missing or what failed.
    """

    code = "gpu_unavailable"
    reason: str


class GpuCallError(PagedLoraError, RuntimeError):
    """A call to the GPU's runtime failed, and the GPU can still be used.

    Attributes:
        call: The function that failed.
        error_name: What it returned, such as "cudaErrorInvalidValue".
    """

    code = "gpu_call_failed"
    call: str
    error_name: str


class CapacityError(PagedLoraError, ValueError):
    """The request can never run with the configured sizes."""

    code = "capacity"


class RequestTimeoutError(PagedLoraError, TimeoutError):
    """A request has not ended in the time that the caller would wait; it goes on.

    Attributes:
        request_id: The request.
        limit_seconds: How long the caller waited.
    """

    code = "request_timeout"
    request_id: int
    limit_seconds: float


class NonFiniteLogitsError(PagedLoraError, ArithmeticError):
    """A request's logits are NaN or infinite, so no token can be chosen."""

    code = "non_finite_logits"
