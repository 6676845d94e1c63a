"""Where a registry takes adapters from: what callers give, and what lies in `lora_dir`."""

from __future__ import annotations

import os

from pagedlora import _core
from pagedlora.errors import AdapterNotFoundError, InvalidArgumentError
from pagedlora.loaders.given_tensors import GivenTensors, PeftTensors
from pagedlora.loaders.open_adapter import AdapterSource
from pagedlora.paths import SourceForm, SourcePath, is_possible_path, to_path, without_links
from pagedlora.registry.lora_dir import AdapterFiles, LoraDirectory
from pagedlora.shown import quoted


class Sources:
    """The directories of a `LoraManager`. Thread-safe; callers hold no lock."""

    def __init__(
        self,
        adapter_root: str | os.PathLike[str] | None,
        lora_dir: str | os.PathLike[str] | None,
    ) -> None:
        """As `LoraManager.__init__`."""
        root = None if adapter_root is None else _directory(adapter_root, "adapter_root")
        self._root = None if root is None else _core.AdapterRoot(root)
        directory = None if lora_dir is None else _directory(lora_dir, "lora_dir")
        self._lora_dir = None if directory is None else LoraDirectory(directory)

    def place(self, source: object, whose: str, form: SourceForm = "auto") -> AdapterSource:
        """The source that a caller gave, confined to `adapter_root` if it is a path.

        Args:
            source: What the caller gave.
            whose: Names the adapter in errors.
            form: What the caller says that it is.

        Raises:
            InvalidArgumentError: It is neither a path nor tensors.
            AdapterPathError: No file of `adapter_root` can have that path.
            AdapterFormatError: Of tensors, some cannot be those of an adapter.
            AdapterReadError: They cannot be kept.
        """
        if isinstance(source, PeftTensors):
            return GivenTensors(source, whose)
        return SourcePath.of(source, f"the source of {whose}", self._root, form)

    def resolve(self, source: object) -> str:
        """As `LoraManager.resolve_source`."""
        place = SourcePath.of(source, "the source", self._root)
        if not is_possible_path(place.path):
            raise InvalidArgumentError(f"{quoted(place.path)} is no possible path")
        return place.real_path()

    @property
    def listed(self) -> frozenset[str]:
        """The names of `lora_dir`, as `LoraDirectory.names`."""
        return frozenset() if self._lora_dir is None else self._lora_dir.names

    def find_listed(self, name: str) -> SourcePath | None:
        """Where the adapter of a name that is not registered lies in `lora_dir`, if there is one.

        Raises:
            AdapterNotFoundError: There is a `lora_dir`, without such an adapter.
            AdapterPathError: It is reached by a link that leads out of `lora_dir`.
            AdapterReadError: The system will not look.
        """
        if self._lora_dir is None:
            return None
        place = self._lora_dir.find(name)
        if place is None:
            raise AdapterNotFoundError(
                f"no adapter {quoted(name)} is registered, and lora_dir "
                f"{quoted(self._lora_dir.path)} has no directory of that name with an "
                "adapter_config.json",
                name=name,
            )
        return place

    def listed_files(self, name: str) -> AdapterFiles | None:
        """What lies under a name of `lora_dir` now; None without one, as `LoraDirectory.files`."""
        return None if self._lora_dir is None else self._lora_dir.files(name)

    def check_not_listed(self, name: str, place: AdapterSource) -> None:
        """Raises InvalidArgumentError if `lora_dir` lists the name for another directory."""
        if name not in self.listed:
            return
        listed = self.find_listed(name)
        if listed is not None and without_links(listed.path) != place.real_path():
            raise InvalidArgumentError(
                f"adapter {quoted(name)} is already in lora_dir, at {quoted(listed.path)}: use "
                "another name"
            )


def _directory(value: object, name: str) -> str:
    path = to_path(value, name)
    if not is_possible_path(path):
        raise InvalidArgumentError(f"{name} is {quoted(path)}, which is no possible path")
    return path
