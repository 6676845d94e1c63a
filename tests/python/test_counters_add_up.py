"""Counters of a busy engine add up: to each other, to what the tiers hold, to what was asked."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.llm_fixtures import ATTENTION, save_adapter
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model

from pagedlora import LLM, KvCacheConfig, PeftCacheConfig, RequestOutput, SamplingParams
from pagedlora.config import SchedulerConfig

Policy = Literal["guaranteed_no_evict", "max_utilization"]
Answered = tuple[str | None, RequestOutput]

NUM_ADAPTERS = 10
PAGE_BYTES = 2048
KV_CACHES = {
    "guaranteed_no_evict": KvCacheConfig(num_blocks=120, block_size=4),
    "max_utilization": KvCacheConfig(num_blocks=20, block_size=4, host_blocks=8),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    chooser = random.Random(5)
    return {
        f"a{number}": save_adapter(
            root / f"a{number}",
            "llama",
            chooser.choice([1, 3, 8, 16]),
            chooser.choice([["q_proj", "v_proj"], ATTENTION]),
            seed=number,
        )
        for number in range(NUM_ADAPTERS)
    }


def open_engine(adapters: dict[str, Path], policy: Policy) -> LLM:
    """Room for about four adapters on the device and five in host."""
    model = build_tiny_model("llama")
    ample = PeftCacheConfig(host_cache_size=2**22, device_cache_size=2**22, page_size=PAGE_BYTES)
    with LLM(model, peft_cache_config=ample, kv_cache_config=KvCacheConfig(num_blocks=8)) as llm:
        sizes = sorted(llm.load_lora(name, path).bytes for name, path in adapters.items())
    llm = LLM(
        model,
        peft_cache_config=PeftCacheConfig(
            host_cache_size=sum(sizes[-5:]),
            device_cache_size=sum(sizes[-4:]),
            page_size=PAGE_BYTES,
        ),
        kv_cache_config=KV_CACHES[policy],
        scheduler_config=SchedulerConfig(policy=policy, max_batch_size=8, max_num_tokens=64),
        enable_stats=True,
    )
    for name, path in adapters.items():
        llm.load_lora(name, path)
    return llm


def ask(llm: LLM, names: list[str], chooser: random.Random) -> list[Answered]:
    """A wave of requests of any adapter or the base, and one for a name that nobody has."""
    users = [chooser.choice([*names, None]) for _ in range(chooser.randrange(5, 20))]
    users[0] = "nobody"
    prompts = [
        [chooser.randrange(VOCAB_SIZE) for _ in range(chooser.randrange(1, 12))] for _ in users
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=chooser.randrange(1, 30), ignore_eos=True)
        for _ in users
    ]
    return list(zip(users, llm.generate(prompts, params, users), strict=True))


def check_tiers(llm: LLM) -> None:
    """What was loaded and not evicted is there, and all that is there."""
    cache = llm.peft_cache_manager
    infos = llm.list_loras()
    for tier, counters, num_pages in (
        ("host", cache.stats.host, cache.max_host_pages),
        ("device", cache.stats.device, cache.max_device_pages),
    ):
        there = [info for info in infos if tier in info.tiers]
        assert counters.tasks_loaded - counters.tasks_evicted == len(there)
        assert cache.resident_tasks(tier) == len(there)
        assert num_pages - cache.free_pages(tier) == sum(info.num_pages for info in there)


def totals(steps: list[dict[str, Any]]) -> Counter[str]:
    """Sums of the steps' counters."""
    sums: Counter[str] = Counter()
    for step in steps:
        sums.update({name: value for name, value in step.items() if isinstance(value, int)})
        sums.update(step["peftCacheIterationStats"])
        kv = step["kvCacheStats"]
        assert kv["freeNumBlocks"] + kv["usedNumBlocks"] == kv["maxNumBlocks"]
        waiting = step["numQueuedRequests"] + step["numSuspendedRequests"]
        assert waiting <= step["numActiveRequests"]
    return sums


@pytest.mark.parametrize("policy", list(KV_CACHES))
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_the_counters_add_up(
    adapters: dict[str, Path], policy: Policy, seed: int
) -> None:
    chooser = random.Random(seed)
    steps: list[dict[str, Any]] = []
    outputs: list[Answered] = []
    with open_engine(adapters, policy) as llm:
        for _ in range(5):
            outputs += ask(llm, list(adapters), chooser)
            steps += llm.get_stats()
            check_tiers(llm)
        stats = llm.peft_cache_manager.stats
    assert [step["iter"] for step in steps] == list(range(len(steps)))
    sums = totals(steps)
    answered = [output for _, output in outputs if output.error is None]
    num_users = sum(user in adapters for user, _ in outputs)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in answered)
    gave_way = sums["numNewlySuspendedRequests"] + sums["numRecomputePausedRequests"]

    assert len(outputs) - len(answered) == 5, "only those of nobody failed"
    assert sums["numCompletedRequests"] == len(answered)
    assert sums["requestsTerminated"] == num_users
    assert sums["requestsPaused"] == sums["requestsResumed"] <= gave_way
    assert (gave_way > 0) == (policy == "max_utilization")
    if gave_way == 0:
        assert sums["numContextTokens"] == sum(len(o.prompt_token_ids) for o in answered)
        assert sums["numGenRequests"] == num_tokens - len(answered)
    assert stats.host.hits + stats.host.misses == num_users + sums["requestsResumed"]
    assert stats.host.misses == stats.host.tasks_loaded
    assert stats.device.misses <= stats.device.tasks_loaded
    assert stats.source_rereads <= stats.source_reads <= stats.host.tasks_loaded
    for tier, counters in (("Host", stats.host), ("Device", stats.device)):
        assert sums[f"tasksEvicted{tier}"] == counters.tasks_evicted > 0
        assert sums[f"pagesEvicted{tier}"] == counters.pages_evicted
    assert stats.failed_loads == 0
