"""What is kept of a parsed adapter, small: there may be very many."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pagedlora import _core
from pagedlora.loaders.digest import RowTable, content_digest
from pagedlora.loaders.hf import open_peft_directory
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.source_file import SourceFile
from pagedlora.paths import SourcePath
from pagedlora.registry.deadline import Deadline


class AdapterContent:
    """An adapter as it was parsed; immutable.

    Attributes:
        path: Its directory, as it was given.
        real_path: The same without links.
        file: Its weights file.
        source: The same as the core reads it.
        rows: Where in the file its matrices lie.
    """

    __slots__ = ("file", "path", "real_path", "rows", "source")

    def __init__(
        self,
        path: str,
        real_path: str,
        file: SourceFile,
        source: _core.TensorSource,
        rows: RowTable,
    ) -> None:
        self.path = path
        self.real_path = real_path
        self.file = file
        self.source = source
        self.rows = rows

    def digest(self, table: ModuleTable, deadline: Deadline) -> str:
        """Reads the file and hashes it, in pieces; see `pagedlora.loaders.digest`.

        Raises:
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

            return content_digest(self.rows.contents(table), read_in_time)


def parse_adapter(
    source: SourcePath, table: ModuleTable
) -> tuple[AdapterContent, _core.AdapterPlan, _core.SourceGroup]:
    """Parses a PEFT directory for a model; reads no weights.

    Args:
        source: The directory.
        table: The model's modules.

    Returns:
        The content, and the plan that reads it through a group of sources to which others of the
        same bytes can be added.

    Raises:
        PagedLoraError: As `LoraManager.register` for a source that cannot be used.
    """
    path = source.path
    directory = open_peft_directory(path, source.root)
    group = _core.SourceGroup(directory.source)
    plan = directory.plan(table, group)
    rows = RowTable(plan.rows, directory.tensors, table.names)
    real_path = os.path.realpath(path)
    content = AdapterContent(
        path, path if real_path == path else real_path, directory.file, directory.source, rows
    )
    return content, plan, group
