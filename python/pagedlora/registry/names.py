"""Names: which generation each stands for, who uses it by that name, and its pins."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING

from pagedlora.errors import (
    AdapterInUseError,
    AdapterNotFoundError,
    InvalidArgumentError,
    PagedLoraError,
    RequestConflictError,
)
from pagedlora.registry.generations import Generation, GenerationTable, Use
from pagedlora.registry.host_pins import HostPins
from pagedlora.registry.lora_dir import MAX_NAME_BYTES, AdapterFiles
from pagedlora.shown import counted, quoted, shown

if TYPE_CHECKING:
    from typing import Any

    from pagedlora.peft_cache import PeftCacheManager

_SHOWN_OWNERS = 10
_SHOWN_NAMES = 3
_LOOKED_AT_NAMES, _NEIGHBOURS = 10_000, 8
"""Where a name is not there: those beside it in the alphabet are compared, which takes long."""


def check_name(name: object) -> None:
    """Raises InvalidArgumentError if no adapter can have that name."""
    size = len(name.encode(errors="surrogatepass")) if isinstance(name, str) else 0
    if not 1 <= size <= MAX_NAME_BYTES:
        raise InvalidArgumentError(
            f"an adapter's name must be a string of 1 to {MAX_NAME_BYTES} bytes, not {shown(name)}"
        )


@dataclass(eq=False, slots=True)
class NameEntry:
    """A registered name.

    Attributes:
        name: The name.
        path: Where it was registered from, as it was given.
        real_path: The same without links.
        generation: What it stands for.
        pins: How often it was pinned; each holds the generation.
        files: Of a name of `lora_dir` what it was parsed from; None: a call said where it is.
        is_unloading: Whether a call is about to give it up: nobody may acquire it.
        uses: Request id to the use, of requests that asked for this name.
    """

    name: str
    path: str
    real_path: str
    generation: Generation
    pins: int = 0
    files: AdapterFiles | None = None
    is_unloading: bool = False
    uses: dict[int, Use] = field(default_factory=dict)


class NameTable:
    """All names, in order of registration, and all uses. The caller holds the registry's lock."""

    def __init__(
        self, cache: PeftCacheManager, generations: GenerationTable, pins: HostPins
    ) -> None:
        """Starts empty.

        Args:
            cache: Where requests are moved.
            generations: What names stand for.
            pins: What names hold.
        """
        self._cache = cache
        self._generations = generations
        self._pins = pins
        self._entries: dict[str, NameEntry] = {}
        self._uses: dict[int, Use] = {}

    def __len__(self) -> int:
        """Number of names."""
        return len(self._entries)

    @property
    def entries(self) -> tuple[NameEntry, ...]:
        """All of them."""
        return tuple(self._entries.values())

    def find(self, name: object) -> NameEntry | None:
        """The entry of a name, also of one that is being unloaded.

        Raises:
            InvalidArgumentError: It is no string.
        """
        if isinstance(name, str):
            return self._entries.get(name)
        check_name(name)
        return None

    def get(self, name: str, *, for_change: bool = False) -> NameEntry:
        """The entry of a name, also of one that is being unloaded.

        Args:
            name: The name.
            for_change: Whether the call is about what is registered: its error names the closest.
                Requests are not told the names of others.

        Raises:
            AdapterNotFoundError: There is none.
        """
        entry = self.find(name)
        if entry is None:
            others = counted(len(self._entries), "other is", "others are")
            way_out = ". Register it, or use None for the base model"
            if for_change:
                way_out = _closest(name, self._entries)
            raise AdapterNotFoundError(
                f"no adapter {quoted(name)} is registered; {others}{way_out}", name=name
            )
        return entry

    def require(self, name: str, *, for_change: bool = False) -> NameEntry:
        """The entry of a name that can be used; arguments as `get`.

        Raises:
            AdapterNotFoundError: There is none, or it is being unloaded.
        """
        entry = self.get(name, for_change=for_change)
        if entry.is_unloading:
            raise AdapterNotFoundError(f"adapter {quoted(name)} is being unloaded", name=name)
        return entry

    def check_current(self, entry: NameEntry) -> None:
        """Raises AdapterNotFoundError if the name was unloaded meanwhile, or is about to be."""
        if self.require(entry.name) is not entry:
            raise AdapterNotFoundError(
                f"adapter {quoted(entry.name)} was unloaded meanwhile, and registered anew",
                name=entry.name,
            )

    def check_new(self, name: str) -> None:
        """Raises InvalidArgumentError if the name is taken."""
        entry = self._entries.get(name)
        if entry is not None:
            raise InvalidArgumentError(
                f"adapter {quoted(name)} is already registered from {quoted(entry.path)}: use "
                "another name"
            )

    def add(
        self, name: str, generation: Generation, files: AdapterFiles | None = None
    ) -> NameEntry:
        """A new name for a generation; with its `files` if it is one of `lora_dir`."""
        content = generation.content
        entry = NameEntry(name, content.path, content.real_path, generation, files=files)
        self._entries[name] = entry
        self._generations.attach(generation, name)
        return entry

    def remove(self, entry: NameEntry) -> None:
        """Gives up a name with its pins; those who still use it are left to its generations."""
        if self._entries.get(entry.name) is entry:
            for use in tuple(entry.uses.values()):
                if not self._generations.is_live_use(use):
                    self._forget(use)
            del self._entries[entry.name]
            self._pins.give_back(entry.generation, entry.pins)
            entry.pins = 0
            self._generations.detach(entry.generation, entry.name)

    def point(self, entry: NameEntry, generation: Generation) -> None:
        """Lets the name, with its pins, stand for another generation; uses stay where they are.

        A pinned name needs a generation that is pinned, held by the caller.
        """
        old = entry.generation
        entry.generation = generation
        generation.holds += entry.pins
        self._generations.attach(generation, entry.name)
        self._pins.give_back(old, entry.pins)
        self._generations.detach(old, entry.name)

    # ---- requests ------------------------------------------------------------------------------

    def acquire(self, entry: NameEntry, request: Any, task_id: int) -> int:
        """The request uses the name from now on; idempotent while it does.

        Args:
            entry: The name.
            request: Gets the task as its `lora_task_id`.
            task_id: That of the name's generation.

        Returns:
            The task that the request uses.

        Raises:
            RequestConflictError: A live request of that id uses another adapter, or is another
                request.
            InvalidArgumentError: The request's task cannot be set.
        """
        request_id = request.request_id
        use = self._uses.get(request_id)
        if use is not None and self._generations.is_live_use(use):
            if use.request is not request or entry.uses.get(request_id) is not use:
                raise RequestConflictError(
                    f"request {request_id} uses adapter {quoted(use.name)} already, task "
                    f"{use.generation.task_id}: release it first"
                )
            return use.generation.task_id
        try:
            request.lora_task_id = task_id
        except AttributeError as error:
            raise InvalidArgumentError(
                f"the lora_task_id of request {request_id} cannot be set: {error}"
            ) from error
        if use is not None:
            self._forget(use)
        use = Use(request, entry.name, entry.uses, entry.generation)
        self._uses[request_id] = entry.uses[request_id] = use
        entry.generation.uses[request_id] = use
        return task_id

    def release(self, request: Any) -> None:
        """Forgets the use of a request; nothing happens if it has none.

        Ends its ownership too: a move beside its end may have given that back to it.
        """
        use = self._uses.get(request.request_id)
        if use is not None and use.request is request:
            self._cache.core.mark_request_done(request.request_id)
            self._forget(use)

    def _forget(self, use: Use) -> None:
        request_id = use.request.request_id
        del self._uses[request_id]
        use.generation.uses.pop(request_id, None)
        use.uses_of_name.pop(request_id, None)
        if not use.generation.names:
            self._generations.discard(use.generation)

    def move_waiting(self, entry: NameEntry, old: Generation) -> None:
        """Moves the requests of the name that have not started from `old` to what it stands for.

        Those that own the old task are added for the new one; where that finds no room they own
        nothing, and whoever adds them again meets the reason.
        """
        new = entry.generation
        for use in tuple(entry.uses.values()):
            if use.generation is not old or not self._may_move(use):
                continue
            request, request_id = use.request, use.request.request_id
            was_owner = self._cache.core.is_owner(request_id)
            self._cache.core.mark_request_done(request_id)
            request.lora_task_id = new.task_id
            use.was_owner = False  # it has not ended, even if it finds no room now
            del old.uses[request_id]
            use.generation = new
            new.uses[request_id] = use
            if was_owner:
                with suppress(PagedLoraError):
                    self._cache.add_request_peft(request)

    def _may_move(self, use: Use) -> bool:
        core, request = self._cache.core, use.request
        if getattr(request, "keeps_adapter", False) or getattr(request, "has_started", False):
            return False
        request_id = request.request_id
        return not core.has_started(request_id) and core.adapter_state(request_id) != "failed"

    # ---- owners --------------------------------------------------------------------------------

    def owners(self, entry: NameEntry, owners_of_task: Owners) -> frozenset[int]:
        """Ids of the requests of a name that own a task.

        Args:
            entry: The name.
            owners_of_task: Of the cache, as it is now.
        """
        mine = (use for use in entry.uses.values())
        ids = {u.request.request_id for u in mine if owners_of_task.has(u)}
        if len(entry.generation.names) == 1:
            ids |= owners_of_task.of(entry.generation.task_id) - entry.generation.uses.keys()
        return frozenset(ids)

    def users(self, entry: NameEntry, owners_of_task: Owners) -> frozenset[int]:
        """The owners, and the requests of the name that are about to become some."""
        is_live = self._generations.is_live_use
        waiting = {i for i, use in entry.uses.items() if is_live(use)}
        return self.owners(entry, owners_of_task) | waiting


class Owners:
    """Who owns which task, asked of the cache once."""

    def __init__(self, cache: PeftCacheManager) -> None:
        """Asks now."""
        self._owners: tuple[Mapping[int, set[int]], ...] = (cache.active_tasks, cache.paused_tasks)

    def of(self, task_id: int) -> frozenset[int]:
        """Requests that own the task, active and paused."""
        return frozenset().union(*self._sets(task_id))

    def has(self, use: Use) -> bool:
        """Whether the request of a use owns its task."""
        request_id = use.request.request_id
        return any(request_id in owners for owners in self._sets(use.generation.task_id))

    def _sets(self, task_id: int) -> Iterable[set[int]]:
        return (owners.get(task_id, set()) for owners in self._owners)


def _closest(name: str, names: Iterable[str]) -> str:
    """The names that are most like another one, for the end of a message."""
    names = sorted(islice(names, _LOOKED_AT_NAMES))
    place = bisect(names, name)
    near = names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
    close = get_close_matches(name, near, _SHOWN_NAMES)
    shown = ", ".join(map(quoted, list(dict.fromkeys([*close, *near]))[:_SHOWN_NAMES]))
    if not shown:
        return ""
    return f", such as {shown}" if len(names) > _SHOWN_NAMES else f": {shown}"


def in_use_error(entry: NameEntry, users: frozenset[int], timeout_s: float) -> AdapterInUseError:
    """Why a name was not unloaded, with the first of the requests that use it."""
    first = ", ".join(map(str, sorted(users)[:_SHOWN_OWNERS]))
    more = ", ..." if len(users) > _SHOWN_OWNERS else ""
    return AdapterInUseError(
        f"adapter {quoted(entry.name)} is still in use after {timeout_s:g} s, by "
        f"{counted(len(users), 'request')}: {first}{more}; it was not unloaded",
        task_id=entry.generation.task_id,
        num_owners=len(users),
        owners=users,
    )
