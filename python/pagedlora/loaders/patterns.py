"""PEFT's rules for which modules a name or a regular expression means.

Adapters come from strangers, and a short expression can keep a backtracking matcher busy for years,
or its compiler short of memory. So all expressions of one adapter share `TIME_LIMIT_S`, and their
lengths are bounded, with repetitions written out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import regex

TIME_LIMIT_S = 2.0
"""For all regular expressions of one adapter together, to be compiled and to match."""
_NO_TIME_S = 1e-6
MAX_PATTERN_LENGTH = 10_000
"""Characters of one regular expression."""

_MAX_WRITTEN_OUT = 100_000
"""Length times the product of the counts in braces: the compiler writes repetitions out."""

_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
_READ_DIFFERENTLY = re.compile(r"\{(?!\d+(,\d*)?\}|,\d+\})|\[:|\[\[")
"""What the two modules for regular expressions understand differently: other braces, POSIX classes
and nested sets."""
_OTHER_ERRORS = (ArithmeticError, RecursionError, ValueError, Warning)
_IS_PLAIN = re.compile(r"[A-Za-z0-9_.]+").fullmatch


class BadPatternError(Exception):
    """A regular expression that cannot be used; says why."""


class PatternTimer:
    """The time that the expressions of one adapter may take; starts when it is first used."""

    def __init__(self) -> None:
        self._end: float | None = None

    def left_s(self) -> float:
        """Seconds, more than 0."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + TIME_LIMIT_S
        return max(self._end - now, _NO_TIME_S)

    @property
    def is_up(self) -> bool:
        """Whether no time is left."""
        return self.left_s() == _NO_TIME_S


class Expression:
    """A regular expression with a bound on its time."""

    def __init__(self, pattern: str, timer: PatternTimer, template: str = "{}") -> None:
        """Compiles it.

        Args:
            pattern: As the adapter's configuration has it.
            timer: Shared by the expressions of the adapter.
            template: What is put around it.

        Raises:
            BadPatternError: It is too long or not a regular expression, or time is up.
        """
        self._pattern, self._timer = pattern, timer
        if timer.is_up:
            raise self._too_slow("is one of too many")
        _check_length(pattern)
        odd = _READ_DIFFERENTLY.search(pattern)
        if odd is not None:
            raise BadPatternError(
                f"{pattern!r:.80} has {odd[0]!r}, which no module's name needs: leave it out"
            )
        try:
            whole = template.format(pattern)
            re.compile(whole)  # PEFT uses `re`: what that refuses PEFT refuses
            self._compiled = regex.compile(whole, regex.VERSION0)
        except (re.error, regex.error, *_OTHER_ERRORS) as error:
            raise BadPatternError(
                f"{pattern!r:.80} is not a regular expression: {error!s:.200}"
            ) from None

    def is_match(self, text: str) -> bool:
        """Whether it matches from the start of the text, as `re.match` does.

        Raises:
            BadPatternError: Time is up.
        """
        return self._run(self._compiled.match, text) is not None

    def is_full_match(self, text: str) -> bool:
        """Whether it matches the whole text, as `re.fullmatch` does.

        Raises:
            BadPatternError: Time is up.
        """
        return self._run(self._compiled.fullmatch, text) is not None

    def first_group(self, text: str) -> str | None:
        """What its first group matches, from the start of the text; None if it does not match.

        Raises:
            BadPatternError: Time is up.
        """
        match = self._run(self._compiled.match, text)
        return None if match is None else match["idx"]

    def _run(self, method: Callable[..., Any], text: str) -> Any:
        try:
            return method(text, timeout=self._timer.left_s(), concurrent=True)
        except TimeoutError:
            raise self._too_slow("takes too long to match") from None

    def _too_slow(self, problem: str) -> BadPatternError:
        return BadPatternError(
            f"{self._pattern!r:.80} {problem}: all regular expressions of an adapter have "
            f"{TIME_LIMIT_S:g} s"
        )


def _check_length(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise BadPatternError(
            f"{pattern!r:.80} has {len(pattern)} characters, over the limit of {MAX_PATTERN_LENGTH}"
        )
    length = len(pattern)
    for match in _COUNT.finditer(pattern):
        length *= max(*(int(count[:9] or 0) for count in match.groups()), 1)
        if length > _MAX_WRITTEN_OUT:
            raise BadPatternError(
                f"{pattern!r:.80} is longer than {_MAX_WRITTEN_OUT} characters with its "
                "repetitions written out"
            )


class KeyTable:
    r"""The keys of `rank_pattern` or `alpha_pattern`, and which of them means a module.

    PEFT's `get_pattern_key`: the first key, in the order of the file, for which `(.*\.)?(KEY)$`
    matches the module's name. Keys of letters, digits, `_` and `.` are found in tables instead of
    one by one, because there may be one for each module of a model: they are grouped by their
    length and by where their dots, which match any character, stand.
    """

    def __init__(self, keys: Iterable[str], timer: PatternTimer) -> None:
        """Sorts and compiles the keys.

        Raises:
            BadPatternError: As `Expression`.
        """
        self._keys = tuple(keys)
        self._plain: dict[tuple[int, ...], dict[str, int]] = {}
        self._expressions: list[tuple[int, Expression]] = []
        for position, key in enumerate(self._keys):
            if _IS_PLAIN(key):
                dots = tuple(at for at, letter in enumerate(key) if letter == ".")
                self._plain.setdefault((len(key), *dots), {}).setdefault(key, position)
            else:
                expression = Expression(key, timer, r"(.*\.)?({})$")
                self._expressions.append((position, expression))

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._keys)

    def find(self, module: str) -> str | None:
        """The key that means a module.

        Raises:
            BadPatternError: Time is up.
        """
        best = min(self._plain_matches(module), default=len(self._keys))
        for position, expression in self._expressions:
            if position >= best:
                break
            if expression.is_match(module):
                best = position
        return self._keys[best] if best < len(self._keys) else None

    def _plain_matches(self, module: str) -> Iterator[int]:
        for (length, *dots), keys in self._plain.items():
            start = len(module) - length
            if start < 0 or (start > 0 and module[start - 1] != "."):
                continue
            letters = list(module[start:])
            for dot in dots:
                letters[dot] = "."
            position = keys.get("".join(letters))
            if position is not None:
                yield position


class NameSet:
    """Module names of which each means the names that end in it after a dot, or one expression."""

    def __init__(self, names: Iterable[str] | str, timer: PatternTimer) -> None:
        """Takes what `target_modules` or `exclude_modules` says.

        Args:
            names: Names, or one regular expression.
            timer: Shared by the expressions of the adapter.

        Raises:
            BadPatternError: As `Expression`.
        """
        self._expression = Expression(names, timer) if isinstance(names, str) else None
        self._names = frozenset() if isinstance(names, str) else frozenset(names)

    def __contains__(self, module: str) -> bool:
        """Whether the module is meant; raises BadPatternError when time is up."""
        if self._expression is not None:
            return self._expression.is_full_match(module)
        return not self._names.isdisjoint(dotted_suffixes(module))

    @property
    def is_expression(self) -> bool:
        """Whether it is one regular expression."""
        return self._expression is not None

    def has_exactly(self, module: str) -> bool:
        """Whether the whole name is one of the names."""
        return module in self._names


def dotted_suffixes(module: str) -> Iterator[str]:
    """Its last part, its last two, ..., all of it."""
    dot = module.rfind(".")
    while dot >= 0:
        yield module[dot + 1 :]
        dot = module.rfind(".", 0, dot)
    yield module
