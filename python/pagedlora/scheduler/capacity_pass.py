"""One pass of the capacity scheduler: what is left of each budget, and what was decided so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pagedlora.errors import CapacityError
from pagedlora.scheduler.adapter_pages import AdapterPages
from pagedlora.scheduler.capacity_inputs import (
    BlockManager,
    Candidate,
    CapacityRequest,
    PageManager,
    Phase,
    candidate_at,
    phase_of,
    task_of,
    tokens_to_completion,
)


class SkipBound:
    """Counts in how many passes a request that waits for pages was overtaken.

    It was overtaken if it was the first that found no pages and a request behind it, with an
    adapter and not in progress, was scheduled. Only requests that are active and were not scheduled
    since are remembered.
    """

    def __init__(self, max_passes: int) -> None:
        """Starts with no request counted."""
        self._max_passes = max_passes
        self._passes: dict[int, int] = {}

    def is_reached(self, request: CapacityRequest) -> bool:
        """Whether nobody may overtake the request any more."""
        return self._passes.get(request.request_id, 0) >= self._max_passes

    def end_pass(
        self,
        overtaken: CapacityRequest | None,
        candidates: Iterable[Candidate],
        scheduled: Iterable[Candidate],
    ) -> None:
        """Counts a pass over these candidates that scheduled some of them, the overtaken not."""
        if overtaken is not None:
            count = self._passes.get(overtaken.request_id, 0)
            self._passes[overtaken.request_id] = count + 1
        if self._passes:
            left = {c.request.request_id for c in candidates}
            left -= {c.request.request_id for c in scheduled}
            self._passes = {key: n for key, n in self._passes.items() if key in left}


class CapacityPass:
    """The budgets of one pass.

    `free_blocks` and the page budgets already lack what is held by requests that are in flight
    or complete. The policies walk `candidates`, and call for each, in this order: `refuses`,
    `skips_for_pages`, `take`.
    """

    def __init__(
        self,
        active_requests: Sequence[CapacityRequest],
        inflight_request_ids: Collection[int],
        kv: BlockManager | None,
        peft: PageManager | None,
        skip_bound: SkipBound,
    ) -> None:
        """Looks at every active request once.

        Args:
            active_requests: As given to the scheduler.
            inflight_request_ids: Likewise.
            kv: None if blocks are not bounded.
            peft: None if pages are not bounded: then no adapter is looked at.
            skip_bound: What earlier passes did to those that wait for pages.
        """
        self.candidates: list[Candidate] = []
        self.in_flight: list[Candidate] = []
        self.scheduled: list[Candidate] = []
        self.paused: list[Candidate] = []
        self.errors: dict[int, Exception] = {}
        self.free_blocks = 0 if kv is None else kv.num_free_blocks
        self._kv = kv
        self._pages = None if peft is None else AdapterPages(peft)
        self._skip_bound = skip_bound
        self._first_skipped: CapacityRequest | None = None
        self._was_overtaken = False
        completing: list[Candidate] = []
        in_flight_ids = frozenset(inflight_request_ids)
        for position, request in enumerate(active_requests):
            phase = phase_of(request)
            if phase is Phase.ENDED:
                continue
            candidate = candidate_at(position, request, phase, kv)
            if phase is Phase.COMPLETING:
                completing.append(candidate)
            elif request.request_id in in_flight_ids:
                self.in_flight.append(candidate)
            else:
                self.candidates.append(candidate)
        if self._pages is not None:
            self._claim_what_is_held(self._pages, [*self.in_flight, *completing])

    def _claim_what_is_held(self, pages: AdapterPages, held: Sequence[Candidate]) -> None:
        """Claims pages that no decision of this pass can free."""
        for candidate in held:
            pages.claim(candidate.request)
        pages.claim_leases(candidate.request for candidate in self.candidates)
        if pages.bounds_host:
            for candidate in self.candidates:
                if candidate.in_progress:
                    pages.claim_host(candidate.request)

    def refuses(self, candidate: Candidate) -> bool:
        """Whether the request can never be scheduled; its error is then recorded."""
        error: Exception | None = self._never_fits_blocks(candidate)
        if error is None and self._pages is not None:
            error = self._pages.error_of(candidate.request)
        if error is None:
            return False
        self.errors[candidate.request.request_id] = error
        candidate.is_settled = True
        return True

    def skips_for_pages(self, candidate: Candidate) -> bool:
        """Whether the request must be passed over for want of pages.

        Once the first such request was overtaken too often, none behind it that is not in
        progress and has an adapter may go.
        """
        if self._pages is None or task_of(candidate.request) is None:
            return False
        waiting = self._first_skipped
        if waiting is None:
            if self._pages.fits(candidate.request):
                return False
            self._first_skipped = candidate.request
            return True
        if not candidate.in_progress and self._skip_bound.is_reached(waiting):
            return True
        return not self._pages.fits(candidate.request)

    def take(self, candidate: Candidate, blocks: int) -> None:
        """Schedules the request and takes so many blocks, which it does not own yet, for it."""
        self.scheduled.append(candidate)
        candidate.is_settled = True
        self.free_blocks -= blocks
        if self._pages is None:
            return
        self._pages.claim(candidate.request)
        if self._first_skipped is not None and not candidate.in_progress:
            self._was_overtaken |= task_of(candidate.request) is not None

    def pause(self, victims: Iterable[Candidate]) -> None:
        """Takes the blocks of these candidates, which have not been scheduled in this pass."""
        for victim in victims:
            self.paused.append(victim)
            victim.is_settled = True
            self.free_blocks += victim.held_blocks

    def end(self) -> None:
        """Tells the skip bound what this pass did."""
        overtaken = self._first_skipped if self._was_overtaken else None
        self._skip_bound.end_pass(overtaken, self.candidates, self.scheduled)

    def missing_blocks(self, candidate: Candidate, num_tokens: int) -> int:
        """Blocks that the request lacks to hold so many tokens in all."""
        if self._kv is None:
            return 0
        return max(0, self._kv.blocks_needed(num_tokens) - candidate.held_blocks)

    def _never_fits_blocks(self, candidate: Candidate) -> CapacityError | None:
        if self._kv is None:
            return None
        request = candidate.request
        tokens = tokens_to_completion(request)
        needed, total = self._kv.blocks_needed(tokens), self._kv.num_blocks
        if needed <= total:
            return None
        return CapacityError(
            f"request {request.request_id} has {request.num_prompt_tokens} prompt tokens and "
            f"max_tokens {request.max_tokens}: {tokens} tokens need {needed} KV blocks of "
            f"{self._kv.block_size} tokens, but there are {total}; lower max_tokens or give the "
            "KV cache more blocks"
        )
