"""From an adapter's modules, whole, to what one rank of a parallel group loads of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagedlora.loaders.bound import BoundModule
from pagedlora.loaders.stored import MatrixPair, ModuleVectors, StoredTensor, element_bytes, rows_of
from pagedlora.sharding import ModuleShard, Range, Sharding


def local_modules(modules: Iterable[BoundModule], sharding: Sharding) -> tuple[BoundModule, ...]:
    """What this rank has of an adapter's modules.

    Args:
        modules: Whole, as the model has them.
        sharding: The model, and which rank this is.

    Returns:
        With indices, slices and tensors of this rank's modules. A module whose outputs here come
        from several places has one for each; one on another pipeline rank has none. All ranks of a
        tensor parallel group have the same number of rows, of equal shapes, so that they need the
        same pages: a module that is cut by input has a bias everywhere, of zeros but on rank 0.
    """
    local: list[BoundModule] = []
    for module in modules:
        shard = sharding.shards[module.module_index]
        if shard is None:
            continue
        local_module = module._replace(module_index=shard.local_index)
        if shard.how == "input":
            local.append(_by_input(local_module, shard))
        elif shard.how == "output":
            local.extend(_by_output(local_module, shard))
        else:
            local.append(local_module)
    return tuple(local)


def _by_input(module: BoundModule, shard: ModuleShard) -> BoundModule:
    """Columns of A; everything else is whole."""
    ((first, count),) = shard.features
    whole = module.pair.a
    rank, in_features = whole.shape
    columns = whole._replace(
        shape=[rank, count], offset=whole.offset + first * element_bytes(whole.dtype)
    )
    return module._replace(
        pair=MatrixPair(columns, module.pair.b),
        whole_a=whole,
        a_row_stride=in_features,
        has_zero_bias=module.vectors.bias is not None and not shard.is_first,
    )


def _by_output(module: BoundModule, shard: ModuleShard) -> Iterator[BoundModule]:
    """The whole of A, and rows of everything else."""
    first, count = module.out_slice or (0, module.pair.b.shape[0])
    local_count = sum(length for _, length in shard.features)
    for begin, length, local_first in _overlaps((first, count), shard.features):

        def cut(tensor: StoredTensor, begin: int = begin, length: int = length) -> StoredTensor:
            return rows_of(tensor, begin - first, length)

        is_all = length == local_count
        yield module._replace(
            pair=MatrixPair(module.pair.a, cut(module.pair.b)),
            vectors=ModuleVectors(*(v and cut(v) for v in module.vectors)),
            out_slice=None if is_all else (local_first, length),
        )


def _overlaps(wanted: Range, here: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
    """Where a range of outputs meets those that are here: first, length, and first one here."""
    local_first = 0
    for first, count in here:
        begin, end = max(first, wanted[0]), min(first + count, sum(wanted))
        if begin < end:
            yield begin, end - begin, local_first + begin - first
        local_first += count
