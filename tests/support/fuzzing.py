"""How long fuzzers run, and from where: fixed, so that a run can be repeated, and overridable.

PAGEDLORA_FUZZ_SEED=n starts elsewhere. PAGEDLORA_FUZZ_EXAMPLES=n takes so many examples instead of
each test's own number.
"""

from __future__ import annotations

import os


def fuzz_seed() -> int:
    """Printed, and so shown with a failure."""
    seed = int(os.environ.get("PAGEDLORA_FUZZ_SEED", "1"))
    print(f"repeat with PAGEDLORA_FUZZ_SEED={seed}")
    return seed


def fuzz_examples(usual: int) -> int:
    """How many examples a test takes."""
    return int(os.environ.get("PAGEDLORA_FUZZ_EXAMPLES", usual))
