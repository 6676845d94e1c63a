"""Bringing names into the host tier, each by one call at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagedlora.errors import InvalidArgumentError
from pagedlora.loaders.open_adapter import AdapterSource
from pagedlora.registry.deadline import Deadline
from pagedlora.registry.flight import Flight
from pagedlora.registry.generations import Generation
from pagedlora.registry.lora_dir import AdapterFiles
from pagedlora.registry.names import NameEntry
from pagedlora.registry.parts import RegistryParts
from pagedlora.registry.reload import Reloader
from pagedlora.shown import quoted


class Loader:
    """What a `LoraManager` does to load. Thread-safe; callers hold no lock."""

    def __init__(self, parts: RegistryParts, reloader: Reloader) -> None:
        self._parse = parts.parse
        self._lock = parts.lock
        self._generations = parts.generations
        self._names = parts.names
        self._pins = parts.pins
        self._reloader = reloader
        self._flights: dict[str, tuple[str | None, Flight]] = {}

    def register(self, name: str, source: AdapterSource) -> NameEntry:
        """As `LoraManager.register`."""
        content, plan, sources = self._parse(source)
        with self._lock:
            self._names.check_new(name)
            return self._names.add(name, self._generations.add(content, plan, sources))

    def register_or_find(
        self, name: str, source: AdapterSource, files: AdapterFiles | None = None
    ) -> tuple[NameEntry, bool]:
        """The name's entry, and whether this call made it: another one may have meanwhile."""
        content, plan, sources = self._parse(source)
        with self._lock:
            entry = self._names.find(name)
            if entry is None:
                generation = self._generations.add(content, plan, sources)
                return self._names.add(name, generation, files), True
            if entry.real_path != content.real_path:
                raise _other_source(name, entry.real_path, content.real_path)
            return entry, False

    def load(
        self,
        name: str,
        source: AdapterSource | None,
        real_path: str | None,
        pinned: bool,
        deadline: Deadline,
    ) -> None:
        """As `LoraManager.load`."""
        flight, is_mine = self._join(name, real_path)
        if not is_mine:
            if not flight.wait(deadline):
                raise deadline.error(name)
            if flight.error is not None:
                raise flight.error
            if pinned:
                self.hold(self._require(name), deadline, keep=True)
            return
        error: BaseException | None = None
        try:
            self._load(name, source, pinned, deadline)
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self._lock:
                del self._flights[name]
            flight.finish(error)

    def hold(self, entry: NameEntry, deadline: Deadline, *, keep: bool) -> None:
        """Brings what the name stands for into the host tier, and pins it there if `keep`."""
        while True:
            self._reloader.identify(entry, deadline)
            with self._holding(entry) as generation:
                self._pins.bring_in(generation, deadline)
                with self._lock:
                    self._names.check_current(entry)
                    if entry.generation is generation:
                        entry.pins += keep
                        generation.holds += keep
                        return
            # A reload gave the name another generation meanwhile.

    def _join(self, name: str, real_path: str | None) -> tuple[Flight, bool]:
        """The flight that loads a name, and whether this call has to do it."""
        with self._lock:
            entry = self._names.find(name)
            known = None if entry is None else entry.real_path
            going = self._flights.get(name)
            if going is not None:
                known = going[0] or known
            if None not in (known, real_path) and known != real_path:
                raise _other_source(name, known, real_path)
            if going is not None:
                return going[1], False
            flight = Flight()
            self._flights[name] = (real_path or known, flight)
            return flight, True

    def _load(
        self, name: str, source: AdapterSource | None, pinned: bool, deadline: Deadline
    ) -> None:
        with self._lock:
            entry, is_new = self._names.find(name), False
        if entry is None and source is not None:
            entry, is_new = self.register_or_find(name, source)
        try:
            self.hold(entry or self._require(name), deadline, keep=pinned)
        except BaseException:
            if is_new and entry is not None:
                with self._lock:
                    self._names.remove(entry)
            raise

    def _require(self, name: str) -> NameEntry:
        with self._lock:
            return self._names.require(name)

    @contextmanager
    def _holding(self, entry: NameEntry) -> Iterator[Generation]:
        with self._lock:
            self._names.check_current(entry)
            generation = entry.generation
            generation.holds += 1
        try:
            yield generation
        finally:
            with self._lock:
                self._pins.give_back(generation)
                self._generations.discard(generation)


def _other_source(name: str, known: str | None, real_path: str | None) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"adapter {quoted(name)} is registered from {quoted(known)}, not from "
        f"{quoted(real_path)}: use reload() to "
        "give the name other content, or give that one another name"
    )
