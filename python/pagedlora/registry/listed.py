"""Names of `lora_dir`: registered by the first call that needs them, and kept up with their files.

A new request is answered with what lies in the directory when it is made. Requests before it keep
what they have. What is gone, or not there yet, changes nothing: an adapter that is resident does
without its files. See docs/adr/0020.
"""

from __future__ import annotations

from pagedlora.errors import PagedLoraError
from pagedlora.loaders.open_adapter import AdapterSource
from pagedlora.paths import without_links
from pagedlora.registry.loads import Loader
from pagedlora.registry.lora_dir import AdapterFiles
from pagedlora.registry.parts import RegistryParts
from pagedlora.registry.reload import Reloader
from pagedlora.registry.sources import Sources


class ListedNames:
    """What a `LoraManager` does for names of `lora_dir`. Thread-safe; callers hold no lock."""

    def __init__(
        self, sources: Sources, parts: RegistryParts, loader: Loader, reloader: Reloader
    ) -> None:
        self._sources = sources
        self._lock = parts.lock
        self._names = parts.names
        self._loader = loader
        self._reloader = reloader

    def register(self, name: str) -> None:
        """Registers a name that nobody asked for before; nothing for others, and for unlisted ones.

        Raises:
            PagedLoraError: As `LoraManager.get`.
        """
        with self._lock:
            if self._names.find(name) is not None:
                return
        place = self._sources.find_listed(name)
        if place is not None:
            files = self._sources.listed_files(name)  # before they are parsed: never newer
            self._loader.register_or_find(name, place, files)

    def follow(self, name: str) -> None:
        """`register`, and lets a known name stand for what lies there now, if that is other files.

        Raises:
            AdapterNotFoundError: The name is being unloaded.
            AdapterInUseError: `MAX_RETIRED` generations are retired.
            PagedLoraError: The new files cannot be used; or the name is pinned, and they cannot be
                brought in beside the old ones. It stands for what it did.
        """
        with self._lock:
            entry = self._names.find(name)
            known = None if entry is None else entry.files
        if entry is None:
            self.register(name)
            return
        if known is None:  # a call said where it is
            return
        files = self._sources.listed_files(name)
        if files is None or files == known:
            return
        place = self._sources.find_listed(name)
        if place is not None:
            self._reloader.follow(entry, place, files)

    def files_of(self, name: str, source: AdapterSource) -> AdapterFiles | None:
        """What a source is, if it is the name's own in `lora_dir`, so that it can be followed."""
        try:
            place = self._sources.find_listed(name)
            is_own = place is not None and without_links(place.path) == source.real_path()
        except PagedLoraError:
            return None
        return self._sources.listed_files(name) if is_own else None
