"""Continuous batching with chunked prefill, suspension, resumption and recomputation.

One pass takes the requests one after the other (see `pass_order`) and gives each what it needs for
one step: a token or a chunk of tokens, device pages for its adapter, KV blocks.

| missing          | for whom                 | what happens                                 |
|------------------|--------------------------|----------------------------------------------|
| its adapter      | new, or to be resumed    | it waits; others go on                       |
| device pages     | anybody                  | it is skipped; others go on (S2)             |
| KV blocks        | new, guaranteed_no_evict | it waits, and so does every new one behind   |
| KV blocks        | anybody, max_utilization | those behind it give way, the last first; if |
|                  |                          | that is not enough, nobody does: a new one   |
|                  |                          | waits, and one that runs gives way itself    |
| tokens or places | anybody                  | it waits and keeps what it has               |

With `guaranteed_no_evict` a request gets the blocks for its longest answer when it begins, so it
never has to give way. Who gives way is suspended: its blocks move to the host pool. If that is
full, those suspended that have lower precedence lose theirs, and if that is not enough, it loses
its own: it computes its context again. Both pause its adapter, once; coming back adds it again,
once, after the blocks were had (S1).

Not thread-safe. Nothing here computes: the caller runs what `schedule_request` answers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pagedlora.arguments import check_type, refuse_requests, to_integer
from pagedlora.errors import InvalidArgumentError, LoraCacheFullError, PagedLoraError
from pagedlora.scheduler.page_budget import PageBudget
from pagedlora.scheduler.pass_order import pass_order
from pagedlora.scheduler.precedence import Record, Records
from pagedlora.scheduler.step import ContextChunk, KvManager, PeftManager, SchedulerOutput
from pagedlora.shown import shown

Policy = Literal["guaranteed_no_evict", "max_utilization"]
T = TypeVar("T")


class _Verdict(enum.Enum):
    SCHEDULED = enum.auto()
    NOT_READY = enum.auto()
    NO_TOKENS = enum.auto()
    NO_PAGES = enum.auto()
    NO_BLOCKS = enum.auto()


@dataclass(slots=True)
class _Pass:
    """What is left of one step, and what was decided."""

    number: int
    budget: PageBudget
    tokens: int
    places: int
    keepers: set[int]  # ids of those behind that generate: a token is kept for each
    output: SchedulerOutput = field(default_factory=SchedulerOutput)
    behind: list[Record] = field(default_factory=list)  # still to be considered, the last one first
    skipped: list[Record] = field(default_factory=list)
    scheduled: list[Record] = field(default_factory=list)
    admitted: list[Record] = field(default_factory=list)  # those scheduled that were new
    admits_new: bool = True
    admits_new_pages: bool = True


class KVCacheV2Scheduler:
    """Decides what each step computes; see the module for its rules."""

    def __init__(
        self,
        kv_cache_manager: KvManager,
        peft_cache_manager: PeftManager | None = None,
        *,
        policy: Policy = "guaranteed_no_evict",
        max_batch_size: int,
        max_num_tokens: int,
        enable_chunked_prefill: bool = True,
        max_skip_passes: int = 8,
    ) -> None:
        """Starts without requests.

        Args:
            kv_cache_manager: Blocks for all requests; used by this scheduler alone.
            peft_cache_manager: Adapter caches; None: adapters cost nothing and are not told
                anything.
            policy: Whether requests get all blocks when they begin, or as they need them.
            max_batch_size: Requests of a step, at least 1.
            max_num_tokens: Tokens of a step, at least 1.
            enable_chunked_prefill: Whether a prompt may be spread over several steps. What is
                computed again always may.
            max_skip_passes: Passes that may admit others ahead of the oldest that is ready.
        """
        to_integer(max_batch_size, "max_batch_size", 1)
        to_integer(max_num_tokens, "max_num_tokens", 1)
        to_integer(max_skip_passes, "max_skip_passes", 0)
        check_type(enable_chunked_prefill, bool, "enable_chunked_prefill")
        self._kv = kv_cache_manager
        self._peft = peft_cache_manager
        self._keeps_blocks = policy == "guaranteed_no_evict"
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._chunked = enable_chunked_prefill
        self._max_skip_passes = max_skip_passes
        self._records = Records()
        self._num_passes = 0

    def schedule_request(
        self, active_requests: Sequence[Any], inflight_request_ids: Iterable[int] = ()
    ) -> SchedulerOutput:
        """Decides one step.

        Args:
            active_requests: All live requests, in arrival order. Who is missing has ended, and the
                caller has given back what it held. A request that sets `is_to_complete` has
                computed its last token: its adapter counts, and it is not scheduled.
            inflight_request_ids: Requests of steps that still run: not scheduled again, never made
                to give way, their adapters counted.

        Returns:
            What to compute. Keys and values of those that gave way are moved or dropped, and
            adapters paused and added, when this returns.
        """
        try:
            inflight = set(inflight_request_ids)
        except TypeError:
            raise InvalidArgumentError(
                f"inflight_request_ids is {shown(inflight_request_ids)}: give ids of requests"
            ) from None
        try:
            records = self._records.update(active_requests)
        except (AttributeError, TypeError) as error:
            refuse_requests(active_requests, "active_requests", error, ("request_id", "priority"))
        self._num_passes += 1
        budget = PageBudget(self._peft)
        order: list[Record] = []
        for record in records:
            request = record.request
            if request.request_id in inflight or getattr(request, "is_to_complete", False):
                with suppress(PagedLoraError):
                    budget.claim(request)
            else:
                order.append(record)
        order = pass_order(order, self._is_begun, budget)
        this = _Pass(
            self._num_passes,
            budget,
            self._max_num_tokens,
            self._max_batch_size,
            {
                record.request.request_id
                for record in order
                if record.is_generating and not self._is_away(record)
            },
            behind=order[::-1],
        )
        for record in order:
            if this.places == 0 or this.tokens == 0:
                break  # whoever is left waits and keeps what it has
            this.behind.pop()
            this.keepers.discard(record.request.request_id)
            if record.left_pass != this.number:
                self._consider(record, this)
        self._count_skips(this)
        this.output.generation = _grouped(this.output.generation, lambda request: request)
        this.output.context = _grouped(this.output.context, lambda chunk: chunk.request)
        return this.output

    def precedence(self, request: Any) -> tuple[bool, int, int]:
        """Where the request stands, smaller first; if it is new, last of its priority."""
        record = self._records.get(request)
        if record is None:
            return (True, -request.priority, 1 << 62)
        return record.precedence

    def _consider(self, record: Record, this: _Pass) -> None:
        """Schedules the request, or notes why not."""
        request = record.request
        is_new = not self._is_begun(record)
        if is_new and not this.admits_new:
            return
        try:
            verdict = self._try_schedule(record, is_new, this)
        except PagedLoraError as error:
            this.output.failed.append((request, error))
            return
        if verdict is _Verdict.SCHEDULED:
            this.places -= 1
            this.scheduled.append(record)
            record.has_begun = True
            if is_new:
                this.admitted.append(record)
        elif verdict is _Verdict.NO_PAGES:
            this.skipped.append(record)
            this.admits_new_pages = this.admits_new_pages and not record.is_past_bound
        elif is_new and verdict in (_Verdict.NO_BLOCKS, _Verdict.NO_TOKENS):
            this.admits_new = False  # who is behind would take what it waits for
        elif verdict is _Verdict.NO_BLOCKS and this.scheduled and not self._is_away(record):
            self._give_way(record, this)  # those before it need its blocks

    def _is_begun(self, record: Record) -> bool:
        """Whether the request has blocks, or had some."""
        if record.has_begun is None:
            kv, request = self._kv, record.request
            record.has_begun = bool(kv.block_table(request)) or kv.is_suspended(request)
        return record.has_begun

    def _is_away(self, record: Record) -> bool:
        """Whether it began and has no blocks on the device."""
        return record.lost_kv or self._kv.is_suspended(record.request)

    def _try_schedule(self, record: Record, is_new: bool, this: _Pass) -> _Verdict:
        request = record.request
        num_tokens = self._num_tokens(record, this)
        if num_tokens == 0:
            return _Verdict.NO_TOKENS
        comes_back = self._is_away(record)
        if (is_new or comes_back) and not self._is_ready(request):
            return _Verdict.NOT_READY
        pages = this.budget.pages_missing_for(request)
        if not this.budget.fits(pages) or (is_new and pages and not this.admits_new_pages):
            return _Verdict.NO_PAGES
        if not self._get_blocks(record, num_tokens, is_new, this):
            return _Verdict.NO_BLOCKS
        if comes_back and not self._resume(record):
            return _Verdict.NOT_READY
        this.budget.claim(request)
        this.tokens -= num_tokens
        if record.is_generating:
            this.output.generation.append(request)
        else:
            this.output.context.append(ContextChunk(request, num_tokens))
        return _Verdict.SCHEDULED

    def _num_tokens(self, record: Record, this: _Pass) -> int:
        """Tokens that the step computes of the request; 0: none."""
        if record.is_generating:
            return min(this.tokens, 1)
        missing = record.request.num_context_tokens - record.request.num_computed_tokens
        # The first one always gets a token: those it is kept for may wait for its blocks.
        room = max(0 if this.scheduled else 1, this.tokens - len(this.keepers))
        is_whole = not self._chunked and not record.request.has_started
        if missing > room and is_whole and missing <= self._max_num_tokens:
            return 0
        return int(min(missing, room))

    def _is_ready(self, request: Any) -> bool:
        if self._peft is None or request.lora_task_id is None:
            return True
        return self._peft.adapter_state(request) == "ready"

    def _get_blocks(self, record: Record, num_tokens: int, is_new: bool, this: _Pass) -> bool:
        """KV blocks for the step, if need be those of others; all that is needed or nothing."""
        request, kv = record.request, self._kv
        total = request.num_computed_tokens + num_tokens
        if self._keeps_blocks:
            return kv.try_allocate(request, max(total, request.max_total_tokens))
        comes = is_new or self._is_away(record)
        needed = kv.blocks_needed(total) - len(kv.block_table(request))
        # Who comes leaves one block to each that runs: they will need it next, and would turn it
        # out again.
        spare = len(this.scheduled) if comes else 0
        room = kv.num_free_blocks
        victims: list[Record] = []
        for other in this.behind:
            if needed + spare <= room:
                break
            if self._can_give_way(other, this) and record.may_displace(other, is_new=is_new):
                victims.append(other)
                room += len(kv.block_table(other.request))
        if needed + spare > room:
            return False
        for victim in victims:
            self._give_way(victim, this)
        return kv.try_allocate(request, total)

    def _can_give_way(self, record: Record, this: _Pass) -> bool:
        return record.left_pass != this.number and bool(self._kv.block_table(record.request))

    def _give_way(self, record: Record, this: _Pass) -> None:
        """Takes the request's blocks, to the host pool or for good, and pauses its adapter."""
        record.left_pass = this.number
        this.keepers.discard(record.request.request_id)
        if self._suspend(record, this):
            this.output.suspended.append(record.request)
        else:
            self._drop_kv(record, this)
        self._pause(record)

    def _suspend(self, record: Record, this: _Pass) -> bool:
        """To the host pool, which those of lower precedence may have to leave."""
        kv, request = self._kv, record.request
        if kv.suspend_request(request):
            return True
        room = kv.num_free_host_blocks
        dropped: list[Record] = []
        for other in this.behind:
            if room >= len(kv.block_table(request)):
                break
            if record.precedence < other.precedence and kv.is_suspended(other.request):
                dropped.append(other)
                room += len(kv.host_block_table(other.request))
        if room < len(kv.block_table(request)):
            return False
        for other in dropped:
            other.left_pass = this.number
            self._drop_kv(other, this)
        return kv.suspend_request(request)

    def _drop_kv(self, record: Record, this: _Pass) -> None:
        self._kv.free_resources(record.request)
        record.lost_kv = True
        if record.request in this.output.suspended:
            this.output.suspended.remove(record.request)
        this.output.recompute_paused.append(record.request)

    def _pause(self, record: Record) -> None:
        """Once, and only who has computed something."""
        request = record.request
        if (
            self._peft is not None
            and request.lora_task_id is not None
            and request.has_started
            and not record.is_paused
        ):
            self._peft.mark_request_done(request, True)
            record.is_paused = True

    def _resume(self, record: Record) -> bool:
        """The adapter, after the blocks were had; without it they are given back.

        Raises:
            PagedLoraError: The adapter cannot be had at all; the blocks are given back.
        """
        request = record.request
        try:
            if record.is_paused and self._peft is not None:
                self._peft.add_request_peft(request, True)
        except PagedLoraError as error:
            if record.lost_kv:
                self._kv.free_resources(request)
            else:
                self._kv.suspend_request(request)
            if isinstance(error, LoraCacheFullError):
                return False
            raise
        record.is_paused = record.lost_kv = False
        self._kv.confirm_resume(request)
        return True

    def _count_skips(self, this: _Pass) -> None:
        """S4: passes that let others go ahead of who had no device pages.

        New ones count only if they are the oldest of their priority, and only others' admissions.
        """
        counted: set[int] = set()
        for record in this.skipped:
            begun = self._is_begun(record)
            if not begun:
                if record.request.priority in counted:
                    continue
                counted.add(record.request.priority)
            others = this.scheduled if begun else this.admitted
            if any(record.is_overtaken_by(other) for other in others):
                record.was_skipped(self._max_skip_passes)


def _grouped(items: list[T], request_of: Callable[[T], Any]) -> list[T]:
    """Those of one adapter next to each other, in the order in which the first of each stands."""
    groups: dict[int | None, list[T]] = {}
    for item in items:
        groups.setdefault(request_of(item).lora_task_id, []).append(item)
    return [item for group in groups.values() for item in group]
