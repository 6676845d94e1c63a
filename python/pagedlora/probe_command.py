"""`pagedlora probe`: what adapters hold, and whether they would load."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pagedlora.adapter_info import AdapterReport, probe_adapter
from pagedlora.command_errors import said
from pagedlora.config import DEFAULT_MAX_LORA_RANK, PeftCacheConfig
from pagedlora.errors import PagedLoraError
from pagedlora.loaders.binding import check_rank
from pagedlora.loaders.hf import WEIGHTS_NAME
from pagedlora.loaders.nemo import NEMO_SUFFIX
from pagedlora.loaders.peft_config import CONFIG_NAME
from pagedlora.loaders.pickled import PICKLE_NAME
from pagedlora.loaders.stored import DTYPES
from pagedlora.model_config import ALL_LINEAR, LoraModelConfig
from pagedlora.registry.lora_dir import directories_below
from pagedlora.shown import counted, printable
from pagedlora.sizes import format_size

if TYPE_CHECKING:
    from torch import nn

    from pagedlora.lora_manager import LoraManager

CACHE_BYTES = 1 << 30
"""Pages are those of a host tier of this size, the default."""
_SHOWN_CHARS = 200
_NAME_CHARS = 1000
_FACTS = ("rank", "scale", "modules", "type", "on disk", "pages")
_TIER_BYTES = 1 << 24
_ADAPTER_FILES = (CONFIG_NAME, WEIGHTS_NAME, PICKLE_NAME)


@dataclass(frozen=True)
class ProbeOptions:
    """How to load.

    Attributes:
        max_lora_rank: Largest rank that loads.
        strict: As in `LoraManager`.
        allow_pickle: As in `LoraManager`.
        target_modules: Modules of the model that may carry LoRA.
    """

    max_lora_rank: int = DEFAULT_MAX_LORA_RANK
    strict: bool = True
    allow_pickle: bool = False
    target_modules: Sequence[str] = (ALL_LINEAR,)


@dataclass(frozen=True)
class Verdict:
    """What is known of one adapter.

    Attributes:
        path: Its directory.
        report: What its files say, and the model if there is one and it fits; None: the files are
            refused.
        page_bytes: Of a page, where there is a model.
        error: Why it is refused; None: it would load.
    """

    path: Path
    report: AdapterReport | None = None
    page_bytes: int = 0
    error: PagedLoraError | None = None


def find_adapters(path: Path) -> list[Path]:
    """The path itself if it is one adapter, or else those below it, found as `lora_dir` finds them.

    Other than there, archives are among them, linked ones right in it, and directories without all
    of an adapter's files: to be told why they would not load.

    Returns:
        In the order of their names; none if there are none.
    """
    if _is_adapter(path) or not path.is_dir():
        return [path]
    found = {inner for inner in path.iterdir() if _is_adapter(inner)}
    for name, files in directories_below(str(path)):
        if not {*_ADAPTER_FILES}.isdisjoint(files):
            found.add(path / name)
        found |= {path / name / file for file in files if file.endswith(NEMO_SUFFIX)}
    return sorted(found)


def probe_all(
    paths: Sequence[Path], model: nn.Module | None, options: ProbeOptions
) -> Iterator[Verdict]:
    """Parses adapters, and fits them to a model if there is one; reads no weights.

    Args:
        paths: Directories.
        model: May be without weights.
        options: How to load.
    """
    reports = {path: _report(path, options) for path in paths}
    if model is None:
        yield from reports.values()
        return
    with ExitStack() as closers:
        manager, page_bytes = _manager(model, options, closers)
        for path, verdict in reports.items():
            yield _fit(path, verdict, manager, page_bytes)


def what_was_judged(options: ProbeOptions, *, has_model: bool) -> str:
    """What "would load" means: the limits that were asked for, and what was not looked at."""
    fit = "" if has_model else "the fit to a model (--model), and "
    if fit and list(options.target_modules) != [ALL_LINEAR]:
        fit = "the fit to a model (--model) and to its modules that --target names, and "
    return (
        f"Judged with max_lora_rank {options.max_lora_rank} (--max-lora-rank). Not checked: {fit}"
        "the values of weights, which are not read: any that is NaN or infinite is refused on "
        "loading."
    )


def print_one(verdict: Verdict, options: ProbeOptions, console: Console) -> None:
    """All about one adapter that loads. What files say is text, never markup."""
    report = verdict.report
    assert report is not None
    name = printable(verdict.path.resolve().name, _NAME_CHARS)
    path = printable(report.path, _NAME_CHARS)
    console.print(Text.assemble((name, "bold"), f"  {path}"))
    lines = [
        f"{report.parameters:,} parameters in {counted(report.num_tensors, 'tensor')} of "
        f"{_types(report.dtypes)}, {format_size(report.bytes_on_disk)} on disk",
        ", ".join(f"{field}={_short(value)}" for field, value in report.settings.items()),
    ]
    coverage = report.coverage
    if coverage is not None and report.bytes is not None:
        lines.append(
            f"{counted(report.num_pages or 0, 'page')} of {verdict.page_bytes:,} bytes, "
            f"{format_size(report.bytes)}, with a host tier of {format_size(CACHE_BYTES)}"
        )
        lines += [f"{change} in {counted(count, 'module')}" for change, count in coverage.renamed]
        lines += [
            f"{counted(n, 'tensor')} of {_types([old])} kept as {new}"
            for old, new, n in coverage.casts
        ]
        if coverage.missing:
            missing = counted(coverage.missing, "target module")
            lines.append(f"no tensors for {missing}: there it answers as the base model")
    lines += [*report.ignored, what_was_judged(options, has_model=coverage is not None)]
    for line in lines:
        console.print(Text(line))
    console.print(_modules_table(report))


def print_many(
    directory: Path, verdicts: Sequence[Verdict], options: ProbeOptions, console: Console
) -> int:
    """A table of adapters by their names below a directory, and why some are refused.

    Returns:
        How many are refused.
    """
    table = Table(Column("adapter", overflow="fold"), "would load", *_FACTS)
    for verdict in verdicts:
        table.add_row(Text(_name(verdict, directory)), *_cells(verdict))
    console.print(table)
    page_bytes = max(verdict.page_bytes for verdict in verdicts)
    if page_bytes:
        tier = format_size(CACHE_BYTES)
        console.print(f"Pages: {page_bytes:,} bytes, with a host tier of {tier}.", highlight=False)
    console.print(what_was_judged(options, has_model=page_bytes > 0), highlight=False)
    refused = [(verdict, verdict.error) for verdict in verdicts if verdict.error is not None]
    for verdict, error in refused:
        console.print(Text(f"{_name(verdict, directory)} is refused: {said(error)}"))
    return len(refused)


def _name(verdict: Verdict, directory: Path) -> str:
    return printable(str(verdict.path.relative_to(directory)), _NAME_CHARS)


def _cells(verdict: Verdict) -> list[Text]:
    report = verdict.report
    would_load = Text("yes") if verdict.error is None else Text("no", "bold red")
    if report is None:
        return [would_load, *[Text("") for _ in _FACTS]]
    ranks, scales = report.ranks.values(), report.scales.values()
    return [
        would_load,
        Text(_span(ranks)),
        Text(_span(scales)),
        Text(str(len(ranks))),
        Text(_types(report.dtypes)),
        Text(format_size(report.bytes_on_disk)),
        Text("" if report.num_pages is None else str(report.num_pages)),
    ]


def _span(values: Iterable[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _modules_table(report: AdapterReport) -> Table:
    table = Table("module", "rank", "scale")
    for module, rank in report.ranks.items():
        table.add_row(Text(printable(module, _NAME_CHARS)), str(rank), f"{report.scales[module]:g}")
    return table


def _types(stored: Iterable[str]) -> str:
    """Names of types as everything but safetensors has them."""
    return ", ".join(DTYPES[name].name for name in stored)


def _short(value: object) -> str:
    """A value of bounded length; of many names the first ones, whole, and how many there are."""
    if not isinstance(value, tuple):
        return printable(str(value), _SHOWN_CHARS)
    names = [printable(str(name), _SHOWN_CHARS // 2) for name in value]
    ends = itertools.accumulate(len(name) + len(", ") for name in names)
    num_shown = sum(end <= _SHOWN_CHARS for end in ends)
    if num_shown < len(names):
        names[num_shown:] = [f"… ({len(names)} in all)"]
    return ", ".join(names)


def _is_adapter(path: Path) -> bool:
    is_archive = path.name.endswith(NEMO_SUFFIX) and path.is_file()
    return is_archive or any(os.path.lexists(path / name) for name in _ADAPTER_FILES)


def _report(path: Path, options: ProbeOptions) -> Verdict:
    report = None
    try:
        report = probe_adapter(path, strict=options.strict, allow_pickle=options.allow_pickle)
        check_rank(max(report.ranks.values()), options.max_lora_rank, str(path))
    except PagedLoraError as error:
        return Verdict(path, report, error=error)
    return Verdict(path, report)


def _fit(path: Path, verdict: Verdict, manager: LoraManager, page_bytes: int) -> Verdict:
    if verdict.error is not None:
        return replace(verdict, page_bytes=page_bytes)
    try:
        return Verdict(path, manager.probe(path), page_bytes)
    except PagedLoraError as error:
        return Verdict(path, verdict.report, page_bytes, error)


def _manager(
    model: nn.Module, options: ProbeOptions, closers: ExitStack
) -> tuple[LoraManager, int]:
    """A manager over tiers that need only exist, with the pages of ones of the usual size."""
    from pagedlora import _core
    from pagedlora.base_weights import SizesOnly
    from pagedlora.loaders.fused_modules import fused_modules_of
    from pagedlora.lora_manager import LoraManager
    from pagedlora.peft_cache import PeftCacheManager

    config = LoraModelConfig.from_module(
        model, options.target_modules, max_lora_rank=options.max_lora_rank
    )
    params = _core.search_layout_params(config, CACHE_BYTES)
    tier_bytes = max(_TIER_BYTES, params.page_bytes)
    cache = PeftCacheManager(
        config,
        PeftCacheConfig(
            host_cache_size=tier_bytes,
            device_cache_size=tier_bytes,
            page_size=params.page_bytes,
            max_part_size=params.max_part_bytes,
        ),
        device="cpu",
    )
    closers.callback(cache.close)
    manager = LoraManager(
        config,
        cache,
        base_weights=SizesOnly(model),
        fused_modules=fused_modules_of(model.config),
        strict=options.strict,
        allow_pickle=options.allow_pickle,
    )
    return manager, cache.page_bytes
