"""What a caller allows adapters to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Applies to all adapters of a manager.

    Attributes:
        strict: Whether fields that nobody knows, and patterns that match nothing, are refused; if
            not, they are ignored, with a warning and a note in the adapter's report.
        allow_pickle: Whether `adapter_model.bin` is read, with `weights_only=True`.
        check_values: Whether NaN, infinity and values over the range of the cache's type are
            looked for when the content is first read.
    """

    strict: bool = True
    allow_pickle: bool = False
    check_values: bool = True


DEFAULT_OPTIONS = LoadOptions()
