"""Reading contents, and letting names stand for other ones."""

from __future__ import annotations

from contextlib import suppress

from pagedlora.errors import AdapterInUseError, GenerationConflictError, PagedLoraError
from pagedlora.loaders.open_adapter import AdapterSource
from pagedlora.registry.content import AdapterContent
from pagedlora.registry.deadline import Deadline
from pagedlora.registry.flight import Flight, is_impatience
from pagedlora.registry.generations import MAX_RETIRED, Generation
from pagedlora.registry.lora_dir import AdapterFiles
from pagedlora.registry.names import NameEntry
from pagedlora.registry.parts import RegistryParts
from pagedlora.shown import counted, quoted, shown


class Reloader:
    """What a `LoraManager` does when it knows a content. Thread-safe; callers hold no lock."""

    def __init__(self, parts: RegistryParts) -> None:
        self._parse = parts.parse
        self._digest = parts.digest
        self._lock = parts.lock
        self._generations = parts.generations
        self._names = parts.names
        self._pins = parts.pins

    def identify(self, entry: NameEntry, deadline: Deadline) -> str:
        """Reads the content of a name, if it is not known, and shares it with names of the same.

        A name whose content another generation has stands for that one from now on, unless the
        name is pinned already. Requests that use its own generation stay there until they end.

        Returns:
            The digest.

        Raises:
            AdapterNotFoundError: The name is not registered any more, or its file is gone.
            PagedLoraError: The content cannot be read.
        """
        with self._lock:
            generation = entry.generation
            digest = generation.digest
            if digest is not None and self._generations.find(digest) is generation:
                return digest
        if digest is None:
            digest = self._read_digest(generation, deadline)
        while True:
            first = self._find(digest)
            is_usable = first is not None and first.can_replace(generation.content)
            with self._lock:
                self._names.check_current(entry)
                if entry.generation is not generation:  # reloaded meanwhile: it is known then
                    return entry.generation.digest or digest
                if self._generations.find(digest) is not first:
                    continue  # another one came or went meanwhile
                self._generations.set_digest(generation, digest, replace=not is_usable)
                if first is not None and first is not generation and is_usable:
                    self._share(entry, first)
                return digest

    def follow(self, entry: NameEntry, source: AdapterSource, files: AdapterFiles) -> None:
        """As `ListedNames.follow`: for requests to come, and without reading the content.

        Args:
            entry: A name of `lora_dir`.
            source: Its directory.
            files: What lay there before this call parses it.
        """
        content, plan, sources = self._parse(source)
        with self._lock:
            if entry.files == files:  # another call was first
                return
            self._check(entry, None, stays=False)
            target = self._generations.add(content, plan, sources)
            target.holds += 1
        try:
            while not self._try_follow(entry, target, files):
                self._pins.bring_in(target, Deadline(None))
        finally:
            with self._lock:
                self._pins.give_back(target)
                self._generations.discard(target)

    def _try_follow(self, entry: NameEntry, target: Generation, files: AdapterFiles) -> bool:
        """Lets the name stand for `target`; False if that must be pinned first."""
        with self._lock:
            if entry.files == files:
                return True
            self._check(entry, None, stays=False)
            if entry.pins and not target.is_pinned:
                return False
            self._names.point(entry, target)
            content = target.content
            entry.path, entry.real_path, entry.files = content.path, content.real_path, files
            return True

    def reload(
        self,
        entry: NameEntry,
        source: AdapterSource,
        expected: str | None,
        files: AdapterFiles | None,
    ) -> None:
        """As `LoraManager.reload`; `files` are the source's if it is the name's in `lora_dir`."""
        content, plan, sources = self._parse(source)
        digest = self._digest(content, Deadline(None))
        # A source that was overwritten in place cannot be read any more: it is other content.
        with suppress(PagedLoraError):
            self.identify(entry, Deadline(None))
        first = self._find(digest)
        is_usable = first is not None and first.can_replace(content)
        with self._lock:
            target = self._generations.find(digest)
            is_usable = is_usable and target is first
            self._check(entry, expected, is_usable and entry.generation is target)
            # That forgets retired generations that nobody uses any more: look again.
            if target is None or not is_usable or self._generations.find(digest) is not target:
                target = self._generations.add(content, plan, sources)
                target.digest = digest
            target.holds += 1
        try:
            while not self._try_commit(entry, content, target, digest, expected):
                self._pins.bring_in(target, Deadline(None))
            with self._lock:
                entry.files = files
        finally:
            with self._lock:
                self._pins.give_back(target)
                self._generations.discard(target)

    def _read_digest(self, generation: Generation, deadline: Deadline) -> str:
        """Reads the content, or waits for the call that does."""
        while True:
            with self._lock:
                if generation.digest is not None:
                    return generation.digest
                reading = generation.reading
                if reading is None:
                    mine = generation.reading = Flight()
                    break
            if not reading.wait(deadline):
                raise deadline.error(generation.last_name)
            error = reading.error
            if error is not None and (deadline.has_passed or not is_impatience(error)):
                raise error
        failure: BaseException | None = None
        try:
            digest = self._digest(generation.content, deadline)
            with self._lock:
                generation.digest = digest
        except BaseException as raised:
            failure = raised
            raise
        finally:
            with self._lock:
                generation.reading = None
            mine.finish(failure)
        return digest

    def _try_commit(
        self,
        entry: NameEntry,
        content: AdapterContent,
        target: Generation,
        digest: str,
        expected: str | None,
    ) -> bool:
        """Lets the name stand for `target`; False if that must be pinned first."""
        with self._lock:
            self._check(entry, expected, entry.generation is target)
            if entry.generation is not target:
                if entry.pins and not target.is_pinned:
                    return False
                old = entry.generation
                self._generations.set_digest(target, digest, replace=target.content is content)
                old.holds += 1  # so that it is not forgotten before its requests have moved
                self._names.point(entry, target)
                self._names.move_waiting(entry, old)
                self._pins.give_back(old)
                self._generations.discard(old)
            target.add_source(content)
            entry.path, entry.real_path = content.path, content.real_path
            return True

    def _check(self, entry: NameEntry, expected: str | None, stays: bool) -> None:
        """Raises if the name may not get, or keep, a generation; the caller holds the lock."""
        self._names.check_current(entry)
        actual = entry.generation.digest
        if expected is not None and expected != actual:
            raise GenerationConflictError(
                f"adapter {quoted(entry.name)} is of generation {actual}, not {shown(expected)}: "
                "somebody else reloaded it, or its content was never read",
                name=entry.name,
                expected=expected,
                actual=actual,
            )
        if stays:
            return
        self._generations.collect()
        retired = self._generations.retired
        if len(retired) >= MAX_RETIRED:
            owners = frozenset(request for g in retired for request in g.uses)
            raise AdapterInUseError(
                f"adapter {quoted(entry.name)} cannot be reloaded: "
                f"{counted(len(retired), 'generation is', 'generations are')} "
                "retired and their requests have not ended; wait for them",
                task_id=retired[0].task_id,
                num_owners=len(owners),
                owners=owners,
            )

    def _share(self, entry: NameEntry, generation: Generation) -> None:
        """Lets a name that has no pins stand for the generation that has its content already."""
        own = entry.generation
        is_used = any(self._generations.is_live_use(use) for use in own.uses.values())
        is_full = len(self._generations.retired) >= MAX_RETIRED
        if entry.pins == 0 and not (is_used and is_full):
            generation.add_source(own.content)
            self._names.point(entry, generation)

    def _find(self, digest: str) -> Generation | None:
        with self._lock:
            return self._generations.find(digest)
