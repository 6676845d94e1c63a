"""What is said about names and generations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedlora.adapter_info import AdapterInfo
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.registry.generations import Generation
from pagedlora.registry.names import NameEntry, NameTable, Owners

if TYPE_CHECKING:
    from pagedlora.peft_cache import PeftCacheManager


class Describer:
    """Makes `AdapterInfo`s. The caller holds the registry's lock."""

    def __init__(self, table: ModuleTable, cache: PeftCacheManager, names: NameTable) -> None:
        self._table = table
        self._cache = cache
        self._names = names

    def name(self, entry: NameEntry, owners: Owners) -> AdapterInfo:
        """A name, whose owners are those of a moment ago."""
        ids = self._names.owners(entry, owners)
        return self._info(entry.name, entry.path, entry.generation, entry.pins > 0, ids)

    def generation(self, generation: Generation, owners: Owners) -> AdapterInfo:
        """A generation without a name."""
        ids = owners.of(generation.task_id)
        return self._info(generation.last_name, generation.content.path, generation, False, ids)

    def _info(
        self, name: str, path: str, generation: Generation, pinned: bool, ids: frozenset[int]
    ) -> AdapterInfo:
        rows = generation.content.rows
        modules = rows.labels(self._table)
        task_id = generation.task_id
        host = ("host",) if self._cache.is_task_cached(task_id) else ()
        device = ("device",) if self._cache.is_task_cached_device(task_id) else ()
        return AdapterInfo(
            name=name,
            path=path,
            task_id=task_id,
            generation=generation.digest,
            ranks=dict(zip(modules, rows.ranks, strict=True)),
            scales=dict(zip(modules, rows.scales, strict=True)),
            report=generation.content.report,
            num_pages=generation.num_pages,
            bytes=generation.num_pages * self._cache.page_bytes,
            tiers=host + device,
            pinned=pinned,
            owners=ids,
        )
