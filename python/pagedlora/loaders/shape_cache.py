"""What parsing gives, shared by adapters of one shape, so that 10,000 start in seconds.

Two adapters have one shape if they came in the same way, the used fields of their configurations
are equal, and their weights files have equal headers, byte by byte, and equal sizes. All that
parsing gives follows from these.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from pagedlora.loaders.binding import BoundAdapter
from pagedlora.loaders.digest import RowTable
from pagedlora.loaders.peft_config import PeftLoraConfig
from pagedlora.loaders.source_file import SourceFile

MAX_SHAPES = 32
"""The least recently used shapes beyond so many are parsed again when they are met."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What a model's adapters of one shape have in common. Immutable.

    Attributes:
        adapter: Its modules, as the model has them.
        rows: The same, compact, as every adapter of the shape keeps them.
    """

    adapter: BoundAdapter
    rows: RowTable


class ShapeCache:
    """The shapes met last, of one model. Thread-safe."""

    def __init__(self) -> None:
        """Starts empty."""
        self._lock = threading.Lock()
        self._shapes: OrderedDict[bytes, AdapterShape] = OrderedDict()

    def find(self, key: bytes) -> AdapterShape | None:
        """The shape of a key; None if it was not met, or too long ago."""
        with self._lock:
            shape = self._shapes.get(key)
            if shape is not None:
                self._shapes.move_to_end(key)
            return shape

    def add(self, key: bytes, shape: AdapterShape) -> None:
        """Remembers a shape that was parsed without an error."""
        with self._lock:
            self._shapes[key] = shape
            self._shapes.move_to_end(key)
            while len(self._shapes) > MAX_SHAPES:
                self._shapes.popitem(last=False)

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._shapes.clear()


def shape_key(form: str, config: PeftLoraConfig, file: SourceFile) -> bytes | None:
    """What two adapters of one shape have in common; reads the header's bytes.

    Args:
        form: How the names in the header are to be read.
        config: Of the adapter.
        file: Its weights.

    Returns:
        A digest; None if the file can have no header, which parsing will say.

    Raises:
        AdapterNotFoundError: The file is gone.
        AdapterReadError: The system will not read it.
        AdapterSourceChangedError: It is not the file that it was, or was written to meanwhile.
    """
    size_bytes = file.identity.size_bytes
    if size_bytes < _LENGTH_BYTES:
        return None
    digest = hashlib.sha256(repr((form, config.key(), size_bytes)).encode(errors="surrogatepass"))
    with file.open() as read:
        length = b"".join(bytes(piece) for piece in read(0, _LENGTH_BYTES))
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
            return None
        for piece in read(_LENGTH_BYTES, header_bytes):
            digest.update(piece)
    return digest.digest()
