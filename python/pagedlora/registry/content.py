"""What is kept of a parsed adapter, small: there may be very many."""

from __future__ import annotations

from collections.abc import Iterator

from pagedlora import _core
from pagedlora.loaders.coverage import CoverageReport
from pagedlora.loaders.digest import RowTable, content_digest
from pagedlora.loaders.hf import PeftDirectory, make_plan
from pagedlora.loaders.load_options import DEFAULT_OPTIONS, LoadOptions
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.open_adapter import AdapterSource, open_adapter, warn_of
from pagedlora.loaders.shape_cache import AdapterShape, ShapeCache, shape_key
from pagedlora.loaders.values import ValueCheck
from pagedlora.registry.base_model import BaseModel
from pagedlora.registry.deadline import Deadline


class AdapterContent:
    """An adapter as it was parsed; immutable.

    Attributes:
        path: Its directory or file, as it was given.
        real_path: The same without links.
        label: What errors name: its weights file, or what that was made from.
        file: Its weights file.
        source: The same as the core reads it.
        rows: Where in the file its matrices lie.
        report: What became of its tensors.
        copy: Keeps the file there, where this process made it.
    """

    __slots__ = ("copy", "file", "label", "path", "real_path", "report", "rows", "source")

    def __init__(
        self, directory: PeftDirectory, real_path: str, rows: RowTable, report: CoverageReport
    ) -> None:
        self.path = directory.path
        self.real_path = real_path
        self.label = directory.weights_path
        self.file = directory.file
        self.source = directory.source
        self.rows = rows
        self.report = report
        self.copy = directory.copy

    def digest(
        self, table: ModuleTable, deadline: Deadline, options: LoadOptions = DEFAULT_OPTIONS
    ) -> str:
        """Reads the file and hashes it, in pieces; see `pagedlora.loaders.digest`.

        Raises:
            AdapterFormatError: Values are NaN, infinite or over the range of the cache's type.
            AdapterNotFoundError: The file is gone.
            AdapterReadError: The system will not read it.
            AdapterSourceChangedError: It is not the file that was parsed, or is written to.
            AdapterLoadTimeout: The deadline has passed.
        """
        with self.file.open() as read:

            def read_in_time(offset: int, size: int) -> Iterator[memoryview]:
                for piece in read(offset, size):
                    if deadline.has_passed:
                        raise deadline.error(self.path)
                    yield piece

            check = ValueCheck(self.label, table.config.dtype) if options.check_values else None
            return content_digest(self.rows.contents(table), read_in_time, check)


def parse_adapter(
    source: AdapterSource,
    table: ModuleTable,
    options: LoadOptions = DEFAULT_OPTIONS,
    shapes: ShapeCache | None = None,
    base: BaseModel | None = None,
) -> tuple[AdapterContent, _core.AdapterPlan, _core.SourceGroup]:
    """Parses an adapter for a model; reads no weights, but for what `base` needs of them.

    Args:
        source: Where it is.
        table: The model's modules.
        options: What is allowed.
        shapes: Of the same model and options: what is there need not be parsed again.
        base: The base model's weights; None: adapters that need them are refused.

    Returns:
        The content, and the plan that reads it through a group of sources to which others of the
        same bytes can be added.

    Raises:
        PagedLoraError: As `LoraManager.register` for a source that cannot be used.
    """
    directory = open_adapter(source, options)
    real_path = source.real_path()
    parsed = parse_opened(directory, real_path, table, options, shapes=shapes, base=base)
    warn_of(parsed[0].report.ignored, source)
    return parsed


def parse_opened(
    directory: PeftDirectory,
    real_path: str,
    table: ModuleTable,
    options: LoadOptions,
    *,
    shapes: ShapeCache | None,
    base: BaseModel | None,
) -> tuple[AdapterContent, _core.AdapterPlan, _core.SourceGroup]:
    """The same for an adapter that was opened; warns of nothing.

    Args:
        directory: The adapter.
        real_path: Where it was, as `AdapterContent` has it.
        table: As in `parse_adapter`.
        options: As in `parse_adapter`.
        shapes: As in `parse_adapter`.
        base: As in `parse_adapter`.
    """
    shape = _shape_of(directory, table, shapes)
    adapter = shape.adapter
    group = _core.SourceGroup(directory.source)
    whole, offsets = (base or BaseModel(None)).prepare(
        adapter, directory.file, group, directory.weights_path
    )
    plan = make_plan(adapter, table, whole, offsets, checks_values=options.check_values)
    path = directory.path
    real_path = path if real_path == path else real_path  # one string for both
    content = AdapterContent(directory, real_path, shape.rows, adapter.report)
    return content, plan, group


def _shape_of(
    directory: PeftDirectory, table: ModuleTable, shapes: ShapeCache | None
) -> AdapterShape:
    """What the adapter has in common with others, parsed if that was not done lately."""
    form = type(directory).__name__  # each has a `bind` of its own
    key = None if shapes is None else shape_key(form, directory.config, directory.file)
    shape = None if shapes is None or key is None else shapes.find(key)
    if shape is None:
        adapter = directory.bind(table)
        shape = AdapterShape(adapter, RowTable(adapter.modules))
        if shapes is not None and key is not None:
            shapes.add(key, shape)
    return shape
