"""Foreign texts and values in messages: on one line, of bounded length, never an error themselves.

Names, paths and what files say come from others. They may hold line ends, terminal controls or
surrogates, which a log or a terminal must not meet, and may be of any length.
"""

from __future__ import annotations

import reprlib

_SHOWN_ELEMENTS = 20
_CUT = " ... "


def printable(text: str, limit: int = 200) -> str:
    """The text with escapes for what is not printable; the middle of a long one is left out.

    Args:
        text: Anything.
        limit: Characters of the result at most, 10 or more.
    """
    text = _cut(text, limit)
    if text.isprintable():
        return text
    return _cut("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), limit)


def quoted(text: object, limit: int = 200) -> str:
    """A name or a path in quotes, as `printable`; what is no text, as `shown`."""
    return f"'{printable(text, limit)}'" if isinstance(text, str) else shown(text, limit)


def shown(value: object, limit: int = 80) -> str:
    """What `repr` says of a value, as `printable`; its type where that fails."""
    shortener = reprlib.Repr()
    shortener.maxlist = shortener.maxtuple = shortener.maxdict = _SHOWN_ELEMENTS
    shortener.maxlevel = 3  # containers may hold one another many times over
    shortener.maxset = shortener.maxfrozenset = shortener.maxdeque = _SHOWN_ELEMENTS
    shortener.maxstring = shortener.maxother = shortener.maxlong = limit
    try:
        text = shortener.repr(value)
    except Exception:  # whatever foreign code raises, and integers of very many digits
        text = f"<{type(value).__name__}>"
    return printable(text, limit)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 page`, `2 pages`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = (limit - len(_CUT)) // 2
    return text[: limit - len(_CUT) - tail] + _CUT + text[len(text) - tail :]
