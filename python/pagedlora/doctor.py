"""What a person needs to know, or to report, about an installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedlora.memory import available_memory_bytes, total_memory_bytes
from pagedlora.sizes import format_size

_PACKAGES = ("pagedlora", "torch", "transformers", "peft", "safetensors", "numpy", "pydantic")
_OPTIONAL = frozenset({"peft"})


@dataclass(frozen=True)
class Diagnosis:
    """Facts by section, and what is wrong.

    Attributes:
        sections: Title to facts, as printed.
        problems: Sentences; empty if nothing is wrong.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def diagnose() -> Diagnosis:
    """Looks at versions, the machine and the native part; raises nothing."""
    report = Diagnosis()
    report.sections["Versions"] = _versions(report.problems)
    report.sections["Machine"] = _machine()
    report.sections["Native part"] = _native(report.problems)
    return report


def _versions(problems: list[str]) -> dict[str, str]:
    facts = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
            if package not in _OPTIONAL:
                problems.append(f"{package} is not installed: pip install {package}")
    return facts


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "CPUs usable": str(len(os.sched_getaffinity(0))),
        "memory": f"{format_size(available_memory_bytes())} available of "
        f"{format_size(total_memory_bytes())}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def _native(problems: list[str]) -> dict[str, str]:
    try:
        from pagedlora import _core
    except ImportError as error:
        problems.append(f"the native part cannot be imported ({error}): reinstall pagedlora")
        return {"state": "cannot be imported"}
    info: Mapping[str, object] = _core.build_info()
    facts = {name: str(value) for name, value in info.items() if name != "cuda"}
    facts["cuda"] = "built with CUDA" if info.get("cuda") else "built without CUDA"
    return facts
