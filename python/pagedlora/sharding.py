"""Which part of a model's modules one rank of a tensor and pipeline parallel group has.

Tensor parallelism cuts a module by its outputs (a rank has rows of the weight: rows of B, of a bias
and of a DoRA scale, and the whole of A) or by its inputs (columns of the weight and of A, and the
whole of B; the ranks' results are added). Outputs may be several parts side by side, such as q, k
and v of a fused projection: each is cut on its own. Pipeline parallelism gives every rank some
neighbouring layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pagedlora import _core
from pagedlora.arguments import to_integer
from pagedlora.errors import InvalidArgumentError
from pagedlora.shown import counted, quoted

if TYPE_CHECKING:
    import torch

_MAX_RANKS = 2**20
How = Literal["none", "output", "input"]
Range = tuple[int, int]
"""First feature and number of features."""


class SplitPart(NamedTuple):
    """Neighbouring features that are cut among the ranks on their own.

    Attributes:
        length: How many there are.
        unit: Features that stay together, such as those of a head.
        may_repeat: Whether ranks may have the same unit where there are fewer units than ranks, as
            with heads of keys and values: rank r of n has unit r * units // n then.
    """

    length: int
    unit: int = 1
    may_repeat: bool = False


class ModuleSplit(NamedTuple):
    """How tensor parallelism cuts a module.

    Attributes:
        how: "none" (every rank has all of it), "output" or "input".
        parts: Of the outputs or inputs that are cut, in order; empty: they are one part.
    """

    how: How = "none"
    parts: tuple[SplitPart, ...] = ()


class Parallel(NamedTuple):
    """Sizes of a group, and which rank this is."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0

    def checked(self) -> Parallel:
        """The same.

        Raises:
            InvalidArgumentError: A size is below 1, or a rank not below its size.
        """
        for kind, size, rank in (
            ("tp", self.tp_size, self.tp_rank),
            ("pp", self.pp_size, self.pp_rank),
        ):
            to_integer(size, f"{kind}_size", 0, _MAX_RANKS)
            to_integer(rank, f"{kind}_rank", -1, _MAX_RANKS)
            if size < 1 or not 0 <= rank < size:
                raise InvalidArgumentError(
                    f"{kind}_size {size} and {kind}_rank {rank} are no rank of a group: give a "
                    f"size of 1 or more, and a rank from 0 to {kind}_size - 1"
                )
        return self


@dataclass(frozen=True, slots=True)
class ModuleShard:
    """What this rank has of a module.

    Attributes:
        local_index: Of the module in this rank's configuration.
        how: How the module is cut.
        features: The ranges of its outputs (inputs if it is cut by input) that are here, in order;
            here they lie back to back.
        is_first: Whether this is tensor parallel rank 0, which alone adds biases of modules that
            are cut by input.
    """

    local_index: int
    how: How
    features: tuple[Range, ...]
    is_first: bool = True


class Sharding:
    """A model and the part of it that one rank has; immutable.

    Attributes:
        parallel: Which rank.
        modules: All of the model's, whole.
        shards: For each of `modules`, what is here; None: it is on another pipeline rank.
        local_modules: This rank's, with their sizes here.
        splits: Name of a module to how it is cut.
    """

    __slots__ = ("_index", "local_modules", "modules", "parallel", "shards", "splits")

    def __init__(
        self,
        modules: Sequence[_core.LoraModule],
        splits: Mapping[str, ModuleSplit],
        parallel: Parallel,
        num_layers: int | None = None,
    ) -> None:
        """Cuts the modules; the same errors on every rank.

        Args:
            modules: All of the model's, whole.
            splits: By name; a module that is not there is not cut.
            parallel: Which rank.
            num_layers: Of the model; None: those that the modules are in.

        Raises:
            InvalidArgumentError: A module cannot be cut so, a pipeline rank would have no module,
                or the rank is impossible.
        """
        if num_layers is not None:
            to_integer(num_layers, "num_layers", 0)
        self.parallel = parallel.checked()
        self.modules = tuple(modules)
        self.splits = {m.name: splits.get(m.name, ModuleSplit()) for m in self.modules}
        owners = _pipeline_ranks(self.modules, parallel.pp_size, num_layers)
        local: list[_core.LoraModule] = []
        shards: list[ModuleShard | None] = []
        for module, owner in zip(self.modules, owners, strict=True):
            split = self.splits[module.name]
            features = split_features(module, split, parallel.tp_size, parallel.tp_rank)
            if owner != parallel.pp_rank:
                shards.append(None)
                continue
            shards.append(ModuleShard(len(local), split.how, features, parallel.tp_rank == 0))
            local.append(_local_module(module, split.how, sum(count for _, count in features)))
        self.shards = tuple(shards)
        self.local_modules = tuple(local)
        self._index = {module.name: index for index, module in enumerate(self.modules)}

    def weight_here(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of a base weight.

        Args:
            name: Of a module that is on this pipeline rank.
            weight: [out_features, in_features] of the whole module, or already this rank's part.

        Returns:
            The part; a view where it is one piece.
        """
        import torch

        module, shard = self.modules[self._index[name]], self.shards[self._index[name]]
        assert shard is not None
        whole = (module.out_features, module.in_features)
        if shard.how == "none" or tuple(weight.shape) != whole:
            return weight
        dim = 1 if shard.how == "input" else 0
        pieces = [weight.narrow(dim, first, count) for first, count in shard.features]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def split_features(
    module: _core.LoraModule, split: ModuleSplit, tp_size: int, tp_rank: int
) -> tuple[Range, ...]:
    """The ranges of a module's outputs, or of its inputs if those are cut, that a rank has.

    Args:
        module: Whole.
        split: How it is cut.
        tp_size: Number of ranks.
        tp_rank: Which.

    Returns:
        In order; neighbouring ranges are one.

    Raises:
        InvalidArgumentError: The parts are not the module's, or cannot be divided by the ranks.
    """
    total = module.in_features if split.how == "input" else module.out_features
    if split.how == "none":
        return ((0, total),)
    parts = split.parts or (SplitPart(total),)
    if split.how == "input" and len(parts) > 1:
        raise InvalidArgumentError(
            f"module {quoted(module.name)} has {len(parts)} parts of its inputs: inputs are "
            "one part"
        )
    kind = f"{split.how}s" if module.kind == _core.ModuleKind.linear else "rows of the vocabulary"
    if sum(part.length for part in parts) != total:
        raise InvalidArgumentError(
            f"module {quoted(module.name)} has {total} {kind}, and its parts "
            f"{[part.length for part in parts]} have {sum(part.length for part in parts)}: give "
            "the parts of the whole module"
        )
    ranges: list[Range] = []
    first = 0
    for part in parts:
        offset, count = _split_part(module.name, kind, part, tp_size, tp_rank)
        if ranges and sum(ranges[-1]) == first + offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + count)
        else:
            ranges.append((first + offset, count))
        first += part.length
    return tuple(ranges)


def layer_ranges(num_layers: int, pp_size: int) -> list[range]:
    """The layers of each pipeline rank: the first ones have one more where they are not even."""
    size, rest = divmod(num_layers, pp_size)
    starts = [rank * size + min(rank, rest) for rank in range(pp_size + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(pp_size)]


def sharding_of(config: _core.LoraModelConfig) -> Sharding | None:
    """How a configuration was cut; None: it is that of the whole model."""
    return getattr(config, "sharding", None)


def whole_modules(config: _core.LoraModelConfig) -> Sequence[_core.LoraModule]:
    """The modules of the whole model, as adapters have them."""
    sharding = sharding_of(config)
    return config.modules if sharding is None else sharding.modules


def _split_part(name: str, kind: str, part: SplitPart, tp_size: int, tp_rank: int) -> Range:
    units, rest = divmod(part.length, part.unit)
    if rest == 0 and units % tp_size == 0:
        count = part.length // tp_size
        return tp_rank * count, count
    if rest == 0 and part.may_repeat and tp_size % units == 0:
        return tp_rank * units // tp_size * part.unit, part.unit
    heads = "" if part.unit == 1 else f", {units} heads of {part.unit},"
    raise InvalidArgumentError(
        f"module {quoted(name)} cannot be split: {part.length} {kind}{heads} are not divisible by "
        f"tp_size {tp_size}. Way out: another tp_size, or split 'none' for the module, if every "
        "rank has the whole of it"
    )


def _pipeline_ranks(
    modules: Sequence[_core.LoraModule], pp_size: int, num_layers: int | None
) -> list[int]:
    """For each module the rank that has it.

    Embeddings outside of layers are on the first rank, other modules outside of layers, such as
    the output embedding, on the last.
    """
    used = max((module.layer_id for module in modules), default=-1) + 1
    num_layers = max(used, num_layers or 0)
    if pp_size > max(num_layers, 1):
        raise InvalidArgumentError(
            f"pp_size {pp_size} is more than the model's {counted(num_layers, 'layer')}: every "
            "pipeline rank needs one"
        )
    ranges = layer_ranges(num_layers, pp_size)
    outside = {_core.ModuleKind.embedding: 0, _core.ModuleKind.linear: pp_size - 1}
    owners = [
        next((r for r, layers in enumerate(ranges) if module.layer_id in layers), None)
        if module.layer_id >= 0
        else outside[module.kind]
        for module in modules
    ]
    for rank, layers in enumerate(ranges):
        if rank not in owners:
            raise InvalidArgumentError(
                f"pipeline rank {rank} of {pp_size}, layers {layers.start} to {layers.stop - 1}, "
                "would have no LoRA module: target a module of every layer, or use a smaller "
                "pp_size"
            )
    return [owner for owner in owners if owner is not None]


def _local_module(module: _core.LoraModule, how: How, count: int) -> _core.LoraModule:
    return _core.LoraModule(
        module.name,
        in_features=count if how == "input" else module.in_features,
        out_features=count if how == "output" else module.out_features,
        layer_id=module.layer_id,
        module_id=module.module_id,
        kind=module.kind,
    )
