"""What a person needs to know, or to report, about an installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from pagedlora.memory import available_memory_bytes, total_memory_bytes
from pagedlora.sizes import format_size

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "pydantic")
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
    native = _native_module(report.problems)
    report.sections["Versions"] = _versions(native, report.problems)
    report.sections["Machine"] = _machine()
    if native is not None:
        report.sections["Native part"] = {k: str(v) for k, v in native.build_info().items()}
        report.sections["GPU"] = _gpu(native.gpu_support())
    return report


def own_version(native: ModuleType | None) -> str:
    """The version that is installed; of a source tree, which works as well, that of its build."""
    try:
        return importlib.metadata.version("pagedlora")
    except importlib.metadata.PackageNotFoundError:
        built = "not built" if native is None else native.build_info().get("version", "unknown")
        return f"{built} (a source tree, not installed: {Path(__file__).parent})"


def _versions(native: ModuleType | None, problems: list[str]) -> dict[str, str]:
    facts = {"python": platform.python_version(), "pagedlora": own_version(native)}
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


def _native_module(problems: list[str]) -> ModuleType | None:
    try:
        from pagedlora import _core
    except ImportError as error:
        problems.append(f"the native part cannot be imported ({error}): reinstall pagedlora")
        return None
    return _core


def _gpu(support: Mapping[str, object]) -> dict[str, str]:
    """No problem: without a GPU everything runs on the CPU."""
    facts = {"state": str(support["state"])}
    if support["detail"]:
        facts["detail"] = str(support["detail"])
    if support["num_devices"]:
        facts["devices"] = str(support["num_devices"])
    for name in ("driver", "runtime"):
        version = int(str(support[f"{name}_version"]))
        if version:
            facts[f"CUDA of the {name}"] = f"{version // 1000}.{version % 1000 // 10}"
    return facts
