"""Weights in TensorRT-LLM's packed form: what is taken, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.support.adapters import (
    adapter_config,
    adapter_tensors,
    assert_same_weights,
    layered_modules,
    weights_of,
)
from tests.support.cache_fixtures import Cache, add_and_wait
from tests.support.packed_adapters import (
    Packed,
    matrices_of_ranks,
    pack,
    packed_model,
    reference_matrices,
)

from pagedlora import (
    AdapterFormatError,
    AdapterWeights,
    Dtype,
    LlmRequest,
    LoraModelConfig,
    RequestConflictError,
    UnsupportedAdapterError,
)
from pagedlora._core import LoraModule

MakeCache = Callable[..., Cache]

MODEL = packed_model()
REFERENCE = reference_matrices(MODEL)


def packed_reference(**options: Any) -> Packed:
    """The adapter of the scenarios, packed anew, so that a test may spoil it."""
    return pack(MODEL, REFERENCE, **options)


def cache_of(make_cache: MakeCache, model: LoraModelConfig, dtype: torch.dtype) -> Cache:
    return make_cache(dtype, modules=model.modules, max_lora_rank=model.max_lora_rank)


def stored_weights(cache: Cache, packed: Packed) -> Mapping[str, Any]:
    """The matrices in the device tier after a request has brought them."""
    request = LlmRequest(1, 7, AdapterWeights.from_packed(*packed, cache.config))
    add_and_wait(cache.peft, request)
    cache.peft.ensure_batch([request], []).close()
    return cache.peft.task_weights(7)


# ---- what is taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pages_hold_the_bits_of_the_rows(
    make_cache: MakeCache, dtype: torch.dtype, tier: Any
) -> None:
    cache = cache_of(make_cache, MODEL, dtype)
    ranks = {0: 1, 1: 64, 4: 8, 5: 13, 6: 9, 12: 3}
    matrices = matrices_of_ranks(MODEL, ranks, seed=3, dtype=dtype)
    weights = AdapterWeights.from_packed(*pack(MODEL, matrices), cache.config)
    request = LlmRequest(1, 7, weights)
    add_and_wait(cache.peft, request)
    lease = cache.peft.ensure_batch([request], [])
    assert_same_weights(cache.peft.task_weights(7, tier), matrices)
    assert {entry.scale for entry in lease[1]} == {1.0}


def test_ids_and_layers_decide_not_the_order_of_the_models_modules(make_cache: MakeCache) -> None:
    shuffled = packed_model()
    modules = sorted(shuffled.modules, key=lambda m: (m.out_features, -m.module_id, m.layer_id))
    cache = make_cache(modules=modules, max_lora_rank=64)
    assert_same_weights(stored_weights(cache, packed_reference()), REFERENCE)


def test_models_in_hugging_faces_names_have_the_ids(make_cache: MakeCache) -> None:
    from transformers import LlamaConfig

    config = LoraModelConfig.from_hf_config(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=32,
        ),
        dtype=torch.float32,
    )
    assert {module.module_id for module in config.modules} == {1, 2, 3, 4, 5, 6, 7}
    matrices = matrices_of_ranks(config, dict.fromkeys(range(1, 8), 4), seed=1)
    cache = cache_of(make_cache, config, torch.float32)
    stored = stored_weights(cache, pack(config, matrices))
    assert_same_weights(stored, matrices)
    assert stored["model.layers.1.mlp.gate_proj"][1].shape == (32, 4)
    assert stored["model.layers.0.self_attn.k_proj"][1].shape == (8, 4)


def test_every_way_to_pack_the_same_adapter_gives_one_digest() -> None:
    expected = AdapterWeights.from_packed(*packed_reference(), MODEL).digest
    weights, config = packed_reference()
    order = torch.randperm(weights.shape[1], generator=torch.Generator().manual_seed(1))
    strided = torch.zeros(*weights.shape, 2)
    strided[..., 0] = weights
    variants: list[Packed] = [
        packed_reference(columns=3),
        packed_reference(padding=5),
        (weights[0], config[0]),
        (weights, config[0]),
        (weights[:, order], config[:, order]),
        (strided[..., 0], config),
    ]
    for variant in variants:
        assert AdapterWeights.from_packed(*variant, MODEL).digest == expected


def test_any_difference_gives_another_digest() -> None:
    def digest(matrices: Any = REFERENCE, change: Callable[[Packed], object] | None = None) -> str:
        packed = pack(MODEL, matrices)
        if change:
            change(packed)
        return AdapterWeights.from_packed(*packed, MODEL).digest

    def swap_layers(packed: Packed) -> None:
        packed[1][0, :, 1] = 1 - packed[1][0, :, 1]

    def swap_q_and_k(packed: Packed) -> None:
        packed[1][0, 2:4, 0], packed[1][0, 4:6, 0] = 2, 1

    def change_last_value(packed: Packed) -> None:
        packed[0][0, 0, -1] += 1

    names = list(REFERENCE)
    digests = [
        digest(),
        digest(change=swap_layers),
        digest(change=swap_q_and_k),
        digest(change=change_last_value),
        digest({name: REFERENCE[name] for name in names[1:]}),
        digest({name: (a.half(), b.half()) for name, (a, b) in REFERENCE.items()}),
        digest(REFERENCE | {names[0]: tuple(m * 2 for m in REFERENCE[names[0]])}),
    ]
    assert len(set(digests)) == len(digests)


def test_packed_and_named_tensors_of_scale_one_are_the_same_weights() -> None:
    tensors = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in adapter_tensors(MODEL.modules, 4, 1).items()
    }
    config = adapter_config(tensors, lora_alpha=4)
    named = AdapterWeights.from_tensors(tensors, config)
    packed = pack(MODEL, weights_of(tensors, torch.float32))
    assert AdapterWeights.from_packed(*packed, MODEL).digest == named.digest
    other_scale = AdapterWeights.from_tensors(tensors, config | {"lora_alpha": 8})
    assert other_scale.digest != named.digest


def test_another_packing_of_the_same_adapter_is_no_conflict(make_cache: MakeCache) -> None:
    cache = cache_of(make_cache, MODEL, torch.float32)

    def send(request_id: int, packed: Packed) -> None:
        weights = AdapterWeights.from_packed(*packed, cache.config)
        add_and_wait(cache.peft, LlmRequest(request_id, 1234, weights))

    send(1, packed_reference(columns=4))
    send(2, packed_reference(columns=3, padding=3))
    with pytest.raises(RequestConflictError):
        send(3, pack(MODEL, reference_matrices(MODEL, seed=2)))
    assert cache.peft.active_tasks == {1234: {1, 2}}


def test_later_changes_of_the_tensors_change_nothing(make_cache: MakeCache) -> None:
    cache = cache_of(make_cache, MODEL, torch.float32)
    packed = packed_reference()
    weights = AdapterWeights.from_packed(*packed, cache.config)
    for tensor in packed:
        tensor.zero_()
    request = LlmRequest(1, 7, weights)
    add_and_wait(cache.peft, request)
    cache.peft.ensure_batch([request], []).close()
    assert_same_weights(cache.peft.task_weights(7), REFERENCE)


def test_numbers_that_are_not_finite_are_kept_in_the_matrices(make_cache: MakeCache) -> None:
    cache = cache_of(make_cache, MODEL, torch.float32)
    matrices = {name: (a.clone(), b.clone()) for name, (a, b) in REFERENCE.items()}
    first = next(iter(matrices))
    matrices[first][0][0, :2] = torch.tensor([float("nan"), float("inf")])
    assert_same_weights(stored_weights(cache, pack(MODEL, matrices)), matrices)


# ---- tensors that cannot be --------------------------------------------------------------------


def spoiled(
    weights: Callable[[torch.Tensor], Any] | None = None,
    config: Callable[[torch.Tensor], Any] | None = None,
) -> tuple[Any, Any]:
    """The packed adapter with one of the tensors changed."""
    packed = packed_reference()
    return (
        weights(packed[0]) if weights else packed[0],
        config(packed[1]) if config else packed[1],
    )


@pytest.mark.parametrize(
    ("packed", "tensor", "words"),
    [
        (spoiled(weights=lambda w: w.double()), "weights", r"float64.*\[1, 26, 512\].*bfloat16"),
        (spoiled(weights=lambda w: w.int()), "weights", r"int32, shape \[1, 26, 512\]"),
        (spoiled(weights=lambda w: w[None]), "weights", r"shape \[1, 1, 26, 512\]"),
        (spoiled(weights=lambda w: w[0, 0]), "weights", r"shape \[512\].*\[1, rows, W\]"),
        (spoiled(weights=lambda w: w.expand(2, -1, -1)), "weights", r"shape \[2, 26, 512\]"),
        (spoiled(weights=lambda w: w.to("meta")), "weights", "on meta.*CPU"),
        (spoiled(weights=lambda w: w[0].to_sparse()), "weights", "sparse_coo.*dense"),
        (spoiled(weights=lambda w: w.tolist()), "weights", "list.*torch tensor"),
        (spoiled(config=lambda c: c.long()), "config", r"int64, shape \[1, 26, 4\]: int32"),
        (spoiled(config=lambda c: c.float()), "config", "float32.*int32"),
        (spoiled(config=lambda c: c[..., :2]), "config", r"shape \[1, 26, 2\].*rank"),
        (spoiled(config=lambda c: torch.cat([c, c], 2)), "config", r"shape \[1, 26, 8\]"),
        (spoiled(config=lambda c: c[0, 0]), "config", r"shape \[4\].*\[1, rows, 3 or 4\]"),
        (spoiled(config=lambda c: c.to("meta")), "config", "on meta.*CPU"),
        (spoiled(config=lambda _: None), "config", "NoneType.*torch tensor"),
        (spoiled(config=lambda c: c[:, :25]), "config", r"25 rows \(shape.*weights have 26"),
        (spoiled(weights=lambda w: w[:, :25]), "config", "26 rows .*weights have 25"),
        (spoiled(lambda w: w[:, :0], lambda c: c[:, :0]), "weights", "no rows.*base model"),
    ],
)
def test_tensors_of_an_impossible_kind_are_refused(
    packed: tuple[Any, Any], tensor: str, words: str
) -> None:
    with pytest.raises(AdapterFormatError, match=words) as caught:
        AdapterWeights.from_packed(*packed, MODEL)
    assert caught.value.tensor == tensor
    assert caught.value.path == "request weights"


# ---- rows that cannot be -----------------------------------------------------------------------


def with_field(row: int, column: int, value: int) -> Packed:
    weights, config = packed_reference()
    config[0, row, column] = value
    return weights, config


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (with_field(3, 0, -1), "row 3 .*module id -1: it must be 0 or more"),
        (with_field(3, 1, -1), "row 3 .*layer -1: it must be 0 or more"),
        (with_field(3, 0, 13), "row 3 .*module id 13, which no .*have 0, 1, .*, 12"),
        (with_field(3, 0, 2**31 - 1), "row 3 .*module id 2147483647, which no"),
        (with_field(3, 1, 2), "row 3 .*layer 2, .*of id 1; .* 2 layers, 0 to 1"),
        (with_field(3, 1, 0), r"row 3 .*layers\.0\.attn_q' \(id 1 of layer 0\), and so is row 2"),
        (with_field(3, 2, 0), "row 3 .*rank 0 for .*attn_q"),
        (with_field(3, 2, -8), "row 3 .*rank -8"),
        (with_field(3, 3, 2), "row 3 .*has 2 where 1 means DoRA"),
        (with_field(3, 3, -1), "row 3 .*has -1 where 1 means DoRA"),
        (with_field(3, 2, 2), r"row 3 .*needs 64 values.*A \[2, 16\].*B \[16, 2\].*not zero"),
        (with_field(0, 2, 9), "row 0 .*needs 576 values.*too few values: 512"),
        (with_field(0, 2, 64), "row 0 .*needs 4096 values.*too few values: 512"),
    ],
)
def test_rows_that_fit_nothing_are_refused(packed: Packed, words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words) as caught:
        AdapterWeights.from_packed(*packed, MODEL)
    assert caught.value.tensor == "config"


@pytest.mark.parametrize("value", [1e-30, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("column", [128, 511])
def test_anything_after_the_matrices_is_refused(column: int, value: float) -> None:
    weights, config = packed_reference()
    assert config[0, 2].tolist() == [1, 0, 4, 0]
    weights[0, 2, column] = value
    with pytest.raises(AdapterFormatError, match=r"row 2 .*needs 128 values.*not zero"):
        AdapterWeights.from_packed(weights, config, MODEL)


def test_weights_that_are_one_value_short_are_refused() -> None:
    weights, config = packed_reference()
    with pytest.raises(AdapterFormatError, match=r"512 values.*too few values: 511"):
        AdapterWeights.from_packed(weights[..., :-1], config, MODEL)


def test_ranks_over_the_maximum_are_refused_in_the_usual_words() -> None:
    small = packed_model(max_lora_rank=7)
    words = "LoRA rank 8 is greater than max_lora_rank 7"
    with pytest.raises(UnsupportedAdapterError, match=words):
        AdapterWeights.from_packed(*packed_reference(), small)
    AdapterWeights.from_packed(*packed_reference(), packed_model(max_lora_rank=8))


def test_dora_rows_are_refused_by_module_and_layer() -> None:
    words = r"row 3 .*DoRA.*'model\.layers\.1\.attn_q' \(id 1\) of layer 1"
    with pytest.raises(UnsupportedAdapterError, match=words) as caught:
        AdapterWeights.from_packed(*with_field(3, 3, 1), MODEL)
    assert caught.value.field == "is_dora"


def test_a_magnitude_vector_without_its_flag_is_refused() -> None:
    weights, config = packed_reference(columns=3, padding=48)
    weights[0, 0, 512:560] = 1.0
    with pytest.raises(AdapterFormatError, match=r"row 0 .*not zero"):
        AdapterWeights.from_packed(weights, config, MODEL)


def test_a_model_without_ids_says_so() -> None:
    modules = [LoraModule("model.layers.0.proj", 16, 16, layer_id=0), LoraModule("head", 16, 16)]
    model = LoraModelConfig(modules, Dtype.float32, 64)
    with pytest.raises(AdapterFormatError, match="no module with a TensorRT-LLM module id"):
        AdapterWeights.from_packed(*packed_reference(), model)
    with pytest.raises(AdapterFormatError, match="module id -1"):  # not that of "head"
        AdapterWeights.from_packed(torch.ones(1, 32), torch.tensor([[-1, -1, 1]]).int(), model)


def test_ids_that_several_modules_have_are_refused() -> None:
    experts = [
        module
        for number in range(2)
        for module in layered_modules(1, {"gate": (16, 16)}, prefix=f"experts.{number}")
    ]
    model = LoraModelConfig(experts, Dtype.float32, 64)
    words = r"module id 0 of layer 0, but several.*experts\.0\.0\.gate', 'experts\.1\.0\.gate'"
    with pytest.raises(AdapterFormatError, match=words):
        AdapterWeights.from_packed(torch.ones(1, 32), torch.tensor([[0, 0, 1]]).int(), model)
