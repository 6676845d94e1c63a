"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedlora.errors import InvalidArgumentError
from pagedlora.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("256KiB", 256 * 1024),
        ("4GiB", 4 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("1.5gib", 3 * 2**29),
        (" 40MB ", 40_000_000),
        ("1kB", 1000),
        ("2TiB", 2**41),
        ("0", 0),
        ("0.1KiB", 102),
    ],
)
def test_reads_bytes_and_units(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "bad", [-1, 1.5, True, None, "", "GiB", "-1GiB", "1 2", "4 XB", "1e9", "4G", "nan", [1]]
)
def test_refuses_everything_else_and_shows_what_is_right(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r'"256KiB", "1\.5 GiB" or "40MB"'):
        parse_size(bad)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (92160, "90 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (1_500_000_000, "1.4 GiB"),
        (100 * 2**20, "100 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_writes_the_largest_unit(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(0, 2**50))
def test_what_is_written_reads_back_within_one_percent(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == pytest.approx(num_bytes, rel=0.01)
