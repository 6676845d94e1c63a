"""Adapters that a caller has in memory: a PEFT configuration and tensors named as PEFT names them.

They are written to a private safetensors file when they are given, and from then on are what an
adapter in a directory is: read again after an eviction, and in no other memory than the tiers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedlora import _core
from pagedlora.errors import UnsupportedAdapterError
from pagedlora.loaders.hf import WEIGHTS_NAME, PeftDirectory, with_whole_tensors
from pagedlora.loaders.load_options import LoadOptions
from pagedlora.loaders.peft_config import fields_of, parse_peft_config
from pagedlora.loaders.peft_values import format_error
from pagedlora.loaders.pickled import PrivateCopy, keep_tensors
from pagedlora.loaders.source_file import SourceFile

if TYPE_CHECKING:
    import torch

GIVEN_PATH = "(tensors)"
"""What stands where other adapters have a path."""


class PeftTensors(NamedTuple):
    """An adapter in memory, as a source of `LoraManager.load`, `reload`, `register` and `probe`.

    Attributes:
        config: Fields as in PEFT's `adapter_config.json`, or PEFT's own `LoraConfig`.
        tensors: PEFT's name to the tensor, as in `adapter_model.safetensors`; copied when they are
            given to a `LoraManager`.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


class GivenTensors:
    """What a caller gave, in a file of this process's own. Immutable.

    Attributes:
        path: `GIVEN_PATH`.
        label: Names it in errors.
        fields: Of the configuration, as a file would have them.
        copy: Has the tensors.
    """

    __slots__ = ("_config_label", "_identity", "copy", "fields", "label", "path")

    def __init__(self, given: PeftTensors, adapter: str) -> None:
        """Copies the tensors.

        Args:
            given: What the caller gave.
            adapter: Whose it is, in errors.

        Raises:
            AdapterFormatError: The configuration cannot be JSON, or something is no dense tensor
                with a name.
            AdapterReadError: The system will not write the file.
        """
        self.path = GIVEN_PATH
        self.label = f"tensors of {adapter}"
        self._config_label = f"config of {adapter}"
        config = config_json(given.config, self._config_label)
        self.fields = fields_of(config, self._config_label)
        self.copy: PrivateCopy = keep_tensors(given.tensors, self.label, WEIGHTS_NAME)
        with open(self.copy.path, "rb") as file:
            digest = hashlib.sha256(config)
            while piece := file.read(1 << 20):
                digest.update(piece)
        self._identity = f"{GIVEN_PATH} {digest.hexdigest()}"

    def open(self, options: LoadOptions) -> PeftDirectory:
        """Checks the configuration.

        Raises:
            AdapterFormatError: A used field is missing or has an impossible value.
            UnsupportedAdapterError: A field asks for something that is not supported.
        """
        path = self.copy.path
        try:
            config = parse_peft_config(self.fields, self._config_label, strict=options.strict)
        except UnsupportedAdapterError as error:
            raise with_whole_tensors(error, path, self.label) from None
        source = _core.open_file_source(path)
        file = SourceFile.of(path)
        return PeftDirectory(self.path, config, options, source, file, self.label, self.copy)

    def real_path(self) -> str:
        """Equal for what says the same in the same words, where files have their path."""
        return self._identity


def config_json(config: object, path: str) -> bytes:
    """A configuration as its file would have it.

    Args:
        config: As in `PeftTensors`.
        path: Names it in errors.

    Raises:
        AdapterFormatError: It cannot be JSON.
    """
    to_dict = getattr(config, "to_dict", None)
    fields = to_dict() if callable(to_dict) else config
    if not isinstance(fields, Mapping):
        raise format_error(path, f"is a {type(config).__name__}: fields by name are needed")
    try:
        return json.dumps(dict(fields), default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise format_error(path, f"cannot be written as JSON: {error!s:.200}") from None


def _plain(value: object) -> object:
    """What PEFT writes for values that JSON does not have."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a {type(value).__name__} is no value of a configuration")
