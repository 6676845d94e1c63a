"""PEFT directories: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pagedlora import _core
from pagedlora.errors import AdapterNotFoundError, PagedLoraError, UnsupportedAdapterError
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.peft_config import PeftLoraConfig, read_peft_config
from pagedlora.loaders.rows import AdapterTensors, StoredTensor, make_rows, pair_tensors
from pagedlora.loaders.source_file import SourceFile

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class PeftDirectory:
    """An adapter whose files were parsed and checked, but not read.

    Attributes:
        path: The directory.
        config: What decides its answers.
        tensors: Its pairs of matrices.
        source: The weights file as it was when parsed.
        file: The same, to be read from Python.
    """

    path: str
    config: PeftLoraConfig
    tensors: AdapterTensors
    source: _core.TensorSource
    file: SourceFile

    def plan(
        self, table: ModuleTable, source: _core.TensorSource | None = None
    ) -> _core.AdapterPlan:
        """What to read for a model.

        Args:
            table: The model's modules.
            source: Read instead of the weights file; None: the file.

        Raises:
            AdapterFormatError: The adapter does not fit the model.
            UnsupportedAdapterError: Its rank is over the maximum.
        """
        rows = make_rows(
            self.tensors, table, self.config.scale, os.path.join(self.path, WEIGHTS_NAME)
        )
        return _core.AdapterPlan(table.config, rows, source or self.source)


def open_peft_directory(
    directory: str | os.PathLike[str], root: _core.AdapterRoot | None = None
) -> PeftDirectory:
    """Parses the configuration and the header of the weights; reads no weights.

    Args:
        directory: As written by PEFT's `save_pretrained`.
        root: Where its files must lie, now and whenever they are read again; None: anywhere.

    Returns:
        The parsed adapter.

    Raises:
        AdapterNotFoundError: The directory or one of the files does not exist.
        AdapterPathError: One of the files does not lie in the root.
        AdapterReadError: The system will not read one of them.
        AdapterFormatError: One of them is not what it should be.
        UnsupportedAdapterError: The adapter is not plain LoRA or rank-stabilised LoRA.
    """
    config = read_peft_config(directory, root)
    path = Path(directory) / WEIGHTS_NAME
    try:
        source = _core.open_file_source(str(path), root)
    except AdapterNotFoundError:
        raise _missing_weights(Path(directory), root) from None
    # Between two looks of the core, which compares what it sees: so it is the core's file.
    file = SourceFile.of(str(path), root)
    stored = [
        StoredTensor(header.name, header.dtype, header.shape, header.offset)
        for header in _core.read_safetensors_header(source)
    ]
    tensors = pair_tensors(stored, config, str(path))
    return PeftDirectory(os.fspath(directory), config, tensors, source, file)


def _missing_weights(directory: Path, root: _core.AdapterRoot | None) -> PagedLoraError:
    if _exists(directory / _PICKLE_NAME, root):
        return UnsupportedAdapterError(
            f"'{directory}' has its weights in {_PICKLE_NAME}, a pickle that could run code: "
            "save them with safetensors (PEFT: save_pretrained(..., safe_serialization=True))",
            field=_PICKLE_NAME,
        )
    return AdapterNotFoundError(
        f"there is no {WEIGHTS_NAME} in '{directory}'", name=str(directory / WEIGHTS_NAME)
    )


def _exists(path: Path, root: _core.AdapterRoot | None) -> bool:
    try:
        SourceFile.of(str(path), root)
    except PagedLoraError:
        return False
    return True
