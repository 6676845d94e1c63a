"""Generates python/pagedlora/_core.pyi from the built extension.

`python -m tests.support.core_stub` rewrites the committed file; a test compares the two.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

STUB_PATH = Path(__file__).parents[2] / "python" / "pagedlora" / "_core.pyi"

_REPLACEMENTS = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    # stubgen writes members of a native enum as bare class variables, and its __new__.
    (r"(?m)^    (\w+): typing\.ClassVar\[(?:Dtype|ModuleKind)\]$", r"    \1 = ..."),
    (r"    @classmethod\n    def __new__\(cls, value\):\n        \.\.\.\n", ""),
    (r"    __hash__: typing\.ClassVar\[None\] = None\n", ""),
    (r"__eq__\(self, arg0: \w+\)", "__eq__(self, other: object, /)"),
    (r"__exit__\(self, \*args\)", "__exit__(self, *args: object)"),
    (r"-> collections\.abc\.Iterator:", "-> collections.abc.Iterator[int]:"),
    (r"weights: CarriedWeights = None", "weights: CarriedWeights | None = None"),
    (r"root: AdapterRoot = None", "root: AdapterRoot | None = None"),
    (r"def errors\(self\) -> dict:", "def errors(self) -> dict[int, BaseException]:"),
    (r"def build_info\(\) -> dict:", "def build_info() -> dict[str, typing.Any]:"),
    (r"def gpu_support\(\) -> dict:", "def gpu_support() -> dict[str, typing.Any]:"),
    (
        r"def entry_transitions\(\) -> list:",
        "def entry_transitions() -> list[tuple[str, str, str]]:",
    ),
)


def generate() -> str:
    """The text that the stub should have."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pybind11_stubgen",
                "pagedlora._core",
                "--output-dir",
                directory,
                "--enum-class-locations",
                "ModuleKind:pagedlora._core",
                "--exit-code",
            ],
            check=True,
            capture_output=True,
        )
        text = (Path(directory) / "pagedlora" / "_core.pyi").read_text()
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    return _formatted(text)


def _formatted(text: str) -> str:
    for command in (["check", "--fix-only", "--quiet"], ["format", "--quiet"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB_PATH), "-"],
            check=True,
            capture_output=True,
            text=True,
            input=text,
        )
        text = result.stdout
    return text


if __name__ == "__main__":
    STUB_PATH.write_text(generate())
