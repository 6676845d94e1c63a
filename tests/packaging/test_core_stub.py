"""The committed stub describes the extension that was built."""

from __future__ import annotations

from tests.support import core_stub


def test_committed_stub_is_what_the_extension_has() -> None:
    assert core_stub.STUB_PATH.read_text() == core_stub.generate(), (
        "run `python -m tests.support.core_stub` and commit the result"
    )
