"""Pickles that hold tuples many times over: refused before anything hashes or prints them."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from tests.support.adapters import write_adapter
from tests.support.cache_fixtures import Cache

from pagedlora import AdapterFormatError, LoraManager
from pagedlora.loaders.pickle_sizes import MAX_ELEMENTS, largest_tuple
from pagedlora.loaders.pickled import load_pickle

_KEY = b"X\x01\x00\x00\x00x"  # the text "x"


def bomb(doublings: int, *, as_key: bool) -> bytes:
    """A pickle of a dictionary with a tuple of 2 to that power elements, or one that has it as key.

    Made by hand: Python would have to hash the key to write it.
    """
    operations = [b"\x80\x02}", _KEY, _KEY, b"\x85q\x00s"]  # {"x": ("x",)}, remembered as 0
    for number in range(doublings):
        old, new = bytes([number]), bytes([number + 1])
        operations += [_KEY, b"h", old, b"h", old, b"\x86q", new, b"s"]
    if as_key:
        operations += [b"h", bytes([doublings]), b"K\x01s"]
    return b"".join([*operations, b"."])


def archive_of(content: bytes) -> bytes:
    """What torch.save writes, with another pickle in it."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(changed, "w") as new:
        for record in old.infolist():
            is_pickle = record.filename.endswith("data.pkl")
            new.writestr(record.filename, content if is_pickle else old.read(record))
    return changed.getvalue()


@pytest.mark.parametrize("as_key", [True, False], ids=["key", "value"])
@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "legacy"])
def test_a_tuple_of_endless_elements_is_refused(
    small_cache: Cache, tmp_path: Path, is_archive: bool, as_key: bool
) -> None:
    """A kilobyte that would take years."""
    content = bomb(200, as_key=as_key)
    if is_archive:
        content = archive_of(content)
    else:
        content = b"".join(pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {})) + content
    directory = write_adapter(tmp_path / "a", {}, r=4, target_modules=["q_proj"])
    (directory / "adapter_model.safetensors").unlink()
    (directory / "adapter_model.bin").write_bytes(content)
    manager = LoraManager(small_cache.config, small_cache.peft, allow_pickle=True)
    with pytest.raises(AdapterFormatError, match=f"more than {MAX_ELEMENTS} elements") as refused:
        manager.register("a", directory)
    assert refused.value.path.endswith("adapter_model.bin")
    assert len(manager) == 0


def test_sizes_are_counted_as_often_as_they_are_held() -> None:
    for doublings in range(8):
        # t = 1 + 2 t of the one before, from a tuple of one element
        size = 2 ** (doublings + 1) + 2**doublings - 1
        assert largest_tuple(io.BytesIO(bomb(doublings, as_key=True))) == size


def test_pickles_of_tensors_have_small_tuples(tmp_path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.zeros(2, 3, 4) for i in range(300)}
    path = tmp_path / "a.bin"
    for is_new in (True, False):
        torch.save(tensors, path, _use_new_zipfile_serialization=is_new)
        with path.open("rb") as file:
            assert load_pickle(file, str(path)).keys() == tensors.keys()


@pytest.mark.parametrize("content", [b"", b"(", b"t.", b"q\x00.", b"\x86.", b"s.", b"\xff", b"0."])
def test_what_is_no_pickle_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        largest_tuple(io.BytesIO(content))
