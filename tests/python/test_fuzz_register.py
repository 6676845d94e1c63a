"""Whatever bytes an adapter's files hold: it is registered or refused by a typed error, and a call
that raises leaves nothing behind (promises 3 and 4)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.adapters import CONFIG_FILE, WEIGHTS_FILE, adapter_tensors, write_adapter
from tests.support.cache_fixtures import Cache, build_cache, check_pages
from tests.support.fuzzing import fuzz_examples

from pagedlora import PagedLoraError

pytestmark = pytest.mark.slow

SHAPES = {"q_proj": (8, 8), "v_proj": (8, 4)}
EXAMPLES = settings(
    max_examples=fuzz_examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Target:
    """A registry with one good adapter, and a directory to put anything into."""

    def __init__(self, cache: Cache, root: Path) -> None:
        self.cache = cache
        tensors = adapter_tensors(cache.config.modules, 2, 1)
        cache.adapters.register("good", write_adapter(root / "good", tensors))
        self.directory = write_adapter(root / "fuzzed", tensors)
        self.config = (self.directory / CONFIG_FILE).read_bytes()
        self.weights = (self.directory / WEIGHTS_FILE).read_bytes()
        self.num_registered = 0

    def state(self) -> tuple[Any, ...]:
        """All that a failed call could have changed."""
        manager, peft = self.cache.adapters, self.cache.peft
        generations = manager._generations
        return (
            manager.names,
            manager.list(),
            manager.retired(),
            dict(generations._by_digest),
            dict(manager._names._uses),
            dict(manager._loader._flights),
            [peft.free_pages(tier) for tier in ("host", "device")],
            [peft.resident_tasks(tier) for tier in ("host", "device")],
            peft.active_tasks,
        )

    def register(self, config: bytes, weights: bytes) -> bool:
        """Whether it could be registered; it is given up again then."""
        (self.directory / CONFIG_FILE).write_bytes(config)
        (self.directory / WEIGHTS_FILE).write_bytes(weights)
        before = self.state()
        manager = self.cache.adapters
        error: PagedLoraError | None = None
        try:
            task_id = manager.register("fuzzed", self.directory).task_id
        except PagedLoraError as refusal:
            error = refusal
        else:
            self.num_registered += 1
            assert manager.get("fuzzed").num_pages > 0
            assert not self.cache.peft.is_task_cached(task_id)
            manager.unload("fuzzed", timeout_s=0)
        assert self.state() == before
        check_pages(self.cache.peft)
        if error is not None:
            assert error.message == str(error) != ""
            assert type(error) is not PagedLoraError
        return error is None


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    cache = build_cache(shapes=SHAPES, num_layers=1, host_pages=8, device_pages=8)
    yield Target(cache, tmp_path_factory.mktemp("fuzz"))
    cache.peft.close()


def changed(content: bytes) -> st.SearchStrategy[bytes]:
    """The content with a few bytes overwritten, cut out or put in; often not at all."""
    piece = st.tuples(
        st.integers(0, len(content)), st.integers(0, 9), st.binary(min_size=0, max_size=9)
    )

    def apply(pieces: list[tuple[int, int, bytes]]) -> bytes:
        result = bytearray(content)
        for offset, length, new in pieces:
            result[offset : offset + length] = new
        return bytes(result)

    return st.lists(piece, max_size=3).map(apply)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["LORA", "q_proj", "v_proj", "all-linear", "none", "F32", "BF16", 2, 8]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "target_modules",
        "bias",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "init_lora_weights",
        "layers_to_transform",
        "unknown",
    ]
)


def test_an_unchanged_adapter_is_registered(target: Target) -> None:
    assert target.register(target.config, target.weights)


@EXAMPLES
@given(data=st.data())
def test_changed_bytes_of_both_files(target: Target, data: st.DataObject) -> None:
    target.register(data.draw(changed(target.config)), data.draw(changed(target.weights)))


@EXAMPLES
@given(config=st.binary(max_size=64))
def test_any_bytes_as_configuration(target: Target, config: bytes) -> None:
    assert not target.register(config, target.weights)


@EXAMPLES
@given(fields=st.dictionaries(FIELDS, JSON_VALUES, max_size=4))
def test_any_fields_in_the_configuration(target: Target, fields: dict[str, Any]) -> None:
    """A rank that is not the tensors' is refused unless a pattern gives them theirs."""
    config = {**json.loads(target.config), **fields}
    if target.register(json.dumps(config).encode(), target.weights):
        assert config["r"] == 2 or config.get("rank_pattern")


@EXAMPLES
@given(weights=st.binary(max_size=64) | st.binary(max_size=256).map(lambda b: header(b) + b"0" * 8))
def test_any_bytes_as_weights(target: Target, weights: bytes) -> None:
    assert not target.register(target.config, weights)


@EXAMPLES
@given(
    name=st.text(max_size=8),
    dtype=st.sampled_from(["F32", "F16", "BF16", "F64", "I64", "BOOL", "F8_E4M3", "X"])
    | JSON_VALUES,
    shape=st.lists(st.integers(0, 9), max_size=3) | JSON_VALUES,
    offsets=st.lists(st.integers(0, 2**9), min_size=2, max_size=2) | JSON_VALUES,
)
def test_any_tensor_beside_the_others(
    target: Target, name: str, dtype: Any, shape: Any, offsets: Any
) -> None:
    """A tensor that is not used fails the load; one that is used has the right shape."""
    (length,) = struct.unpack("<Q", target.weights[:8])
    entries = json.loads(target.weights[8 : 8 + length])
    data = target.weights[8 + length :]
    entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries).encode("utf-8", "surrogatepass")
    for grown in (data, data + bytes(8)):
        assert not target.register(target.config, header(text) + grown)


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_some_of_the_fuzzed_adapters_were_good(target: Target) -> None:
    """Otherwise nothing was tried beyond the first check."""
    seen = target.num_registered
    for shift in range(len(target.weights)):  # each byte of the weights once
        changed_byte = bytearray(target.weights)
        changed_byte[shift] ^= 0x21
        target.register(target.config, bytes(changed_byte))
    data_bytes = sum(4 * 2 * (i + o) for i, o in SHAPES.values())
    assert target.num_registered - seen >= data_bytes
