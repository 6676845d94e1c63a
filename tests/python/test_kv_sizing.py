"""How many KV blocks a configuration means, on device and host."""

from __future__ import annotations

import pytest

from pagedlora.config import KvCacheConfig, SchedulerConfig
from pagedlora.engine.sizing import MAX_DEFAULT_KV_BYTES, num_host_kv_blocks, num_kv_blocks
from pagedlora.errors import InvalidArgumentError

BLOCK_BYTES = 1000


def device_blocks(
    config: KvCacheConfig,
    *,
    max_model_tokens: int | None = None,
    free_bytes: int = 100 * BLOCK_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> int:
    return num_kv_blocks(
        config,
        SchedulerConfig(max_batch_size=3),
        block_bytes=block_bytes,
        max_model_tokens=max_model_tokens,
        free_bytes=free_bytes,
    )


@pytest.mark.parametrize(
    ("config", "num_blocks"),
    [
        (KvCacheConfig(num_blocks=7), 7),
        (KvCacheConfig(size=1000), 1),
        (KvCacheConfig(size=3999), 3),
        (KvCacheConfig(), 25),
        (KvCacheConfig(host_blocks=1000), 25),
    ],
)
def test_device_blocks(config: KvCacheConfig, num_blocks: int) -> None:
    assert device_blocks(config) == num_blocks


def test_by_default_no_more_than_the_batch_can_use() -> None:
    config = KvCacheConfig(block_size=16)
    assert device_blocks(config, max_model_tokens=33) == 9
    assert device_blocks(config, max_model_tokens=10_000) == 25


def test_by_default_at_least_one_block_and_at_most_a_limit() -> None:
    assert device_blocks(KvCacheConfig(), free_bytes=0) == 1
    many = device_blocks(KvCacheConfig(), free_bytes=2**50, block_bytes=2**20)
    assert many == MAX_DEFAULT_KV_BYTES // 2**20


@pytest.mark.parametrize(
    ("config", "num_blocks"),
    [
        (KvCacheConfig(), 0),
        (KvCacheConfig(num_blocks=7), 0),
        (KvCacheConfig(host_blocks=0), 0),
        (KvCacheConfig(host_blocks=5), 5),
        (KvCacheConfig(host_size=0), 0),
        (KvCacheConfig(host_size=1000), 1),
        (KvCacheConfig(host_size=3999), 3),
        (KvCacheConfig(size=9000, host_size=3000), 3),
    ],
)
def test_host_blocks(config: KvCacheConfig, num_blocks: int) -> None:
    assert num_host_kv_blocks(config, block_bytes=BLOCK_BYTES) == num_blocks


def test_a_size_below_one_block_is_refused_by_name() -> None:
    words = r"is 999 B, less than one block of 16 tokens \(1000 B\): raise it"
    with pytest.raises(InvalidArgumentError, match=rf"KvCacheConfig\.size {words}"):
        device_blocks(KvCacheConfig(size=999))
    with pytest.raises(InvalidArgumentError, match=rf"KvCacheConfig\.host_size {words}"):
        num_host_kv_blocks(KvCacheConfig(host_size=999), block_bytes=BLOCK_BYTES)
