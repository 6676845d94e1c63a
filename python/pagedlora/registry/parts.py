"""What the parts of a `LoraManager` share."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from pagedlora.loaders.load_options import LoadOptions
from pagedlora.loaders.module_table import ModuleTable
from pagedlora.loaders.shape_cache import ShapeCache
from pagedlora.registry.base_model import BaseModel
from pagedlora.registry.generations import GenerationTable
from pagedlora.registry.host_pins import HostPins
from pagedlora.registry.names import NameTable


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
    lock: threading.RLock
    generations: GenerationTable
    names: NameTable
    pins: HostPins
