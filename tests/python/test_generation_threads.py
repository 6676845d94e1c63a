"""Everything about names at once, from many threads: no wrong bytes, and nothing left behind."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.adapters import (
    Weights,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import PATIENCE_S, Cache, Call, check_pages
from tests.support.generations import is_known

from pagedlora import (
    AdapterInUseError,
    AdapterNotFoundError,
    GenerationConflictError,
    InvalidArgumentError,
    LlmRequest,
    LoraCacheFullError,
    PeftTaskNotCachedError,
)
from pagedlora.registry.content import AdapterContent
from pagedlora.registry.generations import Generation
from pagedlora.registry.reload import Reloader

LONG_RUN_S = float(os.environ.get("PAGEDLORA_STRESS_SECONDS", "0"))
"""How long each run goes on beyond its number of operations."""


class Size(NamedTuple):
    """Of a run: how many names of how many contents, and who does how much with them."""

    num_names: int
    num_contents: int
    num_threads: int
    num_operations: int


FEW = Size(num_names=3, num_contents=4, num_threads=8, num_operations=600)
MANY = Size(num_names=20, num_contents=10, num_threads=32, num_operations=150)
MANY_FEWER_TIMES = MANY._replace(num_operations=30)
PAGES_OF_SIX = 6 * 9
"""Room for six of the adapters."""


class Chaos:
    """Threads that do things to names: each so many, and until time is up."""

    def __init__(self, cache: Cache, root: Path, size: Size) -> None:
        self.cache = cache
        self.size = size
        self.names = [f"name {number}" for number in range(size.num_names)]
        self.directories: list[Path] = []
        self.weights: list[Weights] = []
        for seed in range(size.num_contents):
            tensors = adapter_tensors(cache.config.modules, 2, seed)
            self.weights.append(weights_of(tensors, torch.float32))
            self.directories += [write_adapter(root / f"{seed}{c}", tensors) for c in "ab"]
        probe = [cache.adapters.load("probe", d).generation for d in self.directories[:1]]
        cache.adapters.unload("probe", timeout_s=0)
        self.content_of: dict[str | None, int] = {probe[0]: 0}
        for seed in range(1, size.num_contents):
            info = cache.adapters.load("probe", self.directories[2 * seed])
            self.content_of[info.generation] = seed
            cache.adapters.unload("probe", timeout_s=0)
        self.ids = iter(range(10**9))
        self.ids_lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.checked = 0
        self.end = time.monotonic() + LONG_RUN_S

    def run(self) -> None:
        seeds = range(self.size.num_threads)
        threads = [threading.Thread(target=self.loop, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120 + LONG_RUN_S)
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def loop(self, seed: int) -> None:
        dice = random.Random(seed)
        try:
            for count in itertools.count():
                if self.errors or (
                    count >= self.size.num_operations and time.monotonic() >= self.end
                ):
                    return
                dice.choice([self.load, self.unload, self.reload, self.pin, self.use, self.use])(
                    dice, dice.choice(self.names)
                )
        except BaseException as error:
            self.errors.append(error)

    def load(self, dice: random.Random, name: str) -> None:
        with suppress(AdapterNotFoundError, InvalidArgumentError, LoraCacheFullError):
            self.cache.adapters.load(name, dice.choice(self.directories))

    def unload(self, dice: random.Random, name: str) -> None:
        with suppress(AdapterNotFoundError, AdapterInUseError):
            self.cache.adapters.unload(name, timeout_s=dice.choice([0.0, 5.0]))

    def reload(self, dice: random.Random, name: str) -> None:
        with suppress(*RELOAD_ERRORS):
            manager = self.cache.adapters
            expected = dice.choice([None, manager.get(name).generation])
            source = dice.choice(self.directories)
            manager.reload(name, source, expected_generation=expected)

    def pin(self, dice: random.Random, name: str) -> None:
        with suppress(AdapterNotFoundError, LoraCacheFullError):
            self.cache.adapters.pin(name)
            with suppress(AdapterNotFoundError, InvalidArgumentError):  # unloaded with its pins
                self.cache.adapters.unpin(name)

    def use(self, dice: random.Random, name: str) -> None:
        manager, peft = self.cache.adapters, self.cache.peft
        with self.ids_lock:
            request = LlmRequest(next(self.ids), keeps_adapter=dice.random() < 0.5)
        try:
            manager.acquire(name, request)
        except AdapterNotFoundError:
            return
        try:
            self.add_and_read(request)
        finally:
            peft.mark_request_done(request)
            manager.release(request)

    def add_and_read(self, request: LlmRequest) -> None:
        """What an engine does; a reload may move the request before it is in."""
        peft = self.cache.peft
        deadline = time.monotonic() + PATIENCE_S
        while peft.adapter_state(request) != "ready":
            assert peft.adapter_error(request) is None
            assert time.monotonic() < deadline, (
                request,
                is_known(self.cache, request.lora_task_id),
            )
            if peft.adapter_state(request) == "waiting":
                with suppress(PeftTaskNotCachedError, LoraCacheFullError):
                    peft.add_request_peft(request)
            peft.core.wait_idle(0.01)
        request.num_computed_tokens = 1  # started: from here on it is not moved
        task_id: Any = request.lora_task_id
        with suppress(PeftTaskNotCachedError):  # it was moved in the very moment
            weights = peft.task_weights(task_id, "host")
            # Which content a task has is what its bytes say; all of one task are of one content.
            first = next(iter(self.weights[0]))
            matches = [
                content
                for content, expected in enumerate(self.weights)
                if torch.equal(expected[first][0], weights[first][0])
            ]
            assert len(matches) == 1
            assert_same_weights(weights, self.weights[matches[0]])
            digests = {
                info.generation
                for info in (*self.cache.adapters.list(), *self.cache.adapters.retired())
                if info.task_id == task_id
            } - {None}
            assert {self.content_of[digest] for digest in digests} <= {matches[0]}
            self.checked += 1


RELOAD_ERRORS = (
    AdapterNotFoundError,
    AdapterInUseError,  # as many generations are retired as may be
    GenerationConflictError,
    LoraCacheFullError,
)


RUNS = {
    "few names": (FEW, {}),
    "many names": (MANY, {}),
    "little room": (MANY_FEWER_TIMES, {"host_pages": PAGES_OF_SIX}),
}


@pytest.mark.parametrize(("size", "pages"), RUNS.values(), ids=RUNS)
def test_threads_do_everything_to_the_same_names(
    make_cache: Any, tmp_path: Path, size: Size, pages: dict[str, int]
) -> None:
    """Promise 3: nothing is lost, and nobody reads the bytes of another content."""
    cache = make_cache(**pages)
    chaos = Chaos(cache, tmp_path, size)
    chaos.run()
    manager, peft = cache.adapters, cache.peft
    assert chaos.checked > 20
    if pages:
        assert peft.stats.host.tasks_evicted > size.num_contents
    check_pages(peft)
    assert (peft.active_tasks, peft.paused_tasks) == ({}, {})
    last_task = manager.register("last", chaos.directories[0]).task_id
    for info in manager.list():
        assert (info.owners, info.pinned) == (frozenset(), False)
        manager.unload(info.name, timeout_s=0)
    assert (manager.list(), manager.retired()) == ([], ())
    assert peft.resident_tasks("host") == peft.resident_tasks("device") == 0
    for task_id in range(2**32, last_task + 1):
        assert not is_known(cache, task_id)
    generations = manager._generations
    assert (generations._by_digest, generations._retired) == ({}, {})
    assert manager._names._uses == {}
    assert manager._loader._flights == {}


def test_threads_that_want_the_same_contents_read_each_once(
    make_cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 threads, 20 names, 5 contents: each file is hashed once, each content is loaded once."""
    cache = make_cache()
    manager = cache.adapters
    hashed: Counter[str] = Counter()
    digest = AdapterContent.digest

    def counted(content: AdapterContent, *args: Any) -> str:
        hashed[content.path] += 1
        return digest(content, *args)

    monkeypatch.setattr(AdapterContent, "digest", counted)
    directories = {
        f"name {number}": write_adapter(
            tmp_path / str(number), adapter_tensors(cache.config.modules, 2, number % 5)
        )
        for number in range(20)
    }
    everybody = threading.Barrier(32)

    for name in [*directories][::2]:
        manager.register(name, directories[name])

    def pin(name: str) -> None:
        manager.pin(name)
        manager.unpin(name)

    def want_all(seed: int) -> None:
        dice, names = random.Random(seed), [*directories]
        dice.shuffle(names)
        everybody.wait(60)
        for name in names:
            with suppress(AdapterNotFoundError):  # not registered yet
                dice.choice([pin, manager.load, manager.cache_salt])(name)
            manager.load(name, directories[name])

    calls = [Call(want_all, seed) for seed in range(32)]
    for call in calls:
        call.result()
    assert hashed == dict.fromkeys(map(str, directories.values()), 1)
    assert cache.peft.stats.source_reads == cache.peft.resident_tasks("host") == 5
    infos = manager.list()
    assert len({info.generation for info in infos}) == len({info.task_id for info in infos}) == 5
    assert len(infos) == 20


def test_names_whose_content_becomes_known_at_once_share_it(
    make_cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    find, everybody, waited = Reloader._find, threading.Barrier(8), set[int]()

    def find_together(reloader: Reloader, digest: str) -> Generation | None:
        found = find(reloader, digest)
        if threading.get_ident() not in waited:  # the first time nobody finds anything
            waited.add(threading.get_ident())
            assert found is None
            everybody.wait(60)
        return found

    monkeypatch.setattr(Reloader, "_find", find_together)
    tensors = adapter_tensors(cache.config.modules, 2, 1)
    directories = [write_adapter(tmp_path / str(number), tensors) for number in range(8)]
    for call in [Call(cache.adapters.load, each.name, each) for each in directories]:
        call.result()
    assert cache.peft.stats.source_reads == 1
    assert len({info.task_id for info in cache.adapters.list()}) == 1
