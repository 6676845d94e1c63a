"""Tokens into text as they come: characters in pieces, stop strings across tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.byte_tokenizer import ByteTokenizer

from pagedlora.engine.text_stream import TextStream


def push_all(stream: TextStream, data: bytes) -> list[str]:
    """Pushes byte by byte; gives the certain text after each."""
    seen = []
    for byte in data:
        stream.push(byte)
        seen.append(stream.certain_text())
    return seen


def test_a_character_of_several_tokens_comes_whole() -> None:
    assert push_all(TextStream(ByteTokenizer()), "aé€b".encode()) == [
        "a", "a", "aé", "aé", "aé", "aé€", "aé€b",
    ]  # fmt: skip


def test_the_text_is_cut_before_the_first_stop_string() -> None:
    stream = TextStream(ByteTokenizer(), ["END", "."])
    seen = push_all(stream, b"one E EN END two.")
    assert stream.is_stopped
    assert stream.text == "one E EN "
    assert seen[-1] == "one E EN "


def test_what_may_become_a_stop_string_is_held_back() -> None:
    assert push_all(TextStream(ByteTokenizer(), ["abc"]), b"xabab") == ["x", "x", "x", "xab", "xab"]


def test_a_stop_string_that_comes_too_early_does_not_count() -> None:
    stream = TextStream(ByteTokenizer(), ["b"])
    for index, byte in enumerate(b"abab"):
        stream.push(byte, may_stop=index >= 2)
    assert (stream.text, stream.is_stopped) == ("aba", True)


def test_tokens_without_text_change_nothing() -> None:
    assert push_all(TextStream(ByteTokenizer([0])), b"a\0b") == ["a", "a", "ab"]


# A text that ends with U+FFFD itself looks like one whose last character is not complete.
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30),
    st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2),
)
def test_the_text_is_that_of_all_tokens_cut_before_the_first_stop(
    text: str, stops: list[str]
) -> None:
    stream = TextStream(ByteTokenizer(), stops)
    seen = ["", *push_all(stream, text.encode())]
    ends = [end + len(s) for s in stops if (end := text.find(s)) >= 0]
    if ends:
        # the first to be complete, and of those the one that begins first
        complete = text[: min(ends)]
        expected = text[: min(complete.find(s) for s in stops if s in complete)]
    else:
        expected = text
    assert (stream.text, stream.is_stopped) == (expected, bool(ends))
    for shorter, longer in itertools.pairwise(seen):
        assert longer.startswith(shorter), "what was certain is taken back"


@pytest.mark.parametrize("stop", [["aa"], ["aab", "aa"]])
def test_a_stop_string_over_its_own_beginning(stop: list[str]) -> None:
    stream = TextStream(ByteTokenizer(), stop)
    push_all(stream, b"baaab")
    assert (stream.text, stream.is_stopped) == ("b", True)
