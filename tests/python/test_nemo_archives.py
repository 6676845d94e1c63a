"""NeMo archives from anybody: each gives an adapter or a typed error, and unpacks to no more."""

from __future__ import annotations

import gc
import gzip
import io
import os
import resource
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.nemo import (
    CONFIG,
    WEIGHTS,
    Heads,
    draw_pairs,
    member,
    pickled,
    state_of,
    tar_of,
    write_nemo,
)

from pagedlora import (
    AdapterFormatError,
    AdapterReadError,
    PagedLoraError,
    UnsupportedAdapterError,
    probe_adapter,
)
from pagedlora.loaders import nemo_archive
from pagedlora.loaders import pickled as pickles

pytestmark = pytest.mark.slow

HEADS = Heads(heads=4, groups=2, size=4)
CONTENT = yaml.safe_dump(HEADS.fields()).encode()
STATE = pickled(state_of(HEADS, draw_pairs(HEADS, [0], 2, seed=1)))
GOOD = [member(CONFIG, CONTENT), member(WEIGHTS, STATE)]


@pytest.fixture(autouse=True)
def private_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made in these tests."""
    root = tmp_path / "private"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def probe(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return probe_adapter(path, allow_pickle=True)


def refuse(
    tmp_path: Path,
    content: bytes,
    words: str,
    error: type[PagedLoraError] = AdapterFormatError,
) -> None:
    """Expects a typed error, and that nothing was written anywhere."""
    before = set(tmp_path.rglob("*"))
    with pytest.raises(error, match=words) as caught:
        probe(tmp_path / "a.nemo", content)
    assert len(str(caught.value)) < 1000
    del caught
    gc.collect()
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "a.nemo"}


def test_a_good_one_is_read_and_other_files_in_it_do_not_count(tmp_path: Path) -> None:
    others = [
        member("./", type=tarfile.DIRTYPE),
        member("tokenizer.model", b"x" * 1000),
        member("sub/", type=tarfile.DIRTYPE),
        member("sub/model_config.yaml", b"not: this"),
    ]
    assert probe(tmp_path / "a.nemo", tar_of(others + GOOD)).num_tensors == 2
    assert probe(tmp_path / "b.nemo", gzip.compress(tar_of(GOOD + others))).num_tensors == 2


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_styles_of_tar_are_read(tmp_path: Path, style: int) -> None:
    """As `tarfile` writes them from files, with times that need a header of their own."""
    for info, content in GOOD:
        (tmp_path / info.name).write_bytes(content)
        os.utime(tmp_path / info.name, (1.25, 1.25))
    with tarfile.open(tmp_path / "a.nemo", "w:gz", format=style) as archive:
        archive.add(tmp_path / CONFIG, arcname=f"./{CONFIG}")
        archive.add(tmp_path / WEIGHTS, arcname=f"./{WEIGHTS}")
    assert probe_adapter(tmp_path / "a.nemo", allow_pickle=True).num_tensors == 2


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", f"../{CONFIG}", f"/{WEIGHTS}", f"x/../{CONFIG}"]
)
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    refuse(tmp_path, tar_of([*GOOD, member(name, b"x")]), "leads out of the archive")


TYPES = {
    "symbolic link": tarfile.SYMTYPE,
    "hard link": tarfile.LNKTYPE,
    "character device": tarfile.CHRTYPE,
    "block device": tarfile.BLKTYPE,
    "fifo": tarfile.FIFOTYPE,
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["x", WEIGHTS])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(STATE)
    bad = member(name, type=TYPES[kind], linkname=str(target), devmajor=1, devminor=5)
    refuse(tmp_path, tar_of([GOOD[0], bad, GOOD[1]]), "neither a regular file nor a directory")


def sparse() -> bytes:
    """A file of 2^40 bytes, of which nothing is there."""
    info, _ = member(WEIGHTS)
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"00000000000\0", b"00000000000\0"
    header[483:495] = b"%011o\0" % (2**32)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_sparse_files_are_refused(tmp_path: Path) -> None:
    content = tar_of([GOOD[0]])
    content = content[: content.rindex(CONTENT) // 512 * 512 + 512]
    refuse(tmp_path, content + sparse() + bytes(1024), "neither a regular file nor a directory")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_members_that_are_missing_or_there_twice_are_refused(tmp_path: Path, name: str) -> None:
    without = [(info, content) for info, content in GOOD if info.name != name]
    twice = [each for each in GOOD if each[0].name == name]
    refuse(tmp_path, tar_of(without), f"has no member '{name}': it has 'model_")
    refuse(tmp_path, tar_of(GOOD + twice), f"has '{name}' twice")
    dotted = [member(f"./{info.name}", content) for info, content in twice]
    refuse(tmp_path, tar_of(GOOD + dotted), f"has '{name}' twice")
    directory = [member(f"{name}/", type=tarfile.DIRTYPE)]
    refuse(tmp_path, tar_of(without + directory), f"has no member '{name}'")


def test_weights_of_ranks_are_refused_with_a_way_out(tmp_path: Path) -> None:
    ranks = [member(f"./tp_rank_0{rank}/{WEIGHTS}", STATE) for rank in range(2)]
    words = "tp_rank_00/model_weights.ckpt', the weights of one of several ranks. Way out"
    refuse(tmp_path, tar_of([GOOD[0], *ranks]), words, UnsupportedAdapterError)


@pytest.mark.parametrize("zipped", [False, True])
def test_wherever_it_is_cut_off_it_is_refused(tmp_path: Path, zipped: bool) -> None:
    whole = tar_of(GOOD)
    data_end = 512 + len(CONTENT) + -len(CONTENT) % 512 + 512 + len(STATE)
    content = gzip.compress(whole) if zipped else whole
    end = len(content) - 9 if zipped else data_end
    for length in sorted({0, 1, 2, 100, 511, 512, 513, 700, 1024, 1600, end // 2, end - 1}):
        if length < end:
            refuse(tmp_path, content[:length], "cut off|has no member|is no tar archive")


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 5000, b"PK\x03\x04" + bytes(600), bytes(10240), b"\x1f\x8b" + b"x" * 600],
    ids=["empty", "letters", "zip", "zeros", "gzip of nothing"],
)
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    refuse(tmp_path, content, "is no tar archive|has no member")


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(tar_of(GOOD)))
    content[len(content) // 2] ^= 0xFF
    refuse(tmp_path, bytes(content), "cut off|has no member|headers that cannot be|is not a pickle")


# ---- limits ------------------------------------------------------------------------------------


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_sizes_are_looked_at_before_anything_is_read(tmp_path: Path) -> None:
    """A header may say what it likes."""
    before = peak_bytes()
    for name in (WEIGHTS, "tokenizer.model"):
        huge = tar_of([GOOD[0], member(name, size=1 << 60)], format=tarfile.GNU_FORMAT)
        refuse(tmp_path, huge, f"has '{name}' of {1 << 60} bytes, over the limit of 8")
    config = tar_of([member(CONFIG, CONTENT + b" " * (256 << 10)), GOOD[1]])
    refuse(tmp_path, config, f"'{CONFIG}' of .* over the limit of {256 << 10}")
    assert peak_bytes() - before < 64 << 20


def test_the_limit_is_for_all_members_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MAX_PICKLE_BYTES", 1 << 20)
    others = [member(f"x{number}", bytes(700 << 10)) for number in range(2)]
    refuse(
        tmp_path, gzip.compress(tar_of(others + GOOD)), "'x1' of 716800 bytes, over the limit of"
    )


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.model"])
def test_what_unpacks_to_many_times_its_size_is_refused_early(tmp_path: Path, name: str) -> None:
    """Else a megabyte fills a disk."""
    content = gzip.compress(tar_of([GOOD[0], member(name, bytes(64 << 20))]), 1)
    assert len(content) < 64 << 13
    refuse(tmp_path, content, "unpacks to over 100 times its bytes")
    text = [member("tokenizer.model", b"x" * (8 << 20))]
    assert probe(tmp_path / "a.nemo", gzip.compress(tar_of(text + GOOD))).num_tensors == 2


def test_negative_sizes_are_refused(tmp_path: Path) -> None:
    bad = tar_of([GOOD[0], member(WEIGHTS, pax_headers={"size": "-512"})])
    refuse(tmp_path, bad, "of -512 bytes, over the limit")


def long_header(kind: bytes, content: bytes) -> bytes:
    """A header that describes the next member, of any length."""
    info, _ = member("x", content, type=kind)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_headers_of_headers_are_bounded(tmp_path: Path, kind: bytes) -> None:
    """A few kilobytes that unpack to a terabyte must not be in memory."""
    info, _ = member("x", type=kind, size=1 << 40)
    content = info.tobuf(tarfile.GNU_FORMAT) + bytes(4 << 20)
    refuse(tmp_path, gzip.compress(content, 1), "over 262144 bytes of headers")


def test_a_chain_of_headers_is_refused(tmp_path: Path) -> None:
    chain = long_header(b"x", b"9 a=bcde\n") * 4000
    refuse(tmp_path, gzip.compress(chain), "over 262144 bytes of headers")


def test_many_members_are_refused(tmp_path: Path) -> None:
    many = [member(f"x{number}") for number in range(nemo_archive.MAX_MEMBERS)]
    refuse(tmp_path, tar_of(many + GOOD), f"more than {nemo_archive.MAX_MEMBERS} members")


def test_a_full_disk_is_an_error_of_reading(
    tmp_path: Path, private_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_root.rmdir()
    with pytest.raises(AdapterReadError):
        probe(tmp_path / "a.nemo", tar_of(GOOD))
    private_root.mkdir()


# ---- the configuration -------------------------------------------------------------------------

BOMB = b"a: &a [x]\n" + b"".join(
    b"%c: &%c [*%c,*%c]\n" % (n + 1, n + 1, n, n) for n in range(97, 120)
)
YAMLS: dict[str, tuple[bytes, str]] = {
    "aliases": (BOMB, "aliases are not allowed"),
    "merges": (b"a: &a {x: 1}\nb: {<<: *a}", "aliases are not allowed"),
    "a call": (b"!!python/object/apply:os.mkdir ['{mark}']", "is no YAML"),
    "a list": (b"[1, 2]", "list instead of fields by name"),
    "nothing": (b"", "NoneType instead of fields by name"),
    "no text": (b"\xff\xfe\x00", "is no YAML"),
    "deep": (b"[" * 20000, "is no YAML"),
    "a long number": (b"num_attention_heads: " + b"9" * 5000, "is no YAML|a number"),
    "a key that is there twice": (CONTENT + b"hidden_size: 16\n", "there twice.*'hidden_size'"),
    "a key twice deep inside": (b"a: {b: [{alpha: 1, alpha: 2}]}", "there twice.*'alpha'"),
    "a long hexadecimal number": (b"hidden_size: 0x" + b"f" * 9000, "number of 9002 characters"),
    "a sexagesimal number": (b"hidden_size: 1" + b":1" * 90000, "number of 180001 characters"),
    "a sexagesimal fraction": (b"a: 1" + b":1" * 900 + b".5", "number of 1803 characters"),
    "a long alpha": (b"lora: {alpha: " + b"9" * 400 + b"}", "number of 400 characters"),
    "many values": (b"a: [" + b"1," * 20000 + b"]", "over 10000 values"),
    "a key of a list": (b"? [1]\n: 2", "is no YAML"),
    "an open bracket": (b"{a: [", "is no YAML"),
    "a date that is none": (b"a: 2001-99-99", "is no YAML"),
}


@pytest.mark.parametrize("name", YAMLS)
def test_configurations_that_are_no_plain_yaml_are_refused(tmp_path: Path, name: str) -> None:
    content, words = YAMLS[name]
    mark = tmp_path / "mark"
    content = content.replace(b"{mark}", os.fsencode(mark))
    refuse(tmp_path, tar_of([member(CONFIG, content), GOOD[1]]), words)
    assert not mark.exists()


class Exploit:
    """Unpickled with pickle.load, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def test_its_pickle_calls_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    buffer = io.BytesIO()
    torch.save({"x": Exploit(mark)}, buffer)
    bad = tar_of([GOOD[0], member(WEIGHTS, buffer.getvalue())])
    refuse(tmp_path, bad, f"{WEIGHTS}' is not a pickle of tensors alone")
    assert not mark.exists()


def test_every_archive_of_one_changed_byte_is_read_or_refused(tmp_path: Path) -> None:
    """In the headers, where a byte counts."""
    content = tar_of(GOOD)
    second = 512 + len(CONTENT) + -len(CONTENT) % 512
    path = tmp_path / "a.nemo"
    for start in (0, second):
        for position in range(start, start + 512, 3):
            changed = bytearray(content)
            changed[position] ^= 0x11
            try:
                report = probe(path, bytes(changed))
            except (AdapterFormatError, UnsupportedAdapterError):
                continue
            assert report.num_tensors == 2


def test_reading_is_what_the_helper_of_these_tests_writes(tmp_path: Path) -> None:
    pairs = draw_pairs(HEADS, [0], 2, seed=1)
    report = probe_adapter(write_nemo(tmp_path / "a.nemo", HEADS, pairs), allow_pickle=True)
    assert report.ranks == {"layers.0.attn_qkv": 2}
    assert report.parameters == sum(tensor.numel() for tensor in pairs[0])
