"""The kernels for lesser CPUs give the right answers too, chosen as a user would choose them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedlora import _core

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FAMILY = "gemma2"
ISAS = ("portable", "avx2", "avx512")
LESSER_ISAS = ISAS[: max(1, ISAS.index(str(_core.build_info()["best_isa"])))]

# Imported and run by a process of its own: the variable is read once.
SCRIPT = f"""
import os
import sys
from pathlib import Path
from tests.support.equality_bench import make_cases, open_bench
from tests.support.peft_oracle import ADAPTERS, PeftOracle, assert_equal_to_peft
from pagedlora import _core

assert _core.build_info()["default_isa"] == os.environ["PAGEDLORA_ISA"], _core.build_info()
adapters = {{name: Path(sys.argv[1]) / name for name in ADAPTERS}}
cases = make_cases("{FAMILY}")
with open_bench("{FAMILY}", adapters, device_adapters=2, host_adapters=3) as bench:
    answers = bench.ask(cases)
assert_equal_to_peft(PeftOracle("{FAMILY}", adapters), cases, answers)
print(len(answers), "answers are equal")
"""


@pytest.mark.parametrize("isa", LESSER_ISAS)
def test_lesser_kernels_answer_as_peft_does(
    isa: str,
    adapters_of: Callable[[str], dict[str, Path]],
) -> None:
    directory = adapters_of(FAMILY)["r1"].parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        cwd=ROOT,
        env={**os.environ, "PAGEDLORA_ISA": isa},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "21 answers are equal\n"
