"""Tokens into text as they come: what is certain, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a decoder writes for the first bytes of a character


class TextStream:
    """The text of one answer while it grows. Not thread-safe.

    A tokenizer may write a token differently at the beginning of a text, and a character may take
    several tokens. So the last tokens are decoded with those before them, and what may still change
    waits.

    Attributes:
        text: What is certain so far; cut before a stop string.
        is_stopped: Whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        """Starts empty.

        Args:
            tokenizer: Of transformers.
            stop: The text ends before the first of these; none is empty.
        """
        self.text = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._token_ids: list[int] = []
        self._context = 0  # tokens before this one do not change what follows
        self._decoded = 0  # tokens before this one are in the text

    def push(self, token_id: int, *, may_stop: bool = True) -> None:
        """Takes the next token; nothing more is taken after a stop string.

        Args:
            token_id: Not one that ended the answer.
            may_stop: Whether a stop string that this token completes counts.
        """
        if self.is_stopped:
            return
        self._token_ids.append(token_id)
        known = self._decode(self._token_ids[self._context : self._decoded])
        longer = self._decode(self._token_ids[self._context :])
        if len(longer) > len(known) and not longer.endswith(_UNFINISHED):
            self._context, self._decoded = self._decoded, len(self._token_ids)
            self._append(longer[len(known) :], may_stop=may_stop)

    def certain_text(self) -> str:
        """The text without an end that may become a stop string."""
        if self.is_stopped:
            return self.text
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return self.text[:-length]
        return self.text

    def _append(self, text: str, *, may_stop: bool) -> None:
        begin = max(0, len(self.text) - self._longest_stop + 1)
        self.text += text
        if not may_stop:
            return
        found = [at for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = True

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
