"""What would become of an adapter, without registering it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedlora.adapter_info import AdapterReport, report_of
from pagedlora.loaders.open_adapter import AdapterSource, open_adapter
from pagedlora.registry.content import parse_opened
from pagedlora.registry.parts import RegistryParts

if TYPE_CHECKING:
    from pagedlora.peft_cache import PeftCacheManager


def probe(source: AdapterSource, parts: RegistryParts, cache: PeftCacheManager) -> AdapterReport:
    """As `LoraManager.probe`."""
    adapter = open_adapter(source, parts.options)
    content, plan, _ = parse_opened(
        adapter,
        source.real_path(),
        parts.table,
        parts.options,
        shapes=parts.shapes,
        base=parts.base,
    )
    num_pages = cache.core.num_pages_of_plan(plan)
    return report_of(adapter, content.report, num_pages, cache.page_bytes)
