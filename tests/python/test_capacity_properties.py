"""Random requests under each policy: budgets hold, nobody is left out in vain, all finish."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.whole_request_engine import POLICIES, Engine, Request

from pagedlora import CapacityDecision

UNBOUNDED = 10**9

requests = st.builds(
    Request,
    st.just(0),
    st.none() | st.integers(0, 4),
    prompt=st.integers(1, 10),
    max_tokens=st.integers(1, 8),
    priority=st.integers(0, 2),
)
arrivals = st.lists(
    st.tuples(requests, st.integers(0, 3), st.sampled_from([0, 0, 0, 1, 2])), max_size=20
)


@st.composite
def engines(draw: st.DrawFn, max_skip_passes: int) -> Engine:
    """Every request can run alone: at most 5 blocks of 4 tokens and 6 pages."""
    return Engine(
        draw(st.sampled_from(POLICIES)),
        {task: draw(st.integers(1, 6)) for task in range(5)},
        device_pages=draw(st.integers(6, 9)),
        host_pages=draw(st.sampled_from([6, 8, 12, UNBOUNDED])),
        blocks=draw(st.integers(5, 16)),
        max_num_requests=draw(st.integers(1, 5)),
        max_skip_passes=max_skip_passes,
        overlaps=draw(st.booleans()),
    )


def run_arrivals(engine: Engine, arriving: list[tuple[Request, int, int]]) -> None:
    """Lets requests arrive at or near the end of the list, steps apart, and runs them all."""
    for number, (request, steps, behind) in enumerate(arriving):
        request.request_id = number
        engine.active.insert(max(len(engine.active) - behind, 0), request)
        for _ in range(steps):
            engine.step()
            engine.kv.check_invariants()
    engine.run()
    assert engine.kv.num_used_blocks == 0
    assert not engine.errors
    assert all(len(r.output_token_ids) == r.max_tokens for r, _, _ in arriving)


@settings(deadline=None, max_examples=150)
@given(engines(max_skip_passes=2), arrivals)
def test_budgets_hold_in_every_pass_and_every_request_finishes(
    engine: Engine, arriving: list[tuple[Request, int, int]]
) -> None:
    def some_request_advances(decision: CapacityDecision[Request]) -> None:
        holding = engine.peft.leased or any(
            r.state == "generation_to_complete" for r in engine.active
        )
        assert decision.scheduled or holding or not engine.active

    engine.before_acting = some_request_advances
    run_arrivals(engine, arriving)


@settings(deadline=None, max_examples=150)
@given(engines(max_skip_passes=UNBOUNDED), arrivals)
def test_nobody_is_left_out_or_paused_in_vain(
    engine: Engine, arriving: list[tuple[Request, int, int]]
) -> None:
    engine.before_acting = lambda decision: check_those_left(engine, decision)
    run_arrivals(engine, arriving)


def check_those_left(engine: Engine, decision: CapacityDecision[Request]) -> None:
    """Finds a reason for every request that is left out, after all was handed out."""
    scheduled, paused = decision.scheduled, decision.paused
    free = engine.kv.num_free_blocks + sum(held(engine, r) for r in paused)
    free -= sum(missing(engine, r) for r in scheduled)
    eligible = [r for r in engine.active if r.state != "generation_to_complete"]
    if engine.policy == "max_utilization":
        eligible.sort(key=lambda r: -r.priority)
    check_pauses(engine, decision, eligible)
    if len(scheduled) == engine.max_num_requests:
        return
    is_batch_under_way = any(r.has_started for r in eligible)
    stopped = False
    for request in eligible:
        if request in scheduled or request in paused:
            continue
        if engine.policy == "static_batch" and is_batch_under_way:
            assert not request.has_started
            continue
        lacks_blocks = missing(engine, request) > free
        if not lacks_blocks and pages_fit(engine, decision, request):
            assert stopped, f"{request} was left out in vain"
            assert held(engine, request) == 0
        stopped |= lacks_blocks


def check_pauses(
    engine: Engine, decision: CapacityDecision[Request], by_precedence: list[Request]
) -> None:
    """Those paused own blocks, and somebody of higher precedence needs them."""
    if not decision.paused:
        return
    free = engine.kv.num_free_blocks
    growing = [r for r in decision.scheduled if missing(engine, r) > 0]
    assert sum(missing(engine, r) for r in growing) > free
    highest = min(by_precedence.index(r) for r in growing)
    for victim in decision.paused:
        assert held(engine, victim) > 0
        assert by_precedence.index(victim) > highest


def held(engine: Engine, request: Request) -> int:
    return len(engine.kv.block_table(request))


def missing(engine: Engine, request: Request) -> int:
    if engine.policy == "max_requests":
        return 0
    tokens = engine.scheduler.tokens_to_allocate(request)
    return max(0, engine.kv.blocks_needed(tokens) - held(engine, request))


def pages_fit(engine: Engine, decision: CapacityDecision[Request], request: Request) -> bool:
    """Whether the request's adapter fits both tiers beside all that they must hold."""
    if request.lora_task_id is None:
        return True
    completing = [r for r in engine.active if r.state == "generation_to_complete"]
    on_device = [*decision.scheduled, *completing, request]
    started = [r for r in engine.active if r.has_started]
    on_host = [*decision.scheduled, *started, request]
    return (
        engine.peft.sum_of(on_device, engine.peft.leased) <= engine.peft.max_device_pages
        and engine.peft.sum_of(on_host) <= engine.peft.max_host_pages
    )
