"""Which whole requests run in the next step, for people who write their own engine.

`CapacityScheduler` decides and changes nothing: it reads the requests and managers it is given,
of whatever kind (see `capacity_inputs`), and the caller acts on its answer. Per pass, and whatever
the policy,

- at most `max_num_requests` requests run at once, those in flight included;
- the adapters of the batch, of requests that complete and of open leases fit the device tier
  together, each counted once however many requests share it;
- the adapters of all requests in progress fit the host tier, where they are pinned. (Pins that a
  user sets are not seen here: adding a request may still find the host tier full.)

A request is *in progress* if it has started or owns KV blocks. One that finds no pages is skipped
and others may go, but after `max_skip_passes` passes in which one with an adapter that was not in
progress went ahead of it, no more such requests go ahead. The policies differ in KV blocks and in
order:

| policy                | order                                 | KV blocks                        |
|-----------------------|---------------------------------------|----------------------------------|
| `max_requests`        | in progress, then the rest, as listed | not looked at                    |
| `guaranteed_no_evict` | the same                              | to completion; a misfit ends it  |
| `static_batch`        | the same, but the rest only when      | to completion; a misfit ends it  |
|                       | nobody in progress is left            |                                  |
| `max_utilization`     | higher priority first, then as listed | next step; later ones are paused |

The first three take what is in progress without asking: admission has left room for it. In
`max_utilization` a request that finds no blocks gets those of requests of lower precedence, the
lowest first, if together they suffice; if they do not, nobody is paused, and of the requests behind
it only those that own blocks may go. Nobody is ever paused for pages: those of requests outside the
batch are evictable without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from pagedlora.arguments import check_choice, refuse_requests, to_integer
from pagedlora.errors import InvalidArgumentError
from pagedlora.scheduler.capacity_inputs import (
    BlockManager,
    Candidate,
    CapacityRequest,
    PageManager,
    tokens_of_next_step,
    tokens_to_completion,
)
from pagedlora.scheduler.capacity_pass import CapacityPass, SkipBound

CapacityPolicy = Literal["max_requests", "guaranteed_no_evict", "max_utilization", "static_batch"]

RequestT = TypeVar("RequestT", bound=CapacityRequest)


@dataclass(frozen=True)
class CapacityDecision(Generic[RequestT]):
    """What to do before the next step. The caller acts in this order.

    No request is in two of the three. Active requests in none of them stay as they are: they keep
    their blocks and their adapter, and are asked about again in the next pass.

    Attributes:
        errors: Request id to why the request can never be scheduled: what `determine_num_pages`
            raised, `AdapterTooLargeError`, or `CapacityError` for blocks. Release what it holds
            (`kv.free_resources(r)`, `peft.mark_request_done(r)`) and take it off the list.
        paused: In list order. For each first take its blocks (`kv.free_resources(r)`, with
            `num_computed_tokens` set back to 0, or move them elsewhere), then, if it has started
            and has an adapter, `peft.mark_request_done(r, pause=True)`. It stays in the list.
        scheduled: In list order. For each allocate blocks,
            `kv.try_allocate(r, scheduler.tokens_to_allocate(r))`, which succeeds once the paused
            ones have given theirs back; then `peft.add_request_peft(r)` if it has an adapter and
            was not added since it arrived or was paused. If that raises `LoraCacheFullError`, free
            the blocks again and leave the request out of this step.
    """

    scheduled: list[RequestT]
    paused: list[RequestT]
    errors: Mapping[int, Exception]


class CapacityScheduler:
    """Chooses requests by the rules of this module. Not thread-safe.

    From pass to pass it remembers only which waiting requests were overtaken, and how often.
    """

    def __init__(
        self,
        policy: CapacityPolicy,
        max_num_requests: int,
        kv_cache_manager: BlockManager | None,
        peft_cache_manager: PageManager | None = None,
        *,
        max_skip_passes: int = 8,
    ) -> None:
        """Reads nothing yet.

        Args:
            policy: See the module.
            max_num_requests: Requests that run at once, at least 1.
            kv_cache_manager: Tells blocks; may be None with `max_requests`, which never asks it.
            peft_cache_manager: Tells pages; None: adapters are not looked at.
            max_skip_passes: Passes in which a request that waits for pages may be overtaken.

        Raises:
            InvalidArgumentError: An unknown policy, a number out of range, or no KV manager.
        """
        check_choice(policy, get_args(CapacityPolicy), "policy")
        to_integer(max_num_requests, "max_num_requests", 1)
        to_integer(max_skip_passes, "max_skip_passes", 0)
        if kv_cache_manager is None and policy != "max_requests":
            raise InvalidArgumentError(f"policy {policy} needs a kv_cache_manager")
        self._policy = policy
        self._max_num_requests = max_num_requests
        self._kv = None if policy == "max_requests" else kv_cache_manager
        self._peft = peft_cache_manager
        self._skip_bound = SkipBound(max_skip_passes)

    def schedule_request(
        self, active_requests: Sequence[RequestT], inflight_request_ids: Collection[int] = ()
    ) -> CapacityDecision[RequestT]:
        """Decides about the next step. Call it once per step: it counts who is overtaken.

        Close the leases of batches that are over before, or their adapters count as in use.

        Args:
            active_requests: All requests that wait, run or complete, in the order in which they
                are to be served: usually higher priority first, then arrival. Those that have not
                started may be left out, for instance while their adapter loads, or far down a long
                queue: the time of a pass grows with the list.
            inflight_request_ids: Requests whose last step is still running. They are neither
                scheduled nor paused, and keep what they hold.

        Returns:
            What to do now. No active request is missed by an error of another one.

        Raises:
            InvalidArgumentError: A request's state is unknown.
        """
        try:
            run = CapacityPass(
                active_requests, inflight_request_ids, self._kv, self._peft, self._skip_bound
            )
        except (AttributeError, TypeError) as error:
            refuse_requests(active_requests, "active_requests", error, ("request_id", "state"))
        if self._policy == "max_utilization":
            self._walk_by_precedence(run)
        else:
            self._walk_without_eviction(run)
        run.end()

        def in_list_order(candidates: Sequence[Candidate]) -> list[RequestT]:
            return [active_requests[p] for p in sorted(c.position for c in candidates)]

        return CapacityDecision(
            in_list_order(run.scheduled), in_list_order(run.paused), dict(run.errors)
        )

    def tokens_to_allocate(self, request: CapacityRequest) -> int:
        """Tokens in all for which blocks were counted when the request was scheduled.

        Those of its next step in `max_utilization`, else all that it can ever have; these need
        not be allocated at once.
        """
        if self._policy == "max_utilization":
            return tokens_of_next_step(request)
        return tokens_to_completion(request)

    def _is_full(self, run: CapacityPass) -> bool:
        return len(run.scheduled) + len(run.in_flight) >= self._max_num_requests

    def _missing_blocks(self, run: CapacityPass, candidate: Candidate) -> int:
        if self._kv is None:
            return 0
        return run.missing_blocks(candidate, self.tokens_to_allocate(candidate.request))

    def _walk_without_eviction(self, run: CapacityPass) -> None:
        """Takes what is in progress, then whoever can run to its end beside it."""
        for candidate in run.in_flight:
            run.free_blocks -= self._missing_blocks(run, candidate)
        for candidate in run.candidates:
            if self._is_full(run):
                return
            if candidate.in_progress and not run.refuses(candidate):
                run.take(candidate, self._missing_blocks(run, candidate))
        if self._policy == "static_batch" and (run.scheduled or run.in_flight):
            return
        for candidate in run.candidates:
            if self._is_full(run):
                return
            if candidate.in_progress or run.refuses(candidate):
                continue
            blocks = self._missing_blocks(run, candidate)
            if blocks > run.free_blocks:
                return  # those behind must not take the blocks that it waits for
            if not run.skips_for_pages(candidate):
                run.take(candidate, blocks)

    def _walk_by_precedence(self, run: CapacityPass) -> None:
        """Takes what fits the next step; lower precedence gives its blocks to higher."""
        order = sorted(run.candidates, key=lambda c: -int(getattr(c.request, "priority", 0)))
        yielding = [candidate for candidate in order if candidate.held_blocks > 0]
        stopped = False
        for candidate in order:
            if self._is_full(run):
                return
            if yielding and yielding[0] is candidate:
                del yielding[0]  # what is left has lower precedence
            if candidate.is_settled or (stopped and candidate.held_blocks == 0):
                continue
            if run.refuses(candidate):
                continue
            blocks = self._missing_blocks(run, candidate)
            victims = _lowest_that_free(blocks - run.free_blocks, yielding)
            if victims is None:
                stopped = True
            elif not run.skips_for_pages(candidate):
                run.pause(victims)
                run.take(candidate, blocks)


def _lowest_that_free(blocks: int, yielding: Sequence[Candidate]) -> list[Candidate] | None:
    """The candidates at the end that own so many blocks together; None if all of them do not."""
    victims: list[Candidate] = []
    for candidate in reversed(yielding):
        if blocks <= 0:
            break
        if not candidate.is_settled:
            victims.append(candidate)
            blocks -= candidate.held_blocks
    return victims if blocks <= 0 else None
