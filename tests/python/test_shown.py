"""What foreign names and values look like in messages: one printable line of bounded length."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pagedlora._core import AdapterRoot, Dtype, LoraModelConfig, LoraModule
from pagedlora.errors import AdapterFormatError, AdapterNotFoundError, InvalidArgumentError
from pagedlora.shown import counted, printable, quoted, shown

FOREIGN = {
    "line ends": ("a\nb\r\n", r"a\nb\r\n"),
    "terminal control": ("\x1b[31mred", r"\x1b[31mred"),
    "zero": ("a\0b", r"a\x00b"),
    "surrogate": ("a\udcffb", r"a\udcffb"),
    "direction": ("a\u202eb", r"a\u202eb"),
    "line separator": ("a\u2028b", r"a\u2028b"),
    "text": ("Übung 漢字", "Übung 漢字"),
}


@pytest.mark.parametrize(("text", "expected"), FOREIGN.values(), ids=FOREIGN)
def test_what_does_not_print_is_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected
    assert quoted(text) == f"'{expected}'"
    message = str(AdapterNotFoundError(f"no adapter '{text}'", name=text))
    assert message == f"no adapter '{expected}'"
    message.encode()


@pytest.mark.parametrize(("text", "expected"), FOREIGN.values(), ids=FOREIGN)
def test_the_fields_of_an_error_are_as_they_were(text: str, expected: str) -> None:
    error = AdapterFormatError(f"'{text}' is broken", path=text, tensor=text)
    assert (error.path, error.tensor) == (text, text)
    assert expected in error.message


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\n" * 1_000_000, "é" * 100_000])
def test_long_texts_are_cut_in_the_middle(text: str) -> None:
    short = printable("begin" + text + "end", 100)
    assert len(short) <= 100
    assert short.startswith("begin")
    assert short.endswith("end")
    assert len(str(InvalidArgumentError(text))) <= 2000


class Hostile:
    """Cannot even be printed."""

    def __repr__(self) -> str:
        """Raises."""
        raise RuntimeError("hostile")


def _nested(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = (value,) * 15
    return value


@pytest.mark.parametrize(
    "value",
    [Hostile(), 10**5000, _nested(40), {"k": Hostile()}, list(range(10**6)), b"\x00" * 9999],
    ids=["hostile", "endless", "nested", "hostile inside", "long list", "bytes"],
)
def test_any_value_can_be_shown(value: Any) -> None:
    before = time.process_time()
    assert 0 < len(shown(value)) <= 80
    assert time.process_time() - before < 10  # an exponential one never ends


def test_numbers_agree_with_their_nouns() -> None:
    assert counted(1, "page") == "1 page"
    assert counted(2, "page") == "2 pages"
    assert counted(1, "other is", "others are") == "1 other is"
    assert counted(0, "other is", "others are") == "0 others are"


@pytest.mark.parametrize(("text", "expected"), FOREIGN.values(), ids=FOREIGN)
def test_the_core_escapes_as_well(text: str, expected: str) -> None:
    name = text.replace("\udcff", "\u202e")  # a module's name is UTF-8
    module = LoraModule(name, 2, 2)
    with pytest.raises(InvalidArgumentError) as twice:
        LoraModelConfig([module, module], Dtype.float32)
    assert expected.replace("udcff", "u202e") in str(twice.value)
    if "\0" not in text:
        with pytest.raises(AdapterNotFoundError) as missing:
            AdapterRoot(f"/no/such/{text}")
        assert missing.value.name == f"/no/such/{text}"
        assert str(missing.value).isprintable()
        assert len(str(missing.value)) < 1000
