"""Add up what a CI run found and print `N passed, N failed` (`, N skipped`) as the last line.

usage: tally.py NAME=EXIT_STATUS[=JUNIT_XML] ...

A part with a JUnit file counts its test cases, and the failed ones are named; one without counts as
a single check. A part fails as a whole, too, if its exit status is not 0 although no case failed,
if its file is missing or holds no case, or if it skipped another number of cases than
.ci/expected-skips.txt says.
"""

import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

EXPECTED_SKIPS = Path(__file__).resolve().with_name("expected-skips.txt")
SHOWN_LINES = 4
SHOWN_COLUMNS = 200


@dataclass
class Count:
    """Test cases of one part of the run."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""
    failed_cases: list[str] = field(default_factory=list)

    def fail(self, note: str) -> None:
        """Count the part itself as one failure."""
        self.failed += 1
        self.note = f"{self.note}; {note}" if self.note else note


def read_expected_skips() -> dict[str, int]:
    """Return the number of skips by part; a part that is not in the file skips nothing."""
    lines = EXPECTED_SKIPS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("#")[0].split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if pair}


def describe(case: ET.Element, failure: ET.Element) -> str:
    """Return the name of a case and the first lines of what it said."""
    name = f"{case.get('classname', '')} {case.get('name', '')}"
    lines = (failure.get("message") or failure.text or "").splitlines()[:SHOWN_LINES]
    return "\n".join([name, *(f"    {line[:SHOWN_COLUMNS]}" for line in lines)])


def count_cases(junit: Path) -> Count:
    """Count the cases of a file written by pytest or ctest; an expected failure has passed."""
    count = Count()
    for case in ET.parse(junit).getroot().iter("testcase"):
        skipped = case.find("skipped")
        failure = case.find("failure")
        if failure is None:
            failure = case.find("error")
        if failure is not None:
            count.failed += 1
            count.failed_cases.append(describe(case, failure))
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            count.skipped += 1
        else:
            count.passed += 1
    return count


def count_part(name: str, status: int, junit: Path | None, expected_skips: int) -> Count:
    """Return the count of one part, its own failure included."""
    if junit is None:
        return Count(passed=1) if status == 0 else Count(failed=1, note=f"exit status {status}")
    try:
        count = count_cases(junit)
    except (OSError, ET.ParseError) as error:
        count = Count()
        count.fail(f"exit status {status}, no report: {error}")
        return count
    if count == Count():
        count.fail("no test ran")
    elif status != 0 and count.failed == 0:
        count.fail(f"exit status {status}, though no test failed")
    if count.skipped != expected_skips:
        count.fail(f"expected {expected_skips} skips")
    return count


def main(parts: list[str]) -> int:
    """Print the table and the closing line; return the exit status."""
    expected_skips = read_expected_skips()
    total = Count()
    print(f"{'part':<20}{'passed':>8}{'failed':>8}{'skipped':>9}")
    for part in parts:
        name, status, *junit = part.split("=")
        path = Path(junit[0]) if junit else None
        count = count_part(name, int(status), path, expected_skips.get(name, 0))
        total.passed += count.passed
        total.failed += count.failed
        total.skipped += count.skipped
        print(f"{name:<20}{count.passed:>8}{count.failed:>8}{count.skipped:>9}  {count.note}")
        total.failed_cases += [f"{name}: {case}" for case in count.failed_cases]
    for case in total.failed_cases:
        print(f"FAILED {case}")
    skipped = f", {total.skipped} skipped" if total.skipped else ""
    print(f"{total.passed} passed, {total.failed} failed{skipped}")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
