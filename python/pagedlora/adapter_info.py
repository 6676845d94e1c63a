"""What can be said about an adapter: of a registered one, and of its files alone."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from pagedlora.loaders.coverage import CoverageReport
from pagedlora.loaders.hf import PeftDirectory
from pagedlora.loaders.load_options import LoadOptions
from pagedlora.loaders.open_adapter import open_adapter
from pagedlora.paths import SourcePath, to_path


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What an adapter's files say, and what a model makes of them if there is one.

    Attributes:
        path: Its directory, or its file.
        ranks: Module name, as the files have it, to rank.
        scales: The same to the factor of B A x.
        num_tensors: Tensors used; always all of the file's.
        dtypes: Types of the stored tensors.
        parameters: Numbers in the tensors.
        bytes_on_disk: Size of the weights file.
        settings: The fields of its configuration that decide the answers.
        ignored: What was ignored, and why; with strict=False only.
        coverage: What becomes of its tensors; None: there is no model.
        num_pages: Pages that it takes in either tier; None: there is no model.
        bytes: Those pages in bytes; None: there is no model.
    """

    path: str
    ranks: dict[str, int]
    scales: dict[str, float]
    num_tensors: int
    dtypes: list[str]
    parameters: int
    bytes_on_disk: int
    settings: dict[str, Any]
    ignored: tuple[str, ...] = ()
    coverage: CoverageReport | None = None
    num_pages: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A registered adapter, or a retired generation of one, as it is now.

    Attributes:
        name: How requests name it; of a retired generation the last name that stood for it.
        path: Where it was registered from.
        task_id: Its task in the caches.
        generation: Digest of its content, in hexadecimal; None until `load`, `pin`, `reload` or
            `cache_salt` asked for it: reading the weights for requests does not compute it.
        ranks: Module name to rank.
        scales: Module name to the factor of B A x.
        report: What became of its tensors and of its configuration.
        num_pages: Pages it takes in either tier.
        bytes: Those pages in bytes.
        tiers: The tiers that hold it now: "host", "device".
        pinned: Whether a pin of this name keeps it in the host tier.
        owners: Ids of the requests that use it, active and paused: those acquired for this name,
            on whatever generation, and if no other name shares its task, those that own the task
            without having been acquired.
    """

    name: str
    path: str
    task_id: int
    generation: str | None
    ranks: dict[str, int]
    scales: dict[str, float]
    report: CoverageReport
    num_pages: int
    bytes: int
    tiers: tuple[str, ...]
    pinned: bool
    owners: frozenset[int]


def probe_adapter(
    path: str | os.PathLike[str], *, strict: bool = True, allow_pickle: bool = False
) -> AdapterReport:
    """What an adapter's files say; checks everything that needs no model.

    Args:
        path: A PEFT directory, or a .nemo file.
        strict: As in `LoraManager`.
        allow_pickle: As in `LoraManager`.

    Raises:
        PagedLoraError: As `LoraManager.register`, but for what depends on a model.
    """
    source = SourcePath(to_path(path, "the path of the adapter"))
    return report_of(open_adapter(source, LoadOptions(strict=strict, allow_pickle=allow_pickle)))


def report_of(
    adapter: PeftDirectory,
    coverage: CoverageReport | None = None,
    num_pages: int | None = None,
    page_bytes: int = 0,
) -> AdapterReport:
    """What is known of an adapter that was opened.

    Args:
        adapter: The adapter.
        coverage: As in `AdapterReport`.
        num_pages: As in `AdapterReport`.
        page_bytes: Of each.
    """
    modules = adapter.tensors.modules
    tensors = [tensor for module in modules.values() for tensor in module.tensors]
    return AdapterReport(
        path=adapter.path,
        ranks={name: module.pair.rank for name, module in modules.items()},
        scales={name: module.scale for name, module in modules.items()},
        num_tensors=adapter.tensors.num_tensors,
        dtypes=sorted({tensor.dtype for tensor in tensors}),
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        bytes_on_disk=adapter.source.size_bytes,
        settings=adapter.config.settings(),
        ignored=adapter.tensors.notes,
        coverage=coverage,
        num_pages=num_pages,
        bytes=None if num_pages is None else num_pages * page_bytes,
    )
