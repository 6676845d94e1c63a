"""PEFT directories: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pagedlora import _core
from pagedlora.errors import AdapterNotFoundError, PagedLoraError, UnsupportedAdapterError
from pagedlora.loaders.binding import BoundAdapter, bind
from pagedlora.loaders.load_options import DEFAULT_OPTIONS, LoadOptions
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.peft_config import PeftLoraConfig, read_peft_config
from pagedlora.loaders.pickled import PICKLE_NAME, PrivateCopy, convert_pickle
from pagedlora.loaders.rows import AdapterTensors, pair_tensors, whole_tensors
from pagedlora.loaders.source_file import SourceFile
from pagedlora.loaders.stored import StoredTensor
from pagedlora.shown import counted, quoted

WEIGHTS_NAME = "adapter_model.safetensors"
_SHOWN_TENSORS = 5


@dataclass(frozen=True)
class PeftDirectory:
    """An adapter's files: the configuration was parsed, the weights were opened.

    Attributes:
        path: The directory.
        config: What decides its answers.
        options: What is allowed.
        source: The weights file as it was when it was opened.
        file: The same, to be read from Python.
        weights_path: What errors name: the weights file, or the pickle that it was made from.
        copy: Keeps the weights file there, where it was made from a pickle.
    """

    path: str
    config: PeftLoraConfig
    options: LoadOptions
    source: _core.TensorSource
    file: SourceFile
    weights_path: str
    copy: PrivateCopy | None = None

    @cached_property
    def tensors(self) -> AdapterTensors:
        """Its modules; parses the header of the weights when it is first asked for.

        Raises:
            AdapterReadError: The system will not read it.
            AdapterFormatError: It is not what it should be.
            UnsupportedAdapterError: The adapter asks for something that is not supported.
        """
        stored = _stored(self.source)
        return pair_tensors(stored, self.config, self.weights_path, strict=self.options.strict)

    def bind(self, table: ModuleTable) -> BoundAdapter:
        """Its modules as a model has them.

        Raises:
            AdapterFormatError: The adapter does not fit the model.
            UnsupportedAdapterError: Its rank is over the maximum.
            PagedLoraError: As `tensors`.
        """
        return bind(self.tensors, table, self.weights_path)


def make_plan(
    adapter: BoundAdapter,
    table: ModuleTable,
    source: _core.TensorSource,
    offsets: Mapping[str, int] | None = None,
    *,
    checks_values: bool = True,
) -> _core.AdapterPlan:
    """What to read from a source for an adapter.

    Args:
        adapter: As the model has it.
        table: The model's modules.
        source: Has its tensors.
        offsets: As in `BoundAdapter.rows`.
        checks_values: Whether the first read refuses NaN, infinity and values over the range of the
            cache's type.
    """
    return _core.AdapterPlan(table.config, adapter.rows(offsets), source, checks_values)


def open_peft_directory(
    directory: str | os.PathLike[str],
    options: LoadOptions = DEFAULT_OPTIONS,
    root: _core.AdapterRoot | None = None,
) -> PeftDirectory:
    """Parses the configuration and opens the weights; reads nothing of them yet.

    Args:
        directory: As written by PEFT's `save_pretrained`.
        options: What is allowed.
        root: Where its files must lie, now and whenever they are read again; None: anywhere.

    Returns:
        The adapter's files.

    Raises:
        AdapterNotFoundError: The directory or one of the files does not exist.
        AdapterPathError: One of the files does not lie in the root.
        AdapterReadError: The system will not read one of them.
        AdapterFormatError: One of them is not what it should be.
        UnsupportedAdapterError: The adapter asks for something that is not supported.
    """
    weights_path = path = str(Path(directory) / WEIGHTS_NAME)
    try:
        config = read_peft_config(directory, root, strict=options.strict)
    except UnsupportedAdapterError as error:
        raise with_whole_tensors(error, path, path, root) from None
    source, copy = _open_if_there(path, root), None
    if source is None:
        copy = _open_pickle(Path(directory), options, root)
        weights_path = str(Path(directory) / PICKLE_NAME)
        path, root = copy.path, None  # it is this process's own file
        source = _core.open_file_source(path)
    # Each is compared with what it was here whenever it is read: so both are the same file.
    file = SourceFile.of(path, root)
    return PeftDirectory(os.fspath(directory), config, options, source, file, weights_path, copy)


def _open_if_there(path: str, root: _core.AdapterRoot | None) -> _core.TensorSource | None:
    try:
        return _core.open_file_source(path, root)
    except AdapterNotFoundError:
        return None


def _stored(source: _core.TensorSource) -> list[StoredTensor]:
    return [
        StoredTensor(header.name, header.dtype, header.shape, header.offset)
        for header in _core.read_safetensors_header(source)
    ]


def with_whole_tensors(
    error: UnsupportedAdapterError, path: str, label: str, root: _core.AdapterRoot | None = None
) -> PagedLoraError:
    """The same with what the weights file has of whole modules, or what is wrong with the file.

    Args:
        error: Why a configuration is refused; others than for `modules_to_save` stay as they are.
        path: The weights file.
        label: Names it in the error.
        root: Where it must lie.
    """
    if error.field != "modules_to_save":
        return error
    try:
        headers = _core.read_safetensors_header(_core.open_file_source(path, root))
    except AdapterNotFoundError:
        return error
    except PagedLoraError as broken:
        return broken
    sizes = {header.name: header.num_bytes for header in headers}
    whole = whole_tensors(
        StoredTensor(header.name, header.dtype, header.shape, header.offset) for header in headers
    )
    if not whole:
        return UnsupportedAdapterError(
            f"{error.message}. {quoted(label)} has no such tensors: if these modules were not "
            "trained, remove modules_to_save from the configuration",
            field=error.field,
        )
    shown = ", ".join(
        f"{quoted(tensor.name)} {tensor.shape} of {sizes[tensor.name]} bytes"
        for tensor in whole[:_SHOWN_TENSORS]
    )
    more = f" and {len(whole) - _SHOWN_TENSORS} more" if len(whole) > _SHOWN_TENSORS else ""
    total = sum(sizes[tensor.name] for tensor in whole)
    return UnsupportedAdapterError(
        f"{error.message}. {quoted(label)} has {counted(len(whole), 'such tensor')} of {total} "
        f"bytes: {shown}{more}",
        field=error.field,
    )


def _open_pickle(
    directory: Path, options: LoadOptions, root: _core.AdapterRoot | None
) -> PrivateCopy:
    path = str(directory / PICKLE_NAME)
    try:
        descriptor = _core.open_file(path, root)
    except AdapterNotFoundError:
        raise AdapterNotFoundError(
            f"there is no {WEIGHTS_NAME} in {quoted(str(directory))}: give a directory that has "
            "it beside the configuration, as PEFT's save_pretrained writes them",
            name=str(directory / WEIGHTS_NAME),
        ) from None
    with open(descriptor, "rb") as file:
        if not options.allow_pickle:
            raise UnsupportedAdapterError(
                f"{quoted(str(directory))} has its weights in {PICKLE_NAME}, a pickle: save them "
                "with safetensors (PEFT: save_pretrained(..., safe_serialization=True)), or, if "
                "you trust the file, allow_pickle=True",
                field=PICKLE_NAME,
            )
        return convert_pickle(file, path, WEIGHTS_NAME)
