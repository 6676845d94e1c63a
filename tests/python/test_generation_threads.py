"""Everything about names at once, from many threads: no wrong bytes, and nothing left behind."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tests.support.adapters import (
    Weights,
    adapter_tensors,
    assert_same_weights,
    weights_of,
    write_adapter,
)
from tests.support.cache_fixtures import Cache, check_pages
from tests.support.generations import is_known

from pagedlora import (
    AdapterNotFoundError,
    GenerationConflictError,
    InvalidArgumentError,
    LlmRequest,
    LoraCacheFullError,
    PeftTaskNotCachedError,
)

NAMES = ("x", "y", "z")
NUM_CONTENTS = 4
NUM_THREADS = 8
SECONDS = 2.0


class Chaos:
    """Threads that do things to three names until time is up."""

    def __init__(self, cache: Cache, root: Path) -> None:
        self.cache = cache
        self.directories: list[Path] = []
        self.weights: list[Weights] = []
        for seed in range(NUM_CONTENTS):
            tensors = adapter_tensors(cache.config.modules, 2, seed)
            self.weights.append(weights_of(tensors, torch.float32))
            self.directories += [write_adapter(root / f"{seed}{c}", tensors) for c in "ab"]
        probe = [cache.adapters.load("probe", d).generation for d in self.directories[:1]]
        cache.adapters.unload("probe", timeout_s=0)
        self.content_of: dict[str | None, int] = {probe[0]: 0}
        for seed in range(1, NUM_CONTENTS):
            info = cache.adapters.load("probe", self.directories[2 * seed])
            self.content_of[info.generation] = seed
            cache.adapters.unload("probe", timeout_s=0)
        self.ids = iter(range(10**9))
        self.ids_lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.checked = 0
        self.end = time.monotonic() + SECONDS

    def run(self) -> None:
        threads = [threading.Thread(target=self.loop, args=(seed,)) for seed in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def loop(self, seed: int) -> None:
        dice = random.Random(seed)
        try:
            while time.monotonic() < self.end and not self.errors:
                dice.choice([self.load, self.unload, self.reload, self.pin, self.use, self.use])(
                    dice, dice.choice(NAMES)
                )
        except BaseException as error:
            self.errors.append(error)

    def load(self, dice: random.Random, name: str) -> None:
        with suppress(AdapterNotFoundError, InvalidArgumentError):
            self.cache.adapters.load(name, dice.choice(self.directories))

    def unload(self, dice: random.Random, name: str) -> None:
        with suppress(AdapterNotFoundError):
            self.cache.adapters.unload(name, timeout_s=5)

    def reload(self, dice: random.Random, name: str) -> None:
        with suppress(AdapterNotFoundError, GenerationConflictError):
            manager = self.cache.adapters
            expected = dice.choice([None, manager.get(name).generation])
            source = dice.choice(self.directories)
            manager.reload(name, source, expected_generation=expected)

    def pin(self, dice: random.Random, name: str) -> None:
        with suppress(AdapterNotFoundError):
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
        while peft.adapter_state(request) != "ready":
            assert peft.adapter_error(request) is None
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


def test_eight_threads_on_three_names(make_cache: Any, tmp_path: Path) -> None:
    cache = make_cache()
    chaos = Chaos(cache, tmp_path)
    chaos.run()
    manager, peft = cache.adapters, cache.peft
    assert chaos.checked > 20
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
