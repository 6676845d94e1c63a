"""Wrong types, ranges and sizes of arguments: a typed error with the value, nothing changed.

Hands everything public every kind of wrong value. What is refused must be a `PagedLoraError`, or
pydantic's error for a configuration; what is taken is left to other tests.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.support.cache_fixtures import Cache, build_cache
from tests.support.wrong_arguments import check_refusal

import pagedlora
from pagedlora import (
    AdapterWeights,
    AdmissionWindow,
    CapacityScheduler,
    Dtype,
    InvalidArgumentError,
    KvCacheConfig,
    KVCacheManager,
    KVCacheV2Scheduler,
    LlmRequest,
    LoraBatch,
    LoraConfig,
    LoraManager,
    LoraModelConfig,
    LoraOperator,
    LoRARequest,
    ModelWeights,
    PeftCacheConfig,
    PeftCacheManager,
    PeftTensors,
    RetainedAdapters,
    SamplingParams,
    SchedulerConfig,
    _core,
)

WRONG: dict[str, Any] = {
    "int": 3,
    "negative": -1,
    "huge": 2**70,
    "endless": 10**5000,
    "float": 1.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "none": None,
    "bytes": b"x",
    "empty": "",
    "text": "x",
    "surrogate": "x\ud800",
    "zero byte": "a\0b",
    "line end": "a\nb",
    "list": [],
    "dict": {},
    "list of none": [None],
    "object": object(),
    "array": np.array([1.5]),
    "tensor": torch.tensor([[1, 2]]),
    "function": lambda *_: 1,
    "class": dict,
    "request of text": SimpleNamespace(request_id="x", lora_task_id=1, lora_weights=None),
    "request of a list": SimpleNamespace(request_id=[], lora_task_id=1, lora_weights=None),
    "request -1": SimpleNamespace(request_id=-1, lora_task_id=1, lora_weights=None),
    "request 2^70": SimpleNamespace(request_id=2**70, lora_task_id=1, lora_weights=None),
    "task -1": SimpleNamespace(request_id=1, lora_task_id=-1, lora_weights=None),
    "task 2^64": SimpleNamespace(request_id=1, lora_task_id=2**64, lora_weights=None),
    "task of text": SimpleNamespace(request_id=1, lora_task_id="x", lora_weights=None),
    "weights of text": SimpleNamespace(request_id=1, lora_task_id=1, lora_weights="w"),
    "half a request": SimpleNamespace(request_id=1),
}
REQUEST = LlmRequest(7)
Call = Callable[[Any], object]


def peft_calls(cache: Cache) -> dict[str, Call]:
    """Everything that a `PeftCacheManager` is asked, with one wrong argument."""
    peft = cache.peft
    by_request = ("add_request_peft", "adapter_state", "adapter_error", "mark_request_done")
    by_request += ("free_resources", "determine_num_pages")
    by_task = ("pin", "unpin", "is_task_cached", "is_task_cached_device", "is_task_done")
    by_task += ("is_task_done_device", "task_weights")
    by_tier = ("evict_unowned", "free_pages", "resident_tasks")
    calls: dict[str, Call] = {
        name: getattr(peft, name) for name in (*by_request, *by_task, *by_tier)
    }
    return calls | {
        "config": lambda v: PeftCacheManager(cache.config, v),
        "device": lambda v: PeftCacheManager(cache.config, None, v),
        "clock": lambda v: PeftCacheManager(cache.config, None, clock=v),
        "prefetch": peft.prefetch,
        "prefetch one": lambda v: peft.prefetch([v]),
        "context": lambda v: peft.ensure_batch(v, []),
        "context of one": lambda v: peft.ensure_batch([v], []),
        "generation of one": lambda v: peft.ensure_batch_map_task_id([], [v]),
        "reset": lambda v: peft.ensure_batch([], [], v),
        "stream": lambda v: peft.ensure_batch([], [], stream=v),
        "pause": lambda v: peft.mark_request_done(REQUEST, v),
        "agree": lambda v: peft.poll(0, v),
        "agreed": lambda v: peft.poll(0, lambda _: v),
        "idle": peft.wait_idle,
        "tier": lambda v: peft.task_weights(1, v),
    }


def manager_calls(cache: Cache) -> dict[str, Call]:
    """The same of a `LoraManager`."""
    adapters, config = cache.adapters, cache.config
    by_name = ("unload", "pin", "unpin", "get", "task_id", "real_path", "cache_salt", "probe")
    by_name += ("resolve_source", "release", "is_adapter_in_cpu_cache")
    with_source = ("register", "load", "load_from_hf", "load_from_nemo", "reload")
    options = ("adapter_root", "lora_dir", "base_model_id", "base_weights", "fused_modules")
    options += ("strict", "allow_pickle", "check_values")
    calls: dict[str, Call] = {name: getattr(adapters, name) for name in by_name}
    calls |= {
        f"{name} name": lambda v, n=name: getattr(adapters, n)(v, "/no/such")
        for name in with_source
    }
    calls |= {
        f"{name} source": lambda v, n=name: getattr(adapters, n)("a", v) for name in with_source
    }
    calls |= {
        name: lambda v, option=name: LoraManager(config, cache.peft, **{option: v})
        for name in options
    }
    return calls | {
        "model_config": lambda v: LoraManager(v, cache.peft),
        "cache_manager": lambda v: LoraManager(config, v),
        "tensors": lambda v: adapters.load_from_tensors("a", {"r": 1}, v),
        "config": lambda v: adapters.load_from_tensors("a", v, {}),
        "acquire": lambda v: adapters.acquire(v, REQUEST),
        "acquire for": lambda v: adapters.acquire("a", v),
        "timeout": lambda v: adapters.load("a", "/no/such", timeout_s=v),
        "tenant": lambda v: adapters.cache_salt("a", v),
    }


def scheduler_calls(cache: Cache) -> dict[str, Call]:
    """KV blocks and schedulers."""
    kv = KVCacheManager(8, 4, num_host_blocks=4)
    v2 = {"max_batch_size": 4, "max_num_tokens": 16}
    by_request = ("confirm_resume", "suspend_request", "is_suspended", "block_table")
    by_request += ("host_block_table", "free_resources")
    calls: dict[str, Call] = {name: getattr(kv, name) for name in by_request}
    calls |= {
        f"v2 {name}": lambda v, n=name: KVCacheV2Scheduler(kv, cache.peft, **(v2 | {n: v}))
        for name in (*v2, "policy", "enable_chunked_prefill", "max_skip_passes")
    }
    return calls | {
        "num_blocks": lambda v: KVCacheManager(v, 4),
        "block_size": lambda v: KVCacheManager(4, v),
        "num_host_blocks": lambda v: KVCacheManager(4, 4, num_host_blocks=v),
        "blocks_needed": kv.blocks_needed,
        "allocate for": lambda v: kv.try_allocate(v, 3),
        "allocate": lambda v: kv.try_allocate(REQUEST, v),
        "policy": lambda v: CapacityScheduler(v, 4, kv, cache.peft),
        "max_num_requests": lambda v: CapacityScheduler("max_requests", v, kv, cache.peft),
        "requests": lambda v: CapacityScheduler("max_utilization", 4, kv).schedule_request(v),
        "one": lambda v: CapacityScheduler("max_utilization", 4, kv).schedule_request([v]),
        "v2 requests": lambda v: KVCacheV2Scheduler(kv, None, **v2).schedule_request(v),
        "v2 one": lambda v: KVCacheV2Scheduler(kv, None, **v2).schedule_request([v]),
        "v2 in flight": lambda v: KVCacheV2Scheduler(kv, None, **v2).schedule_request([], v),
        "window": lambda v: AdmissionWindow(cache.peft, size=v),
        "waiting": lambda v: AdmissionWindow(cache.peft, size=4).update(v),
        "waiting one": lambda v: AdmissionWindow(cache.peft, size=4).update([v]),
    }


def model_calls(cache: Cache) -> dict[str, Call]:
    """What a model is described by, and weights in memory."""
    dims = {"num_layers": 2, "hidden_size": 16, "mlp_hidden_size": 32, "num_heads": 4}
    more = ("num_kv_heads", "head_size", "modules", "dtype", "tp_size", "tp_rank", "pp_size")
    more += ("pp_rank", "max_lora_rank", "sizes")
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    cut = {"tp_size": 2, "tp_plan": {"q_proj": "colwise", "0": "colwise"}}
    parts = ("tp_size", "tp_rank", "pp_size", "pp_rank", "tp_plan", "fused_modules")
    calls: dict[str, Call] = {
        f"dims {name}": lambda v, n=name: LoraModelConfig.from_dims(**(dims | {n: v}))
        for name in (*dims, *more)
    }
    calls |= {
        f"shard {name}": lambda v, n=name: cache.config.shard(**(cut | {n: v}))
        for name in (*parts, "num_layers", "head_size")
    }
    calls |= {
        f"module {name}": lambda v, n=name: LoraModelConfig.from_module(module, **(cut | {n: v}))
        for name in (*parts, "target_modules", "dtype", "max_lora_rank")
    }
    packed = torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int32)
    return calls | {
        "from_module": LoraModelConfig.from_module,
        "from_hf_config": LoraModelConfig.from_hf_config,
        "modules": lambda v: LoraModelConfig(v, Dtype.float32),
        "module": lambda v: LoraModelConfig([v], Dtype.float32),
        "dtype": lambda v: LoraModelConfig(cache.config.modules, v),
        "max_lora_rank": lambda v: LoraModelConfig(cache.config.modules, Dtype.float32, v),
        "find": cache.config.find,
        "tensors": lambda v: AdapterWeights.from_tensors(v, {}),
        "config": lambda v: AdapterWeights.from_tensors({}, v),
        "packed": lambda v: AdapterWeights.from_packed(v, packed[1], cache.config),
        "packed config": lambda v: AdapterWeights.from_packed(packed[0], v, cache.config),
        "packed model": lambda v: AdapterWeights.from_packed(*packed, v),
        "given": lambda v: cache.adapters.register("a", PeftTensors(v, {})),
        "given tensors": lambda v: cache.adapters.register("a", PeftTensors({"r": 3}, v)),
        "weight": ModelWeights(module),
        "retained": RetainedAdapters,
        "attach": lambda v: pagedlora.attach(v, cache.peft, cache.adapters),
        "attach cache": lambda v: pagedlora.attach(module, v, cache.adapters),
        "attach adapters": lambda v: pagedlora.attach(module, cache.peft, v),
        "ordinal": pagedlora.make_cuda_device,
        "memory": lambda v: pagedlora.make_cuda_device(0, v),
        "probe": pagedlora.probe_adapter,
    }


def value_calls(cache: Cache) -> dict[str, Call]:
    """Values that callers make, and what the operator takes."""
    lease = cache.peft.ensure_batch([], [])
    batch, operator = LoraBatch(None, [(None, 1)]), LoraOperator(Dtype.float32)
    fine = {"batch": batch, "module_index": 0, "x_ptr": 1, "y_ptr": 1, "num_rows": 1}
    fine |= {"x_row_stride": 1, "y_row_stride": 1, "dtype": Dtype.float32, "base_bias_ptr": 0}
    calls: dict[str, Call] = {
        f"{cls.__name__}.{name}": lambda v, c=cls, n=name: c(**{n: v})
        for cls in (LoraConfig, PeftCacheConfig, KvCacheConfig, SchedulerConfig)
        for name in cls.model_fields
    }
    calls |= {
        f"SamplingParams.{name}": lambda v, n=name: SamplingParams(**{n: v})
        for name in SamplingParams.__dataclass_fields__
    }
    calls |= {
        f"LlmRequest.{name}": lambda v, n=name: LlmRequest(**({"request_id": 1} | {n: v}))
        for name in ("request_id", "lora_task_id", "priority", "max_tokens")
    }
    calls |= {f"apply {name}": lambda v, n=name: operator.apply(**(fine | {n: v})) for name in fine}
    return calls | {
        "lora_name": LoRARequest,
        "lora_int_id": lambda v: LoRARequest("a", v),
        "lora_path": lambda v: LoRARequest("a", None, v),
        "lease": lambda v: LoraBatch(v, []),
        "segments": lambda v: LoraBatch(lease, v),
        "segment": lambda v: LoraBatch(lease, [(v, 1)]),
        "rows": lambda v: LoraBatch(lease, [(None, v)]),
        "operator": LoraOperator,
        "isa": lambda v: LoraOperator(Dtype.float32, v),
        "leased": lambda v: lease[v],
        "contained": lambda v: v in lease,
        "get": lease.get,
        "task_of": lease.task_of,
        "close": lease.close,
    }


@pytest.fixture(scope="module")
def cache() -> Any:
    made = build_cache()
    yield made
    made.peft.check_invariants()
    assert len(made.adapters) == 0
    assert made.peft.active_tasks == {}
    made.peft.close()


GROUPS = (peft_calls, manager_calls, scheduler_calls, model_calls, value_calls)


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_wrong_values_are_refused_with_typed_errors(
    cache: Cache, group: Callable[[Cache], dict[str, Call]], value: Any
) -> None:
    for name, call in group(cache).items():
        check_refusal(name, lambda c=call: c(value))
    cache.peft.check_invariants()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.peft.is_task_done(-1), r"task_id is -1: .* from 0 to 18446744073709551615"),
        (lambda c: c.peft.is_task_done(2**64), r"task_id is 18446744073709551616: .* integer"),
        (lambda c: c.peft.is_task_done("x"), "task_id is 'x': it must be an integer"),
        (lambda c: c.peft.adapter_state(SimpleNamespace(request_id=-1, lora_task_id=1)), "is -1"),
        (lambda c: LlmRequest(2**70), r"request_id is 1180591620717411303424: .* from 0 to"),
        (lambda c: LlmRequest(1, lora_task_id="x"), "lora_task_id is 'x'"),
        (lambda c: c.peft.add_request_peft(3), "the request is 3, which has no request_id"),
        (lambda c: c.peft.free_pages("disk"), "'host' or 'device'|\"host\" and \"device\""),
        (lambda c: PeftCacheManager(3), "model_config is 3: it must be a LoraModelConfig"),
        (lambda c: LoraManager(c.config, None), "cache_manager is None"),
        (lambda c: LoraOperator(Dtype.float32, "mmx"), "isa is .*mmx"),
        (lambda c: SamplingParams(ignore_eos="no"), "ignore_eos is 'no': it must be True or False"),
        (lambda c: c.adapters.register("", "/x"), "1 to 256 bytes, not ''"),
        (lambda c: c.adapters.register("a", ""), "is empty: give a path"),
        (lambda c: c.peft.wait_idle(-1), "timeout_s is -1"),
    ],
)
def test_the_message_has_the_value_and_what_would_do(
    cache: Cache, call: Callable[[Cache], object], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        call(cache)


def test_fields_of_a_configuration_do_for_it(cache: Cache) -> None:
    """As with other libraries on pydantic: a mapping is validated."""
    fields = {"host_cache_size": "1MiB", "device_cache_size": "64KiB"}
    with pytest.raises(ValidationError, match="host_cash_size"):
        PeftCacheManager(cache.config, {"host_cash_size": 1})
    peft = PeftCacheManager(cache.config, fields)
    assert 0 < peft.max_host_pages * peft.page_bytes <= 2**20
    peft.close()


def test_a_cache_of_another_model_is_refused_at_once(cache: Cache) -> None:
    modules = cache.config.modules
    others = {
        "11 modules, not 12": LoraModelConfig(modules[:-1], Dtype.float32, 16),
        "dtype is float32, not float16": LoraModelConfig(modules, Dtype.float16, 16),
        "module 0 is": LoraModelConfig([*modules[1:], modules[0]], Dtype.float32, 16),
        "that of a whole model, not of": cache.config.shard({}, tp_size=2, tp_rank=1),
    }
    for words, config in others.items():
        with pytest.raises(InvalidArgumentError, match="another model configuration") as refused:
            LoraManager(config, cache.peft)
        assert words.replace("11 modules, not 12", "12 modules, not 11") in str(refused.value)
    twin = LoraModelConfig(modules, Dtype.float32, 8)  # other ranks are the registry's matter
    assert len(LoraManager(twin, cache.peft)) == 0


def test_a_request_that_is_not_leased_is_a_key_error(cache: Cache) -> None:
    lease = cache.peft.ensure_batch([], [])
    with pytest.raises(KeyError) as missing:
        lease[5]
    assert (missing.value.request_id, missing.value.code) == (5, "request_not_leased")
    with pytest.raises(pagedlora.RequestNotLeasedError, match="request 6 has no adapter"):
        LoraBatch(lease, [(6, 1)])
    assert "x" not in lease
    assert -1 not in lease
    lease.close()


@pytest.mark.parametrize("cls", [LoraConfig, PeftCacheConfig, KvCacheConfig, SchedulerConfig])
@pytest.mark.parametrize("value", [2**70, 10**5000], ids=["2^70", "endless"])
def test_numbers_that_nothing_can_have_are_refused_where_they_are_given(
    cls: Any, value: int
) -> None:
    """They would overflow in the core, or in torch."""
    for name, field in cls.model_fields.items():
        if "int" in str(field.annotation):
            with pytest.raises(ValidationError, match=name):
                cls(**{name: value})


def test_counts_that_make_a_tier_of_more_than_any_memory_are_refused(cache: Cache) -> None:
    config = PeftCacheConfig(num_host_module_layer=2**31 - 1)
    sizes = LoraModelConfig([_core.LoraModule("m", 2**30, 2**30)], Dtype.float32, 1)
    with pytest.raises(InvalidArgumentError, match=r"host cache would have \d+ bytes, over"):
        PeftCacheManager(sizes, config)
