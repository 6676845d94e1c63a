"""Generations: what names stand for, one task each, shared by names of the same content.

A generation is *live* while a name stands for it, *retired* while none does and requests still use
it or an open lease reads it, and gone after that: its task is unregistered, and no other will have
its id.

| from    | to      | when                                                          |
|---------|---------|---------------------------------------------------------------|
| new     | live    | a name is attached                                            |
| live    | retired | its last name is detached while somebody uses it              |
| live    | gone    | its last name is detached while nobody uses it                |
| retired | live    | a name is attached again: its content came back               |
| retired | gone    | `collect` finds that nobody uses it any more                  |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagedlora import _core
from pagedlora.errors import AdapterInUseError
from pagedlora.loaders.pickled import PrivateCopy
from pagedlora.loaders.source_file import SourceFile
from pagedlora.registry.content import AdapterContent
from pagedlora.registry.flight import Flight

if TYPE_CHECKING:
    from pagedlora.peft_cache import PeftCacheManager

MAX_RETIRED = 16
"""While so many generations are retired, no reload retires another one."""
_MAX_SOURCES = 16
"""Files of one generation that are kept, to be read if the others disappear."""
_MAX_COPIES = 2
"""Of these, files that this process made itself: they stay, and each takes room on the disk."""


@dataclass(eq=False, slots=True)
class Use:
    """A request from acquire to release.

    Attributes:
        request: As the caller gave it; its `lora_task_id` is that of the generation.
        name: The adapter that it asked for.
        uses_of_name: All uses of that name, with this one.
        generation: What it uses.
        was_owner: Whether it was ever seen to own the task in the cache.
    """

    request: Any
    name: str
    uses_of_name: dict[int, Use]
    generation: Generation
    was_owner: bool = False


@dataclass(eq=False, slots=True)
class Generation:
    """One content of an adapter, and its task.

    Attributes:
        task_id: Its task in the caches.
        content: The adapter as it was first parsed.
        num_pages: Pages it takes in either tier.
        sources: What its task is read from.
        files: Those in `sources`.
        copies: Keep those of them there that this process made, but for that of `content`.
        digest: Of the content; None until it was read.
        names: That stand for it.
        last_name: The last one that did.
        holds: Pins of its names and calls that need it resident; it has one pin in the cache
            while there are any.
        is_pinned: Whether it has that pin and is resident.
        flight: The call that brings it into the host tier.
        reading: The call that reads its content for the digest.
        uses: Request id to the use, of requests that use it.
    """

    task_id: int
    content: AdapterContent
    num_pages: int
    sources: _core.SourceGroup
    files: list[SourceFile]
    copies: list[PrivateCopy] = field(default_factory=list)
    digest: str | None = None
    names: set[str] = field(default_factory=set)
    last_name: str = ""
    holds: int = 0
    is_pinned: bool = False
    flight: Flight | None = None
    reading: Flight | None = None
    uses: dict[int, Use] = field(default_factory=dict)

    def can_replace(self, content: AdapterContent) -> bool:
        """Whether it stays readable if `content`, of the same digest, is given up for it.

        It does if the file is or can become a source of it, or one of its own is still there. Asks
        the file system; the caller holds no lock.
        """
        if content.file in self.files or self._can_add(content):
            return True
        return any(file.is_unchanged() for file in tuple(self.files))

    def add_source(self, content: AdapterContent) -> None:
        """Makes the file of an adapter of the same digest another source, if the plan fits it."""
        if content.file in self.files or not self._can_add(content):
            return
        self.sources.add(content.source)
        self.files.append(content.file)
        if content.copy is not None:
            self.copies.append(content.copy)

    def _can_add(self, content: AdapterContent) -> bool:
        """Whether the file of `content` can become another source: the plan fits, there is room."""
        num_copies = len(self.copies) + (self.content.copy is not None)
        has_room = content.copy is None or num_copies < _MAX_COPIES
        same_size = content.source.size_bytes == self.sources.size_bytes
        is_laid_out_so = same_size and self.content.rows.is_laid_out_as(content.rows)
        return is_laid_out_so and has_room and len(self.files) < _MAX_SOURCES


class GenerationTable:
    """All generations, by digest and retired ones by task. The caller holds the registry's lock."""

    def __init__(self, cache: PeftCacheManager) -> None:
        self._core = cache.core
        self._by_digest: dict[str, Generation] = {}
        self._retired: dict[int, Generation] = {}

    def add(
        self, content: AdapterContent, plan: _core.AdapterPlan, sources: _core.SourceGroup
    ) -> Generation:
        """A new generation with a task of its own and no name."""
        num_pages = self._core.num_pages_of_plan(plan)
        # Last what makes it known: a call that raises leaves no task.
        task_id = self._core.register_task(plan)
        return Generation(task_id, content, num_pages, sources, [content.file])

    def find(self, digest: str) -> Generation | None:
        """The generation of that content to which other names are attached."""
        return self._by_digest.get(digest)

    def set_digest(self, generation: Generation, digest: str, *, replace: bool = False) -> None:
        """Notes the digest; the first generation of a digest is the one that is found.

        Args:
            generation: Whose content was read.
            digest: Of the content.
            replace: Whether it is found from now on instead of the first.
        """
        generation.digest = digest
        if replace or digest not in self._by_digest:
            self._by_digest[digest] = generation

    def attach(self, generation: Generation, name: str) -> None:
        """The name stands for the generation from now on."""
        generation.names.add(name)
        generation.last_name = name
        self._retired.pop(generation.task_id, None)

    def detach(self, generation: Generation, name: str) -> None:
        """The name does not stand for it any more: without another one it retires or goes."""
        generation.names.discard(name)
        self._retire_or_forget(generation)

    def discard(self, generation: Generation) -> None:
        """Forgets the generation unless a name stands for it or somebody uses it."""
        self._retire_or_forget(generation)

    def collect(self) -> None:
        """Forgets the retired generations that nobody uses any more."""
        for generation in tuple(self._retired.values()):
            self._retire_or_forget(generation)

    @property
    def retired(self) -> tuple[Generation, ...]:
        """The retired ones, in the order in which they retired."""
        return tuple(self._retired.values())

    def is_live_use(self, use: Use) -> bool:
        """Whether the request still needs what it uses.

        A request that keeps its adapter does until it is released. Any other one does while it
        owns the task in the cache, and before: it is about to be added, for the first time or
        again, after the cache took its task for a request that has started (O4).
        """
        if getattr(use.request, "keeps_adapter", False):
            return True
        request_id = use.request.request_id
        is_owner = self.is_owner(request_id)
        use.was_owner |= is_owner
        return is_owner or not use.was_owner or self._core.was_revoked(request_id)

    def is_owner(self, request_id: int) -> bool:
        """Whether the request owns a task in the cache; one whose load failed owns none."""
        if not self._core.is_owner(request_id):
            return False
        return self._core.adapter_state(request_id) != "failed"

    def _retire_or_forget(self, generation: Generation) -> None:
        if generation.names or generation.holds:
            return
        if not any(self.is_live_use(use) for use in generation.uses.values()):
            try:
                self._core.unregister_task(generation.task_id)
            except AdapterInUseError:
                pass  # by owners that were never acquired, or by an open lease
            else:
                self._forget(generation)
                return
        self._retired.setdefault(generation.task_id, generation)

    def _forget(self, generation: Generation) -> None:
        self._retired.pop(generation.task_id, None)
        digest = generation.digest
        if digest is not None and self._by_digest.get(digest) is generation:
            del self._by_digest[digest]
