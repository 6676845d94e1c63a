"""A tokenizer whose token ids are bytes, so that characters come in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Encodes as UTF-8; what is no character is decoded as U+FFFD, as others do.

    Attributes:
        specials: Token ids that have no text.
    """

    eos_token_id: int | None = None

    def __init__(self, specials: Sequence[int] = ()) -> None:
        """Remembers the tokens without text."""
        self.specials = frozenset(specials)

    def __call__(self, text: str) -> dict[str, list[int]]:
        """As a tokenizer of transformers."""
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """As a tokenizer of transformers."""
        shown = [t for t in token_ids if not (skip_special_tokens and t in self.specials)]
        return bytes(shown).decode(errors="replace")
