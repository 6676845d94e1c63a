"""The pages of a cache's device tier as tensors of torch, without a copy.

On the CPU and on a GPU alike, so that what reads pages by torch is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.utils.dlpack import from_dlpack

from pagedlora import _core

if TYPE_CHECKING:
    from pagedlora.peft_cache import PeftCacheManager

Tiles: TypeAlias = Iterable[tuple[int, int]]
"""Number of features, and address of the first."""


class Row(NamedTuple):
    """One row of an adapter. What lies in one piece is a view of its page.

    Attributes:
        a: [rank, in length], of the cache's type.
        b: [out length, rank], likewise.
        bias: [out length] float32; None: it has none.
        dora_scale: Likewise.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    dora_scale: torch.Tensor | None


class PoolView:
    """Reads a device tier. Keeps the tier's memory for as long as the view lives; thread-safe."""

    def __init__(self, cache: PeftCacheManager, device: torch.device) -> None:
        """Makes the view.

        Args:
            cache: Its pages are read only while a lease or a pin holds them.
            device: Where the device tier lies: the CPU, or a GPU with its index.
        """
        ordinal = device.index if device.type == "cuda" else None
        pool = from_dlpack(_core.device_pool_to_dlpack(cache.core, ordinal))
        self._base = pool.data_ptr()
        self._elements = pool.view(getattr(torch, cache.model_config.dtype.name))
        self._floats = pool.view(torch.float32)

    def row(self, pages: _core.RowPages) -> Row:
        """The matrices of a row of a linear module; gathered if they lie in several pieces."""
        return Row(
            _joined([_joined(self._a_tiles(tiles, ranks), 1) for ranks, tiles in pages.a], 0),
            self.b(pages),
            self.vector(pages.bias),
            self.vector(pages.dora_scale),
        )

    def b(self, pages: _core.RowPages) -> torch.Tensor:
        """B [out length, rank]."""
        return _joined([_joined(self._b_tiles(tiles, ranks), 0) for ranks, tiles in pages.b], 1)

    def columns(self, pages: _core.RowPages, tokens: torch.Tensor) -> torch.Tensor:
        """Columns of an embedding's A.

        Args:
            pages: Of the row.
            tokens: [n] int64, counted from the row's first, within its slice.

        Returns:
            [n, rank], of the cache's type.
        """
        return _joined([self._columns_of_block(*block, tokens) for block in pages.a], 1)

    def vector(self, tiles: Tiles) -> torch.Tensor | None:
        """A bias or a DoRA scale; None for no tiles."""
        pieces = [
            self._floats.as_strided((length,), (1,), (address - self._base) // 4)
            for length, address in tiles
        ]
        return _joined(pieces, 0) if pieces else None

    def _a_tiles(self, tiles: Tiles, ranks: int) -> list[torch.Tensor]:
        return [self._matrix(address, ranks, length) for length, address in tiles]

    def _b_tiles(self, tiles: Tiles, ranks: int) -> list[torch.Tensor]:
        return [self._matrix(address, length, ranks) for length, address in tiles]

    def _columns_of_block(self, ranks: int, tiles: Tiles, tokens: torch.Tensor) -> torch.Tensor:
        """One look-up: where a tile would begin if it had the tokens before it as well."""
        ends, starts, end = [], [], 0
        for length, address in tiles:
            starts.append(self._offset(address) - end * ranks)
            end += length
            ends.append(end)
        tile = torch.bucketize(tokens, torch.tensor(ends, device=tokens.device), right=True)
        at = torch.tensor(starts, device=tokens.device)[tile] + tokens * ranks
        return self._elements[at[:, None] + torch.arange(ranks, device=tokens.device)]

    def _matrix(self, address: int, rows: int, columns: int) -> torch.Tensor:
        return self._elements.as_strided((rows, columns), (columns, 1), self._offset(address))

    def _offset(self, address: int) -> int:
        return (address - self._base) // self._elements.element_size()


def _joined(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
