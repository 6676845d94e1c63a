"""Fixtures for all Python tests, which use no network."""

import gc
import os

# Before torch reads it: products on several threads depend on how many rows there are, and some
# tests compare bits.
os.environ["OMP_NUM_THREADS"] = "1"
# Before huggingface_hub reads it: a model that is not here is nowhere.
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.support.async_bench import bench, make_bench
from tests.support.cache_fixtures import make_cache, small_cache
from tests.support.scheduling import make_peft

__all__ = ["bench", "make_bench", "make_cache", "make_peft", "small_cache"]


def pytest_collection_finish() -> None:
    """What was imported stays: tests that collect garbage need not walk it each time."""
    gc.collect()
    gc.freeze()
