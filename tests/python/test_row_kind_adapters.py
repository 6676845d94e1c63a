"""Files of DoRA, biases and embeddings: what loads, what is refused, and what tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import PREFIX, Tensors, adapter_config, write_adapter
from tests.support.cache_fixtures import Cache, add_and_wait

from pagedlora import AdapterWeights, LlmRequest, LoraManager, PagedLoraError
from pagedlora._core import LoraModule, ModuleKind
from pagedlora.errors import (
    AdapterFormatError,
    AdapterSourceChangedError,
    UnsupportedAdapterError,
)

IN, OUT, RANK, VOCABULARY = 16, 24, 3, 40
Q, EMBED = f"{PREFIX}model.layers.0.q_proj", f"{PREFIX}model.embed_tokens"
BASE = {
    "model.layers.0.q_proj": torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)),
    "model.embed_tokens": torch.randn(IN, VOCABULARY, generator=torch.Generator().manual_seed(2)),
}
"""[out_features, in_features]"""


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    """An embedding and a linear module."""
    return make_cache(
        modules=[
            LoraModule("model.embed_tokens", VOCABULARY, IN, kind=ModuleKind.embedding),
            LoraModule("model.layers.0.q_proj", IN, OUT, 0),
        ]
    )


@pytest.fixture
def adapters(cache: Cache) -> LoraManager:
    """A manager that has the base model's weights."""
    return LoraManager(cache.config, cache.peft, base_weights=BASE.__getitem__)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + seed))


def linear(seed: int = 0) -> Tensors:
    return {
        f"{Q}.lora_A.weight": random(RANK, IN, seed=seed),
        f"{Q}.lora_B.weight": random(OUT, RANK, seed=seed + 1),
    }


def embedding(seed: int = 0) -> Tensors:
    return {
        f"{EMBED}.lora_embedding_A": random(RANK, VOCABULARY, seed=seed),
        f"{EMBED}.lora_embedding_B": random(IN, RANK, seed=seed + 1),
    }


def magnitude(length: int = OUT, name: str = Q, seed: int = 0) -> Tensors:
    return {f"{name}.lora_magnitude_vector": random(length, seed=seed).abs() + 1}


def bias(length: int = OUT, seed: int = 0) -> Tensors:
    return {f"{Q}.lora_B.bias": random(length, seed=seed)}


def write(path: Path, tensors: Tensors, **fields: Any) -> Path:
    targets = ["q_proj", "embed_tokens"]
    return write_adapter(path, tensors, r=RANK, target_modules=targets, **fields)


def test_without_base_weights_dora_is_refused_by_name(cache: Cache, tmp_path: Path) -> None:
    directory = write(tmp_path, {**linear(), **magnitude()}, use_dora=True)
    with pytest.raises(UnsupportedAdapterError, match="give LoraManager base_weights") as caught:
        cache.adapters.register("a", directory)
    assert caught.value.field == "use_dora"
    assert not cache.adapters.list()


@pytest.mark.parametrize("suffix", ["", ".weight", ".default.weight"])
def test_the_stored_scale_is_the_magnitude_over_the_norm(
    cache: Cache, adapters: LoraManager, tmp_path: Path, suffix: str
) -> None:
    m = magnitude()[f"{Q}.lora_magnitude_vector"]
    tensors = {**linear(), f"{Q}.lora_magnitude_vector{suffix}": m}
    adapters.register("a", write(tmp_path, tensors, use_dora=True, lora_alpha=2 * RANK))
    request = LlmRequest(1, lora_task_id=adapters.task_id("a"))
    for _ in range(2):
        add_and_wait(cache.peft, request)
        a, b, scale = cache.peft.task_weights(adapters.task_id("a"), "host")[
            "model.layers.0.q_proj"
        ]
        norms = (BASE["model.layers.0.q_proj"] + 2.0 * (b @ a)).norm(dim=1)
        torch.testing.assert_close(scale, m / norms)
        cache.peft.mark_request_done(request)
        cache.peft.evict_unowned("host")
    assert cache.peft.stats.source_rereads == 1


BROKEN: dict[str, tuple[Callable[[], Tensors], dict[str, Any], str, type[PagedLoraError]]] = {
    "magnitude missing": (
        linear,
        {"use_dora": True},
        "lora_magnitude_vector' of .* is missing, though the configuration says use_dora=True",
        AdapterFormatError,
    ),
    "magnitude not announced": (
        lambda: {**linear(), **magnitude()},
        {},
        "is there, but use_dora is not true",
        AdapterFormatError,
    ),
    "magnitude too long": (
        lambda: {**linear(), **magnitude(OUT + 1)},
        {"use_dora": True},
        r"has shape \[25\]: lora_B needs \[24\]",
        AdapterFormatError,
    ),
    "magnitude of integers": (
        lambda: {**linear(), f"{Q}.lora_magnitude_vector": torch.ones(OUT, dtype=torch.int32)},
        {"use_dora": True},
        "has dtype I32",
        AdapterFormatError,
    ),
    "infinite magnitude": (
        lambda: {**linear(), f"{Q}.lora_magnitude_vector": torch.full((OUT,), float("inf"))},
        {"use_dora": True},
        "output 0 of module 'model.layers.0.q_proj' is not finite",
        AdapterFormatError,
    ),
    "bias missing": (
        linear,
        {"lora_bias": True},
        "lora_B.bias' of .* is missing, though the configuration says lora_bias=True",
        AdapterFormatError,
    ),
    "bias not announced": (
        lambda: {**linear(), **bias()},
        {},
        "is there, but lora_bias is not true",
        AdapterFormatError,
    ),
    "bias too short": (
        lambda: {**linear(), **bias(OUT - 1)},
        {"lora_bias": True},
        r"has shape \[23\]: lora_B needs \[24\]",
        AdapterFormatError,
    ),
    "bias and DoRA": (
        lambda: {**linear(), **bias(), **magnitude()},
        {"lora_bias": True, "use_dora": True},
        "lora_bias=True together with use_dora=True",
        UnsupportedAdapterError,
    ),
    "bias alone": (
        bias,
        {"lora_bias": True},
        "lora_A.weight' of .* is missing",
        AdapterFormatError,
    ),
    "flag that is none": (
        linear,
        {"use_dora": "yes"},
        "use_dora='yes': it must be true or false",
        AdapterFormatError,
    ),
    "half an embedding": (
        lambda: {f"{EMBED}.lora_embedding_A": random(RANK, VOCABULARY)},
        {},
        "lora_embedding_B' of .* is missing: there is only lora_embedding_A",
        AdapterFormatError,
    ),
    "both kinds for one module": (
        lambda: {**linear(), f"{Q}.lora_embedding_A": random(RANK, IN)},
        {},
        "is beside lora_embedding_A or _B of module",
        AdapterFormatError,
    ),
    "embedding for a linear module": (
        lambda: {
            f"{Q}.lora_embedding_A": random(RANK, IN),
            f"{Q}.lora_embedding_B": random(OUT, RANK),
        },
        {},
        "is lora_embedding_A for module '.*q_proj' of the model, which needs lora_A",
        AdapterFormatError,
    ),
    "linear for an embedding": (
        lambda: {
            f"{EMBED}.lora_A.weight": random(RANK, VOCABULARY),
            f"{EMBED}.lora_B.weight": random(IN, RANK),
        },
        {},
        "is lora_A for module 'model.embed_tokens' of the model, which needs lora_embedding_A",
        AdapterFormatError,
    ),
    "embedding with a bias": (
        embedding,
        {"lora_bias": True},
        "lora_B.bias' of .* is missing",
        AdapterFormatError,
    ),
    "copy of another base": (
        lambda: {**embedding(), f"{EMBED}.base_layer.weight": random(VOCABULARY, IN)},
        {},
        "is a weight of the base model, which differs from the one that is served",
        UnsupportedAdapterError,
    ),
    "added tokens": (
        lambda: {**embedding(), f"{EMBED}.base_layer.weight": random(VOCABULARY + 1, IN)},
        {},
        "tokens were added",
        UnsupportedAdapterError,
    ),
    "copy without LoRA": (
        lambda: {**linear(), f"{EMBED}.base_layer.weight": BASE["model.embed_tokens"].T},
        {},
        "for a module without LoRA",
        AdapterFormatError,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_together_is_named(
    name: str, adapters: LoraManager, tmp_path: Path
) -> None:
    tensors, fields, message, kind = BROKEN[name]
    content = {key: tensor.contiguous() for key, tensor in tensors().items()}
    with pytest.raises(kind, match=message):
        adapters.register("a", write(tmp_path, content, **fields))
    assert not adapters.list()


def test_a_copy_of_the_base_weight_is_compared_and_noted(
    cache: Cache, adapters: LoraManager, tmp_path: Path
) -> None:
    """PEFT saves one with every adapter for an embedding, unless it is told not to."""
    copy = {f"{EMBED}.base_layer.weight": BASE["model.embed_tokens"].T.contiguous()}
    directory = write(tmp_path, {**embedding(), **copy})
    info = adapters.register("a", directory)
    assert info.report.verified == 1
    plain = adapters.load("b", write(tmp_path / "b", embedding()))
    assert plain.report.verified == 0
    assert adapters.load("a").generation == plain.generation
    with pytest.raises(UnsupportedAdapterError, match="no base weights to compare it with"):
        cache.adapters.register("a", directory)


def test_every_kind_has_a_digest_of_its_own(adapters: LoraManager, tmp_path: Path) -> None:
    other = magnitude()
    other[f"{Q}.lora_magnitude_vector"][7] += 2**-20
    made = {
        "plain": (linear(), {}),
        "dora": ({**linear(), **magnitude()}, {"use_dora": True}),
        "dora, one bit": ({**linear(), **other}, {"use_dora": True}),
        "bias": ({**linear(), **bias()}, {"lora_bias": True}),
        # the same numbers as a magnitude and as a bias
        "bias of the magnitude": (
            {**linear(), f"{Q}.lora_B.bias": magnitude()[f"{Q}.lora_magnitude_vector"]},
            {"lora_bias": True},
        ),
        "embedding": (embedding(), {}),
    }
    digests = {
        name: adapters.load(name, write(tmp_path / name, tensors, **fields)).generation
        for name, (tensors, fields) in made.items()
    }
    assert len(set(digests.values())) == len(made)
    again = write(tmp_path / "again", {**linear(), **magnitude()}, use_dora=True)
    info = adapters.load("again", again)
    assert info.generation == digests["dora"]
    assert info.task_id == adapters.get("dora").task_id


def test_a_request_may_carry_biases_and_embeddings_but_no_dora(cache: Cache) -> None:
    def weights(tensors: Tensors, **fields: Any) -> AdapterWeights:
        targets = ["q_proj", "embed_tokens"]
        config = adapter_config(tensors, r=RANK, target_modules=targets, **fields)
        return AdapterWeights.from_tensors(tensors, config)

    # a bias is of linear modules, an embedding has none
    for number, carried in enumerate(
        [weights({**linear(), **bias()}, lora_bias=True), weights(embedding())]
    ):
        request = LlmRequest(number, lora_task_id=number, lora_weights=carried)
        add_and_wait(cache.peft, request)
        assert len(cache.peft.task_weights(number, "host")) == 1
        cache.peft.mark_request_done(request)
    dora = weights({**linear(), **magnitude()}, use_dora=True)
    with pytest.raises(UnsupportedAdapterError, match="use_dora"):
        dora.carried(cache.config)


def test_a_changed_file_of_a_dora_adapter_fails_that_adapter_only(
    cache: Cache, adapters: LoraManager, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"use_dora": True}
    for name in ("a", "b"):
        adapters.register(name, write(tmp_path / name, {**linear(), **magnitude()}, **fields))
    write(tmp_path / "a", {**linear(5), **magnitude()}, **fields)
    with pytest.raises(AdapterSourceChangedError):
        add_and_wait(cache.peft, LlmRequest(1, lora_task_id=adapters.task_id("a")))
    fine = LlmRequest(2, lora_task_id=adapters.task_id("b"))
    add_and_wait(cache.peft, fine)
    cache.peft.mark_request_done(fine)
    adapters.reload("a", tmp_path / "a")
    again = LlmRequest(3, lora_task_id=adapters.task_id("a"))
    add_and_wait(cache.peft, again)
    cache.peft.mark_request_done(again)


def test_the_scratch_file_does_not_grow_with_reloads(adapters: LoraManager, tmp_path: Path) -> None:
    for seed in range(20):
        content = {**linear(seed), **magnitude(seed=seed)}
        directory = write(tmp_path / str(seed), content, use_dora=True)
        if seed == 0:
            adapters.register("a", directory)
        else:
            adapters.reload("a", directory)
    scratch = adapters._parts.base._scratch
    assert scratch is not None
    assert scratch.used_bytes <= 2 * 4096  # blocks of a file system: one piece, and one being read


def test_adapters_of_one_shape_have_scales_of_their_own(
    cache: Cache, adapters: LoraManager, tmp_path: Path
) -> None:
    """What is shared by adapters of equal headers must not be what depends on their values."""
    for seed in range(2):
        content = {**linear(10 * seed), **magnitude(seed=seed)}
        adapters.register(str(seed), write(tmp_path / str(seed), content, use_dora=True))
    for seed in range(2):
        task_id = adapters.task_id(str(seed))
        request = LlmRequest(seed, lora_task_id=task_id)
        add_and_wait(cache.peft, request)
        a, b, scale = cache.peft.task_weights(task_id, "host")["model.layers.0.q_proj"]
        norms = (BASE["model.layers.0.q_proj"] + 16 / RANK * (b @ a)).norm(dim=1)
        torch.testing.assert_close(
            scale, magnitude(seed=seed)[f"{Q}.lora_magnitude_vector"] / norms
        )
        cache.peft.mark_request_done(request)
