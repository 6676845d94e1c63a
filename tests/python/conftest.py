"""Fixtures for all Python tests."""

from tests.support.cache_fixtures import make_cache, small_cache

__all__ = ["make_cache", "small_cache"]
