"""What a load made of an adapter's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """What became of the tensors and of the configuration; small, and shared where equal.

    Attributes:
        used: Tensors that the adapter's answers come from; all of the file's.
        renamed: What was changed in tensors' names to find the model's modules, and in how many:
            ("_orig_mod. taken away", 28), ("language_model. put in", 28).
        ignored: What was left out, and why; with strict=False only.
        missing: Modules that the configuration targets and for which there are no tensors: they
            answer like the base model, as in PEFT.
        verified: Tensors that repeat weights of the base model, and were compared with them.
        elsewhere: Modules of the adapter that other pipeline ranks load, not this one.
        casts: Stored type, type in the cache, and tensors that are cast so.
    """

    used: int
    renamed: tuple[tuple[str, int], ...] = ()
    ignored: tuple[str, ...] = ()
    missing: int = 0
    casts: tuple[tuple[str, str, int], ...] = ()
    verified: int = 0
    elsewhere: int = 0


def counted(items: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Each item once, with how often it is there, sorted."""
    return tuple(sorted(Counter(items).items()))
