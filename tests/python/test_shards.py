"""Shards of adapters (design 3.1, 3.5): together they are the whole, and answer like it."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.adapters import PREFIX, Tensors
from tests.support.sharded import (
    BY_INPUT,
    FUSED,
    HIDDEN,
    KV,
    VOCAB,
    Q,
    answer,
    base_weight,
    features_here,
    random_adapter,
    rank_cache,
    rank_config,
    save_adapter,
    whole_config,
)

from pagedlora import (
    AdapterWeights,
    LlmRequest,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    UnsupportedAdapterError,
)
from pagedlora.errors import InvalidArgumentError
from pagedlora.sharding import Parallel

WHOLE = whole_config()
FIELDS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "bias": {"lora_bias": True},
    "dora": {"use_dora": True},
}
RUN = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def parts(name: str, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """A, B and bias (or None) of a module."""
    embedding = f"{PREFIX}{name}.lora_embedding_A"
    if embedding in tensors:
        return tensors[embedding], tensors[f"{PREFIX}{name}.lora_embedding_B"], None
    a, b = (tensors[f"{PREFIX}{name}.lora_{m}.weight"] for m in "AB")
    return a, b, tensors.get(f"{PREFIX}{name}.lora_B.bias")


def names_of(tensors: Tensors) -> list[str]:
    """The modules of an adapter, in the model's order."""
    targeted = {name.removeprefix(PREFIX).split(".lora_")[0] for name in tensors}
    return [module.name for module in WHOLE.modules if module.name in targeted]


def expected_parts(
    name: str, tensors: Tensors, tp_size: int, tp_rank: int
) -> tuple[torch.Tensor, ...]:
    """What a rank must have: cut with torch."""
    a, b, bias = parts(name, tensors)
    here = features_here(name, tp_size, tp_rank)
    if name.rsplit(".", 1)[-1] in BY_INPUT:
        return a[:, here], b, bias if bias is None or tp_rank == 0 else torch.zeros_like(bias)
    return a, b[here], None if bias is None else bias[here]


def assert_same_rows(stored: tuple[torch.Tensor, ...], a: torch.Tensor, b: torch.Tensor) -> None:
    """The matrices bit for bit; a fused module's parts each have a copy of A."""
    rank = len(a)
    copies = len(stored[0]) // rank
    assert torch.equal(stored[0], a.repeat(copies, 1))
    assert torch.equal(sum(stored[1][:, i * rank :][:, :rank] for i in range(copies)), b)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("kind", FIELDS)
@RUN
@given(
    drawn=st.tuples(
        st.integers(1, 16), st.integers(0, 2**20), st.sampled_from([torch.float32, torch.bfloat16])
    )
)
def test_each_rank_has_its_part_bit_for_bit_and_together_they_have_all(
    tmp_path: Path, tp_size: int, kind: str, drawn: tuple[int, int, torch.dtype]
) -> None:
    config, (rank, seed, dtype) = WHOLE, drawn
    tensors = random_adapter(config, rank, seed, bias=kind == "bias", dora=kind == "dora")
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    directory = save_adapter(Path(tempfile.mkdtemp(dir=tmp_path)), tensors, **FIELDS[kind])
    tensors = {name: tensor.float() for name, tensor in tensors.items()}  # as in the cache
    names = names_of(tensors)
    seen = {name: torch.zeros_like(parts(name, tensors)[0]) for name in names}
    seen_b = {name: torch.zeros_like(parts(name, tensors)[1]) for name in names}
    pages, digests = set(), set()
    with rank_cache(config, directory, base_weights=base_weight) as whole:
        scales = {n: w[2] for n, w in whole.weights().items() if kind == "dora" and len(w) > 2}
        digests.add(whole.adapters.get("a").generation)
    for tp_rank in range(tp_size):
        local = rank_config(config, Parallel(tp_size, tp_rank))
        with rank_cache(local, directory, base_weights=base_weight) as cache:
            pages.add(cache.adapters.get("a").num_pages)
            digests.add(cache.adapters.get("a").generation)
            stored = cache.weights()
            assert list(stored) == names
            for name in names:
                a, b, bias = expected_parts(name, tensors, tp_size, tp_rank)
                assert_same_rows(stored[name], a, b)
                if bias is not None:
                    assert torch.equal(stored[name][3], bias)
                here = features_here(name, tp_size, tp_rank)
                if name.rsplit(".", 1)[-1] in BY_INPUT:
                    seen[name][:, here], seen_b[name] = stored[name][0][:rank], b
                else:
                    seen[name], seen_b[name][here] = stored[name][0][:rank], b
                if name in scales:
                    by_input = name.rsplit(".", 1)[-1] in BY_INPUT
                    wanted = scales[name] if by_input else scales[name][here]
                    torch.testing.assert_close(stored[name][2], wanted, rtol=2e-6, atol=0)
    for name in names:
        a, b, _ = parts(name, tensors)
        assert torch.equal(seen[name], a)
        assert torch.equal(seen_b[name], b)
    assert len(pages) == 1, "ranks that need other pages evict other adapters"
    assert len(digests) == 1


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("kind", FIELDS)
@RUN
@given(rank=st.integers(1, 16), seed=st.integers(0, 2**20))
def test_shards_applied_by_the_operator_give_the_unsharded_answer(
    tmp_path: Path, tp_size: int, kind: str, rank: int, seed: int
) -> None:
    """Side by side for modules cut by outputs, added for those cut by inputs."""
    tensors = random_adapter(WHOLE, rank, seed, bias=kind == "bias", dora=kind == "dora")
    directory = save_adapter(Path(tempfile.mkdtemp(dir=tmp_path)), tensors, **FIELDS[kind])
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        name: torch.randn(3, WHOLE.modules[WHOLE.find(name)].in_features, generator=generator)
        for name in names_of(tensors)
    }
    if "embed_tokens" in inputs:
        inputs["embed_tokens"] = torch.randint(0, VOCAB, (5,), generator=generator)
    with ExitStack() as stack:
        whole = stack.enter_context(rank_cache(WHOLE, directory, base_weights=base_weight))
        ranks = [
            stack.enter_context(
                rank_cache(
                    rank_config(WHOLE, Parallel(tp_size, tp_rank)),
                    directory,
                    base_weights=base_weight,
                )
            )
            for tp_rank in range(tp_size)
        ]
        for name, x in inputs.items():
            wanted = answer(whole, name, x)
            if name.rsplit(".", 1)[-1] in BY_INPUT:
                got = sum(answer(c, name, x, adds_bias=r == 0) for r, c in enumerate(ranks))
            else:
                got = torch.empty_like(wanted)
                for tp_rank, cache in enumerate(ranks):
                    got[:, features_here(name, tp_size, tp_rank)] = answer(cache, name, x)
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_pipeline_ranks_load_disjoint_parts_that_are_the_whole(
    tmp_path: Path, pp_size: int
) -> None:
    """7 layers: 4 + 3, and 3 + 2 + 2; the report says what is elsewhere."""
    config = whole_config(7)
    tensors = random_adapter(config, 3, 5)
    directory = save_adapter(tmp_path / "a", tensors)
    seen: dict[str, tuple[torch.Tensor, ...]] = {}
    num_layers, digests = [], set()
    for pp_rank in range(pp_size):
        local = rank_config(config, Parallel(pp_size=pp_size, pp_rank=pp_rank))
        with rank_cache(local, directory) as cache:
            stored = cache.weights()
            assert not seen.keys() & stored.keys()
            seen |= stored
            info = cache.adapters.get("a")
            assert info.report.elsewhere == len(config.modules) - len(stored)
            assert info.report.used == len(tensors)
            digests.add(info.generation)
            num_layers.append(len({n.split(".")[1] for n in stored if n.startswith("layers.")}))
            assert ("embed_tokens" in stored) == (pp_rank == 0)
            assert ("lm_head" in stored) == (pp_rank == pp_size - 1)
    assert num_layers == {1: [7], 2: [4, 3], 3: [3, 2, 2]}[pp_size]
    assert len(digests) == 1
    assert seen.keys() == {module.name for module in config.modules}
    for name, stored in seen.items():
        a, b, _ = parts(name, tensors)
        assert_same_rows(stored, a, b)


def test_both_kinds_together_are_disjoint_and_whole(tmp_path: Path) -> None:
    config = whole_config(3)
    tensors = random_adapter(config, 2, 6)
    directory = save_adapter(tmp_path / "a", tensors)
    for pp_rank in range(2):
        for tp_rank in range(2):
            local = rank_config(config, Parallel(2, tp_rank, 2, pp_rank))
            with rank_cache(local, directory) as cache:
                for name, stored in cache.weights("host").items():
                    a, b, _ = expected_parts(name, tensors, 2, tp_rank)
                    assert_same_rows(stored, a, b)


def test_an_adapter_of_other_pipeline_ranks_loads_and_takes_no_pages(tmp_path: Path) -> None:
    """It must not fail on one rank only: its requests run through all of them."""
    config = whole_config(2)
    tensors = {n: t for n, t in random_adapter(config, 4, 7).items() if ".layers.1." in n}
    directory = save_adapter(tmp_path / "a", tensors)
    first, second = (rank_config(config, Parallel(pp_size=2, pp_rank=r)) for r in range(2))
    with rank_cache(second, directory) as cache:
        assert cache.adapters.get("a").num_pages > 0
    with rank_cache(first, directory) as cache:
        info = cache.adapters.get("a")
        assert (info.num_pages, info.report.elsewhere) == (0, 7)
        assert info.tiers == ("host", "device")
        assert cache.weights() == {}
        assert cache.peft.adapter_state(cache.request) == "ready"
        name = "layers.0.router"
        x = torch.randn(2, HIDDEN)
        torch.testing.assert_close(answer(cache, name, x), x @ base_weight(name).T + 0.25)
        cache.peft.evict_unowned("device")
        cache.adapters.pin("a")
        cache.adapters.unpin("a")
        cache.peft.check_invariants()


@pytest.mark.parametrize("bias", [False, True])
def test_weights_that_a_request_carries_are_cut_too(bias: bool) -> None:
    tensors = random_adapter(WHOLE, 4, 8, bias=bias)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": names_of(tensors)}
    weights = AdapterWeights.from_tensors(tensors, {**fields, "lora_bias": bias})
    for tp_rank in range(2):
        config = rank_config(WHOLE, Parallel(2, tp_rank))
        sizes = PeftCacheConfig(host_cache_size=2**19, device_cache_size=2**19)
        peft = PeftCacheManager(config, sizes)
        request = LlmRequest(1, lora_task_id=1, lora_weights=weights)
        peft.add_request_peft(request)
        assert peft.wait_idle()
        for name, stored in peft.task_weights(1, "host").items():
            a, b, expected_bias = expected_parts(name, tensors, 2, tp_rank)
            assert_same_rows(stored, a, b)
            assert expected_bias is None or torch.equal(stored[3], expected_bias)
        peft.mark_request_done(request)
        peft.close()


@pytest.mark.parametrize("kind", ["bias", "dora"])
def test_an_evicted_shard_is_read_again_with_what_lies_behind_it(tmp_path: Path, kind: str) -> None:
    tensors = random_adapter(WHOLE, 9, 12, bias=kind == "bias", dora=kind == "dora")
    directory = save_adapter(tmp_path / "a", tensors, **FIELDS[kind])
    with rank_cache(
        rank_config(WHOLE, Parallel(2, 1)), directory, base_weights=base_weight
    ) as cache:
        before = cache.weights()
        cache.peft.ensure_batch([], []).close()
        cache.peft.mark_request_done(cache.request)
        for tier in ("device", "host"):
            cache.peft.evict_unowned(tier)
            assert cache.peft.resident_tasks(tier) == 0
        cache.peft.add_request_peft(cache.request)
        with cache.leased() as lease:
            assert not lease.errors
            assert cache.peft.stats.source_rereads == 1
            for name, stored in cache.weights().items():
                for one, other in zip(stored, before[name], strict=True):
                    assert one is other is None or torch.equal(one, other)


def test_packed_weights_are_whole_on_every_rank() -> None:
    """Design 3.5: as TensorRT-LLM takes them, ranks cut them."""
    dims = {"num_layers": 2, "hidden_size": 16, "mlp_hidden_size": 24, "num_heads": 4}
    modules = ["attn_qkv", "attn_dense"]
    whole = LoraModelConfig.from_dims(**dims, num_kv_heads=2, modules=modules)
    rows = torch.randn(1, 4, 3 * (16 + 32), generator=torch.Generator().manual_seed(3))
    rows[:, 1::2, 3 * (16 + 16) :] = 0
    config = torch.tensor([[[0, 0, 3], [4, 0, 3], [0, 1, 3], [4, 1, 3]]], dtype=torch.int32)
    digests = set()
    for pp_rank, tp_rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        local = LoraModelConfig.from_dims(
            **dims,
            num_kv_heads=2,
            modules=modules,
            tp_size=2,
            tp_rank=tp_rank,
            pp_size=2,
            pp_rank=pp_rank,
        )
        weights = AdapterWeights.from_packed(rows, config, local)
        digests.add(weights.digest)
        peft = PeftCacheManager(
            local, PeftCacheConfig(host_cache_size=2**19, device_cache_size=2**19)
        )
        request = LlmRequest(1, lora_task_id=1, lora_weights=weights)
        peft.add_request_peft(request)
        assert peft.wait_idle()
        stored = peft.task_weights(1, "host")
        name = f"model.layers.{pp_rank}.self_attn."
        assert list(stored) == [f"{name}qkv_proj", f"{name}o_proj"]
        qkv, dense = rows[0, 2 * pp_rank], rows[0, 2 * pp_rank + 1]
        b = qkv[48:].view(32, 3)[features_here("qkv_proj", 2, tp_rank)]
        assert_same_rows(stored[f"{name}qkv_proj"], qkv[:48].view(3, 16), b)
        a = dense[:48].view(3, 16)[:, features_here("o_proj", 2, tp_rank)]
        assert_same_rows(stored[f"{name}o_proj"], a, dense[48:96].view(16, 3))
        peft.mark_request_done(request)
        peft.close()
    assert digests == {AdapterWeights.from_packed(rows, config, whole).digest}


@pytest.mark.parametrize("gives_whole", [True, False])
@pytest.mark.parametrize("changed", [None, 3, VOCAB - 1])
def test_a_copy_of_the_base_weight_is_compared_with_what_is_given_of_it(
    tmp_path: Path, gives_whole: bool, changed: int | None
) -> None:
    """A rank that has its part alone sees changes there only."""
    tensors = {n: t for n, t in random_adapter(WHOLE, 2, 13).items() if "embed_tokens" in n}
    copy = base_weight("embed_tokens").T.contiguous()
    if changed is not None:
        copy[changed] += 1
    tensors[f"{PREFIX}embed_tokens.base_layer.weight"] = copy
    directory = save_adapter(tmp_path / "a", tensors, target_modules=["embed_tokens"], r=2)
    for tp_rank in range(2):
        local = rank_config(WHOLE, Parallel(2, tp_rank))
        here = features_here("embed_tokens", 2, tp_rank)

        def weights(name: str, here: torch.Tensor = here) -> torch.Tensor:
            return base_weight(name) if gives_whole else base_weight(name)[:, here]

        peft = PeftCacheManager(
            local, PeftCacheConfig(host_cache_size=2**19, device_cache_size=2**19)
        )
        manager = LoraManager(local, peft, base_weights=weights)
        if changed is not None and (gives_whole or changed in here):
            with pytest.raises(UnsupportedAdapterError, match="differs from the one"):
                manager.register("a", directory)
        else:
            assert manager.register("a", directory).report.verified == 1
        peft.close()


@pytest.mark.parametrize("tp_rank", range(4))
def test_split_adapters_on_a_fused_module_are_cut_part_by_part(
    tmp_path: Path, tp_rank: int
) -> None:
    """q, k and v of their own, on a qkv_proj of which the rank has a piece of each."""
    whole = type(WHOLE)([m for m in WHOLE.modules if m.name.endswith("qkv_proj")], WHOLE.dtype, 16)
    generator = torch.Generator().manual_seed(9)
    tensors, cut = {}, []
    for first, (part, out) in zip((0, Q, Q + KV), FUSED["qkv_proj"].items(), strict=True):
        a = torch.randn(3, HIDDEN, generator=generator)
        b = torch.randn(out, 3, generator=generator)
        name = f"{PREFIX}layers.0.{part}"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        here = features_here("qkv_proj", 4, tp_rank) - first
        cut.append((a, b[here[(here >= 0) & (here < out)]]))
    directory = save_adapter(tmp_path / "a", tensors)
    local = rank_config(whole, Parallel(4, tp_rank))
    with rank_cache(local, directory, fused_modules=FUSED) as cache:
        a, b = cache.weights()["layers.0.qkv_proj"]
    assert torch.equal(a, torch.cat([a for a, _ in cut]))
    assert torch.equal(b, torch.block_diag(*(b for _, b in cut)))


def test_base_weights_of_the_rank_do_for_outputs_and_are_refused_for_inputs(tmp_path: Path) -> None:
    config = WHOLE
    local = rank_config(config, Parallel(2, 1))
    tensors = random_adapter(config, 2, 10, dora=True)
    by_output = {n: t for n, t in tensors.items() if not any(f"{m}.lora_" in n for m in BY_INPUT)}

    def here(name: str) -> torch.Tensor:
        features = features_here(name, 2, 1)
        weight = base_weight(name)
        return weight[:, features] if name.endswith(BY_INPUT) else weight[features]

    directory = save_adapter(tmp_path / "outputs", by_output, use_dora=True)
    with (
        rank_cache(local, directory, base_weights=here) as mine,
        rank_cache(local, directory, base_weights=base_weight) as whole,
    ):
        for name, stored in whole.weights().items():
            for one, other in zip(stored, mine.weights()[name], strict=True):
                assert torch.equal(one, other)
    directory = save_adapter(tmp_path / "all", tensors, use_dora=True)
    peft = PeftCacheManager(local, PeftCacheConfig(device_cache_size=2**19, host_cache_size=2**19))
    with pytest.raises(UnsupportedAdapterError, match=r"needs? the whole weight \[16, 40\]"):
        LoraManager(local, peft, base_weights=here).register("a", directory)
    peft.close()


def test_dora_without_base_weights_is_refused_on_ranks_without_its_modules(tmp_path: Path) -> None:
    config = whole_config(2)
    tensors = random_adapter(config, 2, 11, dora=True)
    directory = save_adapter(
        tmp_path / "a", {n: t for n, t in tensors.items() if ".layers.1." in n}, use_dora=True
    )
    for pp_rank in range(2):
        local = rank_config(config, Parallel(pp_size=2, pp_rank=pp_rank))
        peft = PeftCacheManager(local, PeftCacheConfig(host_cache_size=2**19))
        with pytest.raises(UnsupportedAdapterError, match="use_dora"):
            LoraManager(local, peft).register("a", directory)
        peft.close()


def test_a_fraction_of_the_free_memory_is_no_budget_of_tensor_parallel_ranks() -> None:
    """Design 4: sizes in bytes, so that ranks have the same pages."""
    config = rank_config(WHOLE, Parallel(2, 0))
    with pytest.raises(InvalidArgumentError, match="give device_cache_size"):
        PeftCacheManager(config, PeftCacheConfig(host_cache_size=2**19))
    with pytest.raises(InvalidArgumentError, match="give device_cache_size"):
        PeftCacheManager(config, PeftCacheConfig(device_cache_percent=0.001))
    PeftCacheManager(config, PeftCacheConfig(num_device_module_layer=900)).close()
