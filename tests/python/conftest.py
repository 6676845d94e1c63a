"""Fixtures for all Python tests."""

from tests.support.cache_fixtures import make_cache, small_cache
from tests.support.scheduling import make_peft

__all__ = ["make_cache", "make_peft", "small_cache"]
