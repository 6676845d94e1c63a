"""What the parts of a `LoraManager` share."""

from __future__ import annotations

from dataclasses import dataclass

from pagedlora import _core
from pagedlora.loaders.load_options import LoadOptions
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.open_adapter import AdapterSource
from pagedlora.loaders.shape_cache import ShapeCache
from pagedlora.registry.base_model import BaseModel
from pagedlora.registry.content import AdapterContent, parse_adapter
from pagedlora.registry.deadline import Deadline
from pagedlora.registry.generations import GenerationTable
from pagedlora.registry.host_pins import HostPins
from pagedlora.registry.names import NameTable
from pagedlora.registry.process_lock import ProcessLock


@dataclass(frozen=True, slots=True)
class RegistryParts:
    """The registry's tables and the one lock that guards them.

    Attributes:
        table: The model's modules.
        options: What adapters may be.
        base: What is known of the base model's weights.
        shapes: Of the adapters parsed last.
        lock: Never held while anybody hashes, reads or waits.
        generations: Contents.
        names: What they are called, and by whom they are used.
        pins: Holds in the host tier.
    """

    table: ModuleTable
    options: LoadOptions
    base: BaseModel
    shapes: ShapeCache
    lock: ProcessLock
    generations: GenerationTable
    names: NameTable
    pins: HostPins

    def parse(
        self, source: AdapterSource
    ) -> tuple[AdapterContent, _core.AdapterPlan, _core.SourceGroup]:
        """`parse_adapter` for this registry's model, options and base weights."""
        return parse_adapter(source, self.table, self.options, self.shapes, self.base)

    def digest(self, content: AdapterContent, deadline: Deadline) -> str:
        """`AdapterContent.digest` for this registry's model and options."""
        return content.digest(self.table, deadline, self.options)
