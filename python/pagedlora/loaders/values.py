"""Looks for values that no adapter can have: NaN, infinity, and such as the cache's type lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagedlora import _core
from pagedlora.errors import AdapterFormatError
from pagedlora.shown import quoted

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Bits(NamedTuple):
    """How a stored type's values lie in bits, little-endian.

    Attributes:
        dtype: An unsigned integer of the same size.
        magnitude: All bits but the sign's. Magnitudes are in the order of their values.
        infinity: From here on magnitudes are infinity and NaN.
        over: Target type to the first magnitude that becomes infinity in it, rounded to nearest.
    """

    dtype: str
    magnitude: int
    infinity: int
    over: dict[_core.Dtype, int]


_FLOAT16, _BFLOAT16 = _core.Dtype.float16, _core.Dtype.bfloat16
_BITS = {
    # 65520 and 2^128 - 2^119, half-way to the next power of two: ties go to it.
    "F32": _Bits("<u4", 0x7FFFFFFF, 0x7F800000, {_FLOAT16: 0x477FF000, _BFLOAT16: 0x7F7F8000}),
    # 65280 is the last bfloat16 below 65520.
    "BF16": _Bits("<u2", 0x7FFF, 0x7F80, {_FLOAT16: 0x4780}),
    "F16": _Bits("<u2", 0x7FFF, 0x7C00, {}),
}


class ValueCheck:
    """Checks one adapter's matrices as they are read. Not thread-safe."""

    def __init__(self, path: str, target: _core.Dtype | None) -> None:
        """Checks nothing yet.

        Args:
            path: Named in errors.
            target: The cache's type; None: the range is not checked.
        """
        self._path = path
        self._target = target
        self._scratch = np.empty(0, np.uint8)

    def pass_on(
        self, tensor: str, dtype: str, pieces: Iterable[Buffer], *, is_vector: bool = False
    ) -> Iterator[Buffer]:
        """Hands on the bytes of a matrix, after looking at them.

        Args:
            tensor: Named in errors.
            dtype: As safetensors spells it.
            pieces: The bytes, cut anywhere.
            is_vector: Whether the cache keeps it in float32 whatever its type.

        Raises:
            AdapterFormatError: A value is NaN or infinite, or over the range of the target.
        """
        bits, rest = _BITS[dtype], b""
        item_bytes = np.dtype(bits.dtype).itemsize
        for piece in pieces:
            data = memoryview(rest + bytes(piece) if rest else piece)
            count = data.nbytes // item_bytes
            self._look(tensor, bits, np.frombuffer(data, bits.dtype, count), is_vector)
            rest = bytes(data[count * item_bytes :])
            yield piece

    def _look(self, tensor: str, bits: _Bits, values: np.ndarray, is_vector: bool) -> None:
        if values.size == 0:
            return
        if self._scratch.nbytes < values.nbytes:
            self._scratch = np.empty(values.nbytes, np.uint8)
        magnitudes = self._scratch[: values.nbytes].view(bits.dtype)
        np.bitwise_and(values, magnitudes.dtype.type(bits.magnitude), out=magnitudes)
        largest = int(magnitudes.max())
        if largest >= bits.infinity:
            raise self._error(tensor, "has values that are NaN or infinite")
        target = None if is_vector else self._target
        limit = None if target is None else bits.over.get(target)
        if limit is not None and largest >= limit:
            raise self._error(
                tensor,
                f"has values over the range of the cache's type, {self._target}: use a cache of "
                "dtype='float32'",
            )

    def _error(self, tensor: str, problem: str) -> AdapterFormatError:
        return AdapterFormatError(
            f"tensor {quoted(tensor)} of {quoted(self._path)} {problem}",
            path=self._path,
            tensor=tensor,
        )
