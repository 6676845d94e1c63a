"""Opens an adapter, wherever it comes from: each way in gives the same `PeftDirectory`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeAlias

from pagedlora.errors import warn_caller
from pagedlora.loaders.given_tensors import GivenTensors
from pagedlora.loaders.hf import PeftDirectory, open_peft_directory
from pagedlora.loaders.load_options import DEFAULT_OPTIONS, LoadOptions
from pagedlora.loaders.nemo import NEMO_SUFFIX, open_nemo
from pagedlora.paths import SourcePath
from pagedlora.shown import quoted

AdapterSource: TypeAlias = SourcePath | GivenTensors


def open_adapter(source: AdapterSource, options: LoadOptions = DEFAULT_OPTIONS) -> PeftDirectory:
    """Parses the configuration and opens the weights.

    Args:
        source: Where the adapter is.
        options: What is allowed.

    Returns:
        The adapter, without a model.

    Raises:
        PagedLoraError: As `open_peft_directory`, or `open_nemo`.
    """
    if isinstance(source, GivenTensors):
        return source.open(options)
    if _is_nemo(source):
        return open_nemo(source.path, options, source.root)
    return open_peft_directory(source.path, options, source.root)


def warn_of(notes: Iterable[str], source: AdapterSource) -> None:
    """Warns the caller of what was ignored in an adapter, naming it."""
    whose = source.label if isinstance(source, GivenTensors) else f"adapter {quoted(source.path)}"
    for note in notes:
        warn_caller(f"{whose}: {note}")


def _is_nemo(source: SourcePath) -> bool:
    if source.form == "auto":
        return source.path.endswith(NEMO_SUFFIX) and not os.path.isdir(source.path)
    return source.form == "nemo"
