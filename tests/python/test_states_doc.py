"""docs/states.md describes the state machine that the code runs."""

from __future__ import annotations

import re
from pathlib import Path

from pagedlora import _core

DOCUMENT = Path(__file__).parents[2] / "docs" / "states.md"
HEADER = "| from | event | to | when |"


def documented_transitions() -> list[tuple[str, str, str]]:
    """The first three columns of the transition table."""
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index(HEADER) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        source, event, target = (cell.strip() for cell in line.strip("|").split("|")[:3])
        rows.append((source, event, target))
    return rows


def test_the_transition_table_is_the_cores() -> None:
    assert documented_transitions() == _core.entry_transitions()


def test_every_state_and_every_refused_event_is_explained() -> None:
    text = DOCUMENT.read_text()
    transitions = _core.entry_transitions()
    for state in {state for source, _, target in transitions for state in (source, target)}:
        assert f"- **{state}**: " in text
    for event in {event for _, event, _ in transitions}:
        assert re.search(rf"^- \*{event}\* of ", text, re.MULTILINE)
