"""A forked child has its parent's objects and none of its threads: it is told so, and harms nobody.

Each test forks in a script of its own, see tests/support/forked.py.
"""

from __future__ import annotations

import textwrap

import pytest
from tests.support.forked import run_script

pytestmark = pytest.mark.slow  # each makes processes that import torch

MANAGER = """
import gc, os, tempfile, threading
from pathlib import Path
import torch
from tests.support.adapters import adapter_config, adapter_tensors, write_adapter
from tests.support.cache_fixtures import fake_adapter, model_config
from tests.support.forked import in_child, refusal
from pagedlora import LlmRequest, LoraManager, LoraModelConfig, PeftCacheConfig, PeftCacheManager
from pagedlora import _core, attach

directory = Path(tempfile.mkdtemp())
config = model_config()
paths = {
    name: write_adapter(directory / name, adapter_tensors(config.modules, 4, seed))
    for seed, name in enumerate("ab")
}

def make_manager():
    tiers = {"host_cache_size": "32MiB", "device_cache_size": "32MiB"}  # faulted in by threads
    cache = PeftCacheManager(config, PeftCacheConfig(**tiers), device="cpu")
    return cache, LoraManager(config, cache, lora_dir=directory)

def use(cache, adapters, number=1):
    "Reads an adapter, computes nothing, and gives it back; a number that its weights give."
    request = LlmRequest(number)
    adapters.acquire("ab"[number % 2], request)
    cache.add_request_peft(request)
    lease = cache.ensure_batch([request], [])
    assert not lease.errors, lease.errors
    total = sum(float(m[0].sum()) for m in cache.task_weights(request.lora_task_id).values())
    lease.close()
    adapters.release(request)
    cache.check_invariants()
    return f"{total:.6f}"

cache, adapters = make_manager()
"""


def run(*scripts: str) -> list[str]:
    return run_script(MANAGER + "".join(map(textwrap.dedent, scripts)))


def test_every_call_that_needs_the_threads_or_locks_says_so_at_once() -> None:
    lines = run("""
    request, lost = LlmRequest(1), LlmRequest(2)
    adapters.acquire("b", request)
    cache.add_request_peft(request)
    lease = cache.ensure_batch([request], [])
    operator = _core.LoraOperator(config.dtype)
    core, task = cache.core, request.lora_task_id
    source = str(paths["a"])
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    layer_config = LoraModelConfig.from_module(layer, ["0"])
    layer_cache = PeftCacheManager(layer_config, PeftCacheConfig(device_cache_size="1MiB"))
    attached = attach(layer, layer_cache, LoraManager(layer_config, layer_cache))
    calls = {
        "add": lambda: cache.add_request_peft(request),
        "done": lambda: cache.mark_request_done(request),
        "free": lambda: cache.free_resources(request),
        "ensure": lambda: cache.ensure_batch([request], []),
        "state": lambda: cache.adapter_state(request),
        "error": lambda: cache.adapter_error(request),
        "poll": lambda: cache.poll(1e6),
        "prefetch": lambda: cache.prefetch([request]),
        "wait_idle": lambda: cache.wait_idle(1e6),
        "pin": lambda: cache.pin(task),
        "unpin": lambda: cache.unpin(task),
        "cached": lambda: cache.is_task_cached(task),
        "is done": lambda: cache.is_task_done(task),
        "active": lambda: cache.active_tasks,
        "pages": lambda: cache.determine_num_pages(request),
        "free pages": lambda: cache.free_pages("host"),
        "weights": lambda: cache.task_weights(task),
        "evict": lambda: cache.evict_unowned("host"),
        "reset": cache.reset_device_cache,
        "stats": lambda: cache.stats,
        "iteration": cache.get_and_reset_iteration_stats,
        "leases": cache.open_lease_tasks,
        "invariants": cache.check_invariants,
        "lease": lambda: lease[1],
        "batch": lambda: _core.LoraBatch(lease, [(1, 3)]),
        "rows": attached.rows([None]).__enter__,
        "register": lambda: adapters.register("c", source),
        "load": lambda: adapters.load("a"),
        "load as": lambda: adapters.load("c", source),
        "reload": lambda: adapters.reload("b", source),
        "unload": lambda: adapters.unload("b"),
        "acquire": lambda: adapters.acquire("b", lost),
        "release": lambda: adapters.release(request),
        "get": lambda: adapters.get("b"),
        "task": lambda: adapters.task_id("a"),
        "list": adapters.list,
        "names": lambda: adapters.names,
        "probe": lambda: adapters.probe(source),
        "salt": lambda: adapters.cache_salt("b"),
        "pin name": lambda: adapters.pin("b"),
    }
    def all_refused():
        wrong = []
        for name, call in calls.items():
            told = refusal(call)
            if f"another process (pid {os.getppid()})" not in told or "spawn" not in told:
                wrong.append((name, told))
        return f"{len(calls)} refused but for {wrong}, the lease is open: {lease.is_open}"
    print(in_child(all_refused))
    lease.close()
    """)
    assert lines == ["40 refused but for [], the lease is open: False"]


def test_closing_and_forgetting_is_harmless_whatever_was_held() -> None:
    """What another thread held when the child was made stays held there for ever."""
    lines = run("""
    def nothing(cache, adapters):
        pass
    def registry_lock(cache, adapters):
        def hold():
            with adapters._lock:
                held.set()
                go_on.wait()
        held = threading.Event()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
    def lease(cache, adapters):
        request = LlmRequest(5)
        adapters.acquire("b", request)
        cache.add_request_peft(request)
        return cache.ensure_batch([request], [])
    def load_and_who_waits_for_it(cache, adapters):
        late = fake_adapter(config)
        late.source.hold_reads()
        cache.core.add_request_peft(5, cache.core.register_task(late.plan))
        late.source.wait_for_reads(1)
        threading.Thread(target=cache.poll, args=(1e6,), daemon=True).start()

    go_on = threading.Event()
    right = use(cache, adapters)
    for hold in (nothing, registry_lock, lease, load_and_who_waits_for_it):
        cache, adapters = make_manager()
        use(cache, adapters)
        held = hold(cache, adapters)
        def forget():
            global cache, adapters, held
            cache.close()
            cache = adapters = held = None
            gc.collect()
            return "forgotten"
        print(in_child(forget))
        go_on.set()
        held = None
        assert use(cache, adapters, 3) == right
        go_on.clear()
    print(in_child(lambda: "left as it is"))
    """)
    assert lines == ["forgotten"] * 4 + ["left as it is"]


def test_a_child_works_with_what_it_makes_and_leaves_its_parent_alone() -> None:
    """Also the files that the parent made for itself, which it reads again after an eviction."""
    lines = run("""
    tensors = adapter_tensors(config.modules, 4, 7)
    adapters.load_from_tensors("given", adapter_config(tensors), tensors)
    answers = [use(cache, adapters, number) for number in (1, 2)]
    def work():
        mine = make_manager()
        same = [use(*mine, number) for number in (1, 2)] == answers
        grandchild = in_child(lambda: mine[1].names), in_child(lambda: use(*make_manager()))
        mine[0].close()
        return same, "another process" in grandchild[0], grandchild[1] == answers[0]
    print(in_child(work))
    for tier in ("device", "host"):
        cache.evict_unowned(tier)
    print(adapters.load("given").tiers, [use(cache, adapters, n) for n in (1, 2)] == answers)
    """)
    assert lines == ["(True, True, True)", "('host',) True"]


ENGINE = """
import gc, os, tempfile
from pathlib import Path
from tests.support.forked import in_child, refusal
from tests.support.llm_fixtures import GREEDY, save_adapter, tokens_of
from tests.support.tiny_models import build_tiny_model
from pagedlora import LLM, KvCacheConfig, LoraConfig, PeftCacheConfig, SamplingParams

directory = Path(tempfile.mkdtemp())
for name in "ab":
    save_adapter(directory / name, "llama", 4, ["q_proj"], seed=ord(name))
model = build_tiny_model("llama")

def make_engine():
    return LLM(
        model,
        lora_config=LoraConfig(lora_dir=directory),
        peft_cache_config=PeftCacheConfig(host_cache_size="64MiB", device_cache_size="32MiB"),
        kv_cache_config=KvCacheConfig(num_blocks=32, block_size=4, host_blocks=4),
    )

def answers(llm):
    return tokens_of(llm.generate([[1, 2, 3]] * 3, GREEDY, [None, "a", "b"]))

llm = make_engine()
right = answers(llm)
"""


def run_engine(script: str) -> list[str]:
    return run_script(ENGINE + textwrap.dedent(script))


def test_an_engine_in_a_child_says_so_and_closes() -> None:
    lines = run_engine("""
    calls = (
        lambda: llm.generate([[1]]),
        lambda: llm.generate_async([1]),
        lambda: llm.load_lora("c", directory / "a"),
        llm.list_loras,
        lambda: llm.unload_lora("a"),
        lambda: llm.abort(1),
        lambda: llm.lora_manager,
        llm.__enter__,
    )
    message = f"this LLM was made in another process (pid {os.getpid()})"
    def close():
        return [refusal(call).startswith(message) for call in calls], llm.close()
    def forget():
        global llm
        llm = None
        gc.collect()
        return "forgotten"
    print(in_child(close))
    print(in_child(forget), in_child(lambda: "left as it is"), answers(llm) == right)
    """)
    assert lines == [str(([True] * 8, None)), "forgotten left as it is True"]


def test_a_child_makes_an_engine_of_its_own_over_the_same_model() -> None:
    """With the inherited one closed or not; the parent's goes on meanwhile."""
    lines = run_engine("""
    def own(close_first):
        if close_first:
            llm.close()
        with make_engine() as mine:
            same = answers(mine) == right
        llm.close()
        return same, model.config._attn_implementation
    print(in_child(lambda: own(True)), in_child(lambda: own(False)), answers(llm) == right)
    llm.close()
    print(model.config._attn_implementation)
    """)
    assert lines == ["(True, 'sdpa') (True, 'sdpa') True", "sdpa"]


def test_a_stream_stays_with_the_process_that_answers_it() -> None:
    lines = run_engine("""
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    stream = llm.generate_async([1, 2, 3], long, "a")
    items = iter(stream)
    next(items)
    calls = (stream.result, lambda: next(items), lambda: list(stream), stream.abort)
    def close():
        told = ["was made in another process" in refusal(call) for call in calls]
        return told, llm.close()
    print(in_child(close), in_child(lambda: "left as it is"))
    print(len(stream.result().outputs[0].token_ids))
    """)
    assert lines == [f"{([True] * 4, None)} left as it is", "50"]
