"""How many bytes two other ways of sizing would give a set of adapters. Pure arithmetic.

TensorRT-LLM: all modules are measured in slots of the smallest module's rank-1 size; a page holds
what an adapter of the "optimal" rank needs, or the largest row if that is more; rows are laid down
next fit, none across a page border, and a page belongs to one adapter.

Maximum-rank slots: every adapter gets room for the largest rank on every module that any adapter of
the set touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPTIMAL_RANK = 8  # TensorRT-LLM's default for optimal_adapter_size

Adapter = Sequence[tuple[int, int]]  # (module index, rank) of its rows, in model order


@dataclass(frozen=True)
class TrtllmPages:
    """The geometry of TensorRT-LLM's pages, in elements.

    Attributes:
        slot_elements: Size of a slot.
        slots_per_page: Slots of a page.
    """

    slot_elements: int
    slots_per_page: int

    @classmethod
    def of_model(cls, features: Sequence[int], max_rank: int) -> TrtllmPages:
        """The pages for a model.

        Args:
            features: in_features + out_features of every module that may carry LoRA, all layers.
            max_rank: Largest rank that must be possible.
        """
        slot = min(features)
        optimal = min(OPTIMAL_RANK, max_rank)
        whole_adapter = sum(optimal * -(-size // slot) for size in features)
        largest_row = -(-max_rank * max(features) // slot)
        return cls(slot, max(whole_adapter, largest_row))

    def elements_of(self, features: Sequence[int], adapter: Adapter) -> int:
        """Elements of the pages that an adapter takes."""
        pages, used = 1, 0
        for module, rank in adapter:
            slots = -(-rank * features[module] // self.slot_elements)
            if used + slots > self.slots_per_page:
                pages, used = pages + 1, 0
            used += slots
        return pages * self.slots_per_page * self.slot_elements


def payload_elements(features: Sequence[int], adapter: Adapter) -> int:
    """Elements of an adapter's weights."""
    return sum(rank * features[module] for module, rank in adapter)


def touched_modules(fleet: Sequence[Adapter]) -> list[int]:
    """Modules that any adapter touches."""
    return sorted({module for adapter in fleet for module, _ in adapter})


def trtllm_utilisation(features: Sequence[int], fleet: Sequence[Adapter]) -> float:
    """Share of page bytes that are weights when TensorRT-LLM is configured for just this fleet."""
    max_rank = max(rank for adapter in fleet for _, rank in adapter)
    pages = TrtllmPages.of_model([features[m] for m in touched_modules(fleet)], max_rank)
    total = sum(pages.elements_of(features, adapter) for adapter in fleet)
    return sum(payload_elements(features, adapter) for adapter in fleet) / total


def slot_utilisation(features: Sequence[int], fleet: Sequence[Adapter]) -> float:
    """Share of slot bytes that are weights when every adapter gets the largest one's room."""
    max_rank = max(rank for adapter in fleet for _, rank in adapter)
    slot = max_rank * sum(features[module] for module in touched_modules(fleet))
    return sum(payload_elements(features, adapter) for adapter in fleet) / (slot * len(fleet))
