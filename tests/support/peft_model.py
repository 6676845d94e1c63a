"""What a PeftCacheManager must do and may do, in a page of Python.

The model knows owners, sizes, and which tasks are resident; it takes residency from the cache after
each call and checks the change. It does not predict which victim goes first within a class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["host", "device"]
UNOWNED, WAITING, PAUSED, ACTIVE = range(4)


@dataclass
class PeftModel:
    """Owners and residency.

    Attributes:
        total: Pages by tier.
        pages: Pages of every task that is known.
        carried: Tasks without a source, with the seed of their weights.
        active: Task to the requests that are active.
        paused: Task to the requests that are paused.
        task_of: Task of every live request.
        resident: Tasks by tier.
        started: Live requests that were in a batch or paused.
        leased: Tasks that the open lease reads.
        demoted: Tasks whose device copies count as unowned since a reset.
    """

    total: dict[Tier, int]
    pages: dict[int, int] = field(default_factory=dict)
    carried: dict[int, int] = field(default_factory=dict)
    active: dict[int, set[int]] = field(default_factory=dict)
    paused: dict[int, set[int]] = field(default_factory=dict)
    task_of: dict[int, int] = field(default_factory=dict)
    resident: dict[Tier, set[int]] = field(default_factory=lambda: {"host": set(), "device": set()})
    started: set[int] = field(default_factory=set)
    leased: set[int] = field(default_factory=set)
    demoted: set[int] = field(default_factory=set)

    # ---- owners

    def owned(self, task: int) -> bool:
        """Whether the task has an active or paused request."""
        return task in self.active or task in self.paused

    def add(self, request: int, task: int) -> None:
        """The request becomes an active owner."""
        was_started = request in self.started
        self._forget(request)
        self.active.setdefault(task, set()).add(request)
        self.task_of[request] = task
        if was_started:
            self.started.add(request)
        self.demoted.discard(task)

    def start(self, requests: Iterable[int]) -> None:
        """The requests were in a batch."""
        self.started.update(requests)

    def done(self, request: int, pause: bool) -> None:
        """The request ends or is paused; nothing if it is not live."""
        task = self.task_of.get(request)
        if task is None:
            return
        if pause and request in self.paused.get(task, ()):
            return
        self._forget(request)
        if pause:
            self.paused.setdefault(task, set()).add(request)
            self.task_of[request] = task
            self.started.add(request)
        self.demoted.discard(task)

    def _forget(self, request: int) -> None:
        task = self.task_of.pop(request, None)
        self.started.discard(request)
        for owners in (self.active, self.paused):
            if task in owners:
                owners[task].discard(request)
                if not owners[task]:
                    del owners[task]

    # ---- pages

    def used(self, tier: Tier) -> int:
        """Pages that residents take."""
        return sum(self.pages[task] for task in self.resident[tier])

    def pinned(self, tier: Tier) -> set[int]:
        """Residents that must stay."""
        if tier == "device":
            return self.leased & self.resident["device"]
        return {task for task in self.resident["host"] if self.owned(task)}

    def fits(self, tier: Tier, needed: int, keep: Iterable[int] = ()) -> bool:
        """Whether a claim can succeed when all but the pinned and `keep` may go."""
        stay = self.pinned(tier) | (set(keep) & self.resident[tier])
        return needed <= self.total[tier] - sum(self.pages[task] for task in stay)

    def eviction_class(self, tier: Tier, task: int) -> int:
        """How soon a resident is given up; only unowned ones are in the host tier."""
        if tier == "host" or task in self.demoted:
            return UNOWNED
        if self.active.get(task, set()) & self.started:
            return ACTIVE
        return PAUSED if task in self.paused else WAITING if task in self.active else UNOWNED

    def settle(
        self,
        tier: Tier,
        after: set[int],
        *,
        needed: int = 0,
        brought: Iterable[int] = (),
        keep: Iterable[int] = (),
    ) -> None:
        """Takes over the residents after a call.

        Args:
            tier: Of the residents.
            after: Who is there now.
            needed: Pages that the call claimed, whether or not its loads succeeded.
            brought: Who came in.
            keep: Who had to stay beside the pinned.
        """
        before, brought = self.resident[tier], set(brought)
        lost = before - after
        assert after - before == brought - before
        stay = self.pinned(tier) | set(keep)
        assert not lost & stay, f"{lost & stay} had to stay"
        freed = [self.pages[task] for task in lost]
        shortage = needed - (self.total[tier] - self.used(tier))
        if shortage <= 0:
            assert not lost, "evicted without need"
        else:
            assert sum(freed) >= shortage
            assert sum(freed) - max(freed) < shortage, "evicted more than was needed"
            worst = max(self.eviction_class(tier, task) for task in lost)
            spared = {t for t in before & after if self.eviction_class(tier, t) < worst}
            assert spared <= stay, f"{spared} should have been given up first"
        self.resident[tier] = set(after)
        self.forget_lost()

    def forget_lost(self) -> None:
        """Carried weights that are in no tier and have no owner are unknown again."""
        there = self.resident["host"] | self.resident["device"]
        for task in [t for t in self.carried if t not in there and not self.owned(t)]:
            del self.carried[task], self.pages[task]
        self.demoted &= self.resident["device"]
