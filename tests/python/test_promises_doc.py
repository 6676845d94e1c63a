"""docs/promises.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_file_exists_and_has_tests() -> None:
    names = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "promises.md").read_text())
    assert names
    for name in names:
        content = (ROOT / name).read_text()
        assert re.search(r"def test_|TEST|TestCase", content), f"{name} has no tests"
