"""Random walks over the cache, compared with `PeftModel` after every step."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.adapters import (
    WEIGHTS_FILE,
    adapter_config,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import add_and_wait, build_cache, check_pages
from tests.support.peft_model import PeftModel, Tier

from pagedlora import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterSourceChangedError,
    AdapterTooLargeError,
    AdapterWeights,
    LlmRequest,
    LoraCacheFullError,
    PagedLoraError,
    PeftTaskNotCachedError,
    RequestConflictError,
)

SHAPES = {"q_proj": (24, 40), "down_proj": (56, 24)}
HOST_PAGES, DEVICE_PAGES, PAGE_BYTES = 32, 24, 256
RANKS = (1, 4, 9, 16, 22)  # the last one fits the host tier but not the device tier
UNKNOWN_TASK = 77

requests = st.integers(0, 6)
seeds = st.integers(1, 3)
picks = st.integers(0, 8)
tiers = st.sampled_from(("host", "device"))


# What a load that was begun may end with.
LOAD_ERRORS = (AdapterFormatError, AdapterNotFoundError, AdapterSourceChangedError)


class PeftCacheMachine(RuleBasedStateMachine):
    """The cache under test beside its model."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="pagedlora-machine-"))
        self.cache = build_cache(
            torch.float16,
            shapes=SHAPES,
            num_layers=1,
            max_lora_rank=max(RANKS),
            host_pages=HOST_PAGES,
            device_pages=DEVICE_PAGES,
            page_bytes=PAGE_BYTES,
        )
        self.peft = self.cache.peft
        self.model = PeftModel({"host": HOST_PAGES, "device": DEVICE_PAGES})
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        self.paths: dict[int, Path] = {}
        self.broken: dict[int, type[PagedLoraError]] = {}
        self.verified: dict[Tier, set[int]] = {"host": set(), "device": set()}
        self.lease = None

    def teardown(self) -> None:
        for tier in ("host", "device"):
            for task in self.model.resident[tier]:
                self.check_content(task, tier)
        self.peft.close()
        check_pages(self.peft)
        shutil.rmtree(self.directory)

    # ---- adapters ------------------------------------------------------------------------------

    @initialize()
    def start_with_a_batch(self) -> None:
        for rank in (9, 4, 16, 9, 4, 16):
            self.register(rank=rank, poisoned=False)
        for request in (0, 1):
            self.add_registered(request=request, pick=request)
        self.ensure(batch=[0, 1], reset=False)

    @precondition(lambda self: len(self.paths) < 9)
    @rule(rank=st.sampled_from(RANKS), poisoned=st.sampled_from((False,) * 5 + (True,)))
    def register(self, rank: int, poisoned: bool) -> None:
        number = len(self.paths)
        tensors = self.make_tensors(rank, seed=100 + number)
        if poisoned:  # found out in the middle of the load, after victims were displaced
            tensors[max(tensors)].view(-1)[-1] = 1e6
        path = write_adapter(self.directory / str(number), tensors)
        info = self.cache.adapters.register(str(number), path)
        self.tensors[info.task_id] = tensors
        self.paths[info.task_id] = path
        self.model.pages[info.task_id] = info.num_pages
        if poisoned:
            self.broken[info.task_id] = AdapterFormatError

    @rule(
        request=requests,
        pick=picks,
        how=st.sampled_from(("truncate", "rewrite", "replace", "take away", "take away")),
    )
    def break_source_and_ask_for_it(self, request: int, pick: int, how: str) -> None:
        self.break_source(pick, how)
        self.add_registered(request=request, pick=pick)

    def break_source(self, pick: int, how: str) -> None:
        task = self.registered(pick)
        path = self.paths[task]
        if not path.exists():
            path.with_suffix(".away").rename(path)
            return
        if how == "take away":  # the directory, so that the file stays as it was registered
            path.rename(path.with_suffix(".away"))
            return
        self.broken[task] = AdapterSourceChangedError
        file = path / WEIGHTS_FILE
        if how == "truncate":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "rewrite":
            file.write_bytes(file.read_bytes()[:-2] + b"\0\0")
        else:
            shutil.copy(file, path / "new")
            (path / "new").rename(file)

    # ---- requests ------------------------------------------------------------------------------

    @rule(request=requests, pick=picks)
    def add_registered(self, request: int, pick: int) -> None:
        task = self.registered(pick)
        self.add(request, task, self.expected_error(request, task, None), None)

    @rule(
        request=requests,
        task=st.sampled_from((0, 1, 2)),
        seed=seeds,
        rank=st.sampled_from((1, 4, 9)),
        send=st.sampled_from((True, True, False)),
    )
    def add_carried(self, request: int, task: int, seed: int, rank: int, send: bool) -> None:
        weights = None
        if send:
            tensors = self.make_tensors(rank, seed)
            weights = AdapterWeights.from_tensors(tensors, adapter_config(tensors))
        error = self.expected_error(request, task, weights, content=1000 * rank + seed)
        self.add(request, task, error, weights, content=1000 * rank + seed)

    @rule(request=requests, pick=picks, unknown=st.booleans())
    def add_in_vain(self, request: int, pick: int, unknown: bool) -> None:
        """An unknown task, or weights for a registered one."""
        live = request in self.model.task_of
        if unknown:
            error = RequestConflictError if live else PeftTaskNotCachedError
            self.add(request, UNKNOWN_TASK, error)
            return
        tensors = self.make_tensors(1, 1)
        weights = AdapterWeights.from_tensors(tensors, adapter_config(tensors))
        self.add(request, self.registered(pick), RequestConflictError, weights)

    @rule(request=requests, pause=st.booleans())
    def mark_done(self, request: int, pause: bool) -> None:
        self.peft.mark_request_done(LlmRequest(request), pause)
        self.model.done(request, pause)

    # ---- batches -------------------------------------------------------------------------------

    @rule(
        batch=st.lists(requests, min_size=1, max_size=6),
        reset=st.sampled_from((False, False, True)),
    )
    def ensure(self, batch: list[int], reset: bool) -> None:
        model = self.model
        model.leased = set()
        if reset:
            model.demoted = set(model.resident["device"])
        owners = {r for owners in model.active.values() for r in owners}
        tasks = {model.task_of[r] for r in batch if r in owners}
        absent = tasks - model.resident["device"]
        needed = sum(model.pages[task] for task in absent)
        llm_requests = [LlmRequest(r, lora_task_id=model.task_of.get(r, 5)) for r in batch]
        if not model.fits("device", needed, keep=tasks):
            event("ensure: does not fit")
            with pytest.raises(LoraCacheFullError):
                self.peft.ensure_batch(llm_requests, [], reset)
            assert self.residents("device") == model.resident["device"]
            self.lease = None
            return
        free = self.peft.free_pages("device")
        event(f"ensure: {'evicts' if needed > free else 'copies' if needed else 'has all'}")
        self.lease = self.peft.ensure_batch(llm_requests, [], reset)
        model.settle("device", self.residents("device"), needed=needed, brought=tasks, keep=tasks)
        model.demoted -= tasks
        model.leased = tasks
        model.start(set(batch) & owners)
        assert set(self.lease) == {r for r in batch if r in owners}
        assert set(self.lease.errors) == set(batch) - owners

    @rule(reset=st.booleans())
    def close_lease(self, reset: bool) -> None:
        if reset:
            self.peft.reset_device_cache()
            self.model.demoted |= self.model.resident["device"] - self.model.leased
        if self.lease is not None:
            self.lease.close()
        self.model.leased = set()

    @rule(tier=tiers)
    def evict_unowned(self, tier: Tier) -> None:
        self.peft.evict_unowned(tier)
        model = self.model
        pinned = model.pinned(tier)
        kept = {task for task in model.resident[tier] if task in pinned or model.owned(task)}
        assert self.residents(tier) == kept
        model.resident[tier] = kept
        model.forget_lost()

    # ---- always --------------------------------------------------------------------------------

    @invariant()
    def owners_agree(self) -> None:
        check_pages(self.peft)
        assert self.peft.active_tasks == self.model.active
        assert self.peft.paused_tasks == self.model.paused
        for task in self.model.pages:
            assert self.peft.is_task_done(task) == (not self.model.owned(task))
            assert self.peft.is_task_done_device(task) == (task not in self.model.active)

    @invariant()
    def residency_and_pages_agree(self) -> None:
        for tier in ("host", "device"):
            assert self.residents(tier) == self.model.resident[tier]
            assert self.peft.resident_tasks(tier) == len(self.model.resident[tier])
            used = self.model.total[tier] - self.peft.free_pages(tier)
            assert used == self.model.used(tier)
        assert {t for t in self.model.pages if self.model.owned(t)} <= self.model.resident["host"]

    @invariant()
    def contents_are_right(self) -> None:
        """Of every new resident, and again and again of what is leased."""
        for tier in ("host", "device"):
            residents = self.model.resident[tier]
            leased = self.model.leased if tier == "device" else set()
            for task in residents - (self.verified[tier] - leased):
                self.check_content(task, tier)
            self.verified[tier] = set(residents)

    # ---- helpers -------------------------------------------------------------------------------

    def check_content(self, task: int, tier: Tier) -> None:
        expected = weights_of(self.tensors[task], torch.float16)
        assert_same_weights(self.peft.task_weights(task, tier), expected)

    def make_tensors(self, rank: int, seed: int) -> dict[str, torch.Tensor]:
        return adapter_tensors(self.cache.config.modules, rank, seed)

    def registered(self, pick: int) -> int:
        return list(self.paths)[pick % len(self.paths)]

    def residents(self, tier: Tier) -> set[int]:
        cached = self.peft.is_task_cached if tier == "host" else self.peft.is_task_cached_device
        return {task for task in (*self.paths, 0, 1, 2, UNKNOWN_TASK) if cached(task)}

    def expected_error(
        self, request: int, task: int, weights: AdapterWeights | None, content: int = 0
    ) -> type[PagedLoraError] | None:
        """What adding must raise, decided before the call."""
        model = self.model
        if model.task_of.get(request, task) != task:
            return RequestConflictError
        pages = model.pages.get(task)
        changed = weights is not None and model.carried.get(task) != content
        if weights is not None:
            pages = self.peft.determine_num_pages(LlmRequest(0, task, weights))
        if pages is None:
            return PeftTaskNotCachedError
        if pages > DEVICE_PAGES:
            return AdapterTooLargeError
        if changed and (model.owned(task) or task in model.leased):
            return RequestConflictError
        on_host, on_device = (
            not changed and task in model.resident[tier] for tier in ("host", "device")
        )
        if not on_host and not model.fits("host", pages):
            return LoraCacheFullError
        if on_host or on_device:
            return None
        if task in self.paths and not self.paths[task].exists():
            return AdapterNotFoundError
        return self.broken.get(task)

    def add(
        self,
        request: int,
        task: int,
        error: type[PagedLoraError] | None,
        weights: AdapterWeights | None = None,
        content: int = 0,
    ) -> None:
        model = self.model
        event(f"add: {error.__name__ if error else 'fine'}")
        llm_request = LlmRequest(request, task, weights)
        if error is None:
            self.replace_carried(task, weights, content)
        needed = 0
        claims = error is None or issubclass(error, LOAD_ERRORS)
        if claims and task not in model.resident["host"]:
            needed = self.peft.determine_num_pages(llm_request)
        if error is None:
            add_and_wait(self.peft, llm_request)
            model.add(request, task)
        else:
            with pytest.raises(error) as caught:
                add_and_wait(self.peft, llm_request)
            assert type(caught.value) is error
        brought = {task} if error is None else ()
        model.settle("host", self.residents("host"), needed=needed, brought=brought)

    def replace_carried(self, task: int, weights: AdapterWeights | None, content: int) -> None:
        """New weights under an id that nobody uses drop the old ones first."""
        if weights is None or self.model.carried.get(task) == content:
            return
        for tier in ("host", "device"):
            self.model.resident[tier].discard(task)
            self.verified[tier].discard(task)
        self.model.demoted.discard(task)
        self.model.carried[task] = content
        self.model.pages[task] = self.peft.determine_num_pages(LlmRequest(0, task, weights))
        self.tensors[task] = self.make_tensors(content // 1000, content % 1000)


TestPeftCacheMachine = PeftCacheMachine.TestCase
TestPeftCacheMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPeftCacheMachine.pytestmark = [pytest.mark.slow]
