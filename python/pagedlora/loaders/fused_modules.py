"""Names of modules that one model has fused and another one split: q, k and v, gate and up.

A fused module computes its parts side by side: its outputs are theirs, in the map's order. So an
adapter for parts fits the fused module, as rows for slices of its outputs; and an adapter for a
fused module fits the parts, each with the rows of B (of a bias, of DoRA's magnitude) that are its
own, and the whole of A.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pagedlora.errors import InvalidArgumentError
from pagedlora.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FusedModules = Mapping[str, Mapping[str, int]]
"""Last part of a fused module's name to its parts, in order: last part of the name to outputs."""


class Part(NamedTuple):
    """A part of a fused module.

    Attributes:
        fused: Last part of the fused module's name.
        first: Its first output there.
        length: How many outputs it has.
        total: Outputs of all parts.
    """

    fused: str
    first: int
    length: int
    total: int


def _are_parts(parts: object) -> bool:
    if not isinstance(parts, Mapping) or len(parts) < 2:  # noqa: PLR2004
        return False
    return all(isinstance(length, int) and length >= 1 for length in parts.values())


class FusedNames:
    """The map in both directions. Immutable."""

    __slots__ = ("_parts", "fused")

    def __init__(self, fused: FusedModules) -> None:
        """Checks the map.

        Raises:
            InvalidArgumentError: A module has fewer than two parts, a part no outputs, or two fused
                modules have a part of one name.
        """
        if not isinstance(fused, Mapping):
            raise InvalidArgumentError(f"fused_modules is {shown(fused)}: it must be a dictionary")
        self._parts: dict[str, Part] = {}
        for name, parts in fused.items():
            if not _are_parts(parts):
                raise InvalidArgumentError(
                    f"fused_modules[{shown(name)}] is {shown(parts)}: it needs two parts or more, "
                    "each with its number of outputs"
                )
            first = 0
            for part, length in parts.items():
                if part in self._parts:
                    raise InvalidArgumentError(
                        f"fused_modules has part {shown(part)} in {self._parts[part].fused!r} and "
                        f"in {shown(name)}: it can be in one only"
                    )
                self._parts[part] = Part(name, first, length, sum(parts.values()))
                first += length
        self.fused = {name: tuple(parts) for name, parts in fused.items()}

    def part(self, module: str) -> Part | None:
        """What a module is a part of, by the last part of its name."""
        return self._parts.get(last_part(module))

    def parts(self, module: str) -> tuple[str, ...]:
        """Names of the parts of a fused module, by the last part of its name; empty: it is none."""
        return self.fused.get(last_part(module), ())


def last_part(module: str) -> str:
    """What a module's name ends with, after its last dot."""
    return module[module.rfind(".") + 1 :]


def renamed(module: str, last: str) -> str:
    """A module's name with another last part."""
    return module[: module.rfind(".") + 1] + last


def fused_modules_of(config: PreTrainedConfig) -> dict[str, dict[str, int]]:
    """The fused modules of decoders, by the names that Hugging Face models give them.

    Args:
        config: Of a model; gives the sizes.

    Returns:
        `qkv_proj` of q_proj, k_proj, v_proj and `gate_up_proj` of gate_proj, up_proj, as far as the
        configuration says how large they are. A model with other names or another order has
        modules of other names; sizes that do not add up are refused where they are used.
    """
    text = config.get_text_config(decoder=True)
    fused: dict[str, dict[str, int]] = {}
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if heads and hidden:
        width = getattr(text, "head_dim", None) or hidden // heads
        kv = (getattr(text, "num_key_value_heads", None) or heads) * width
        fused["qkv_proj"] = {"q_proj": heads * width, "k_proj": kv, "v_proj": kv}
    inner = getattr(text, "intermediate_size", None)
    if isinstance(inner, int) and inner > 0:
        fused["gate_up_proj"] = {"gate_proj": inner, "up_proj": inner}
    return fused
