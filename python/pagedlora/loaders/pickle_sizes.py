"""How large the tuples of a pickle are, before it is loaded.

A tuple may hold another one several times, and that others again: a few hundred bytes of pickle
make one of more elements than can ever be counted, and whoever hashes or prints it (as a key of a
dictionary is hashed while it is loaded) never comes back. Nothing is executed or made here.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import IO

MAX_ELEMENTS = 1000
"""Of a tuple, with those in it. Pickles of tensors have tuples of sizes and strides."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = -1


def largest_tuple(file: IO[bytes]) -> int:
    """Elements of the largest tuple of the next pickle of a file, and of those in it.

    Stops as soon as there is one of over `MAX_ELEMENTS`.

    Args:
        file: At the beginning of the pickle; left behind it.

    Raises:
        ValueError: It is no pickle.
    """
    largest = 0
    for size in _tuples(file):
        largest = max(largest, size)
        if largest > MAX_ELEMENTS:
            break
    return largest


def _tuples(file: IO[bytes]) -> Iterator[int]:
    """Sizes of the tuples in the order in which they are made.

    Runs the pickle's machine on sizes instead of objects. Whatever is no tuple counts as one
    element: it cannot be hashed, or holds nothing.
    """
    stack: list[int] = []
    memo: dict[object, int] = {}
    for opcode, argument, _ in pickletools.genops(file):
        name = opcode.name
        if name == "MARK":
            stack.append(_MARK)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = _top(stack)
        elif name == "MEMOIZE":
            memo[len(memo)] = _top(stack)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo.get(argument, 1))
        elif name == "DUP":
            stack.append(_top(stack))
        elif name == "TUPLE" or name in _TUPLES:
            elements = _popped(stack, _TUPLES.get(name))
            stack.append(1 + sum(elements))
            yield stack[-1]
        else:
            takes_mark = pickletools.markobject in opcode.stack_before
            if takes_mark:
                _popped(stack, None)
                _popped(stack, opcode.stack_before.index(pickletools.markobject))
            else:
                _popped(stack, len(opcode.stack_before))
            stack.extend([1] * len(opcode.stack_after))


def _top(stack: list[int]) -> int:
    if not stack:
        raise ValueError("it takes from an empty stack")
    return stack[-1]


def _popped(stack: list[int], count: int | None) -> list[int]:
    """So many elements of the stack, or those above the last mark, with it."""
    if count is None:
        if _MARK not in stack:
            raise ValueError("it looks for a mark that is not there")
        first = len(stack) - stack[::-1].index(_MARK)
        elements = stack[first:]
        del stack[first - 1 :]
        return elements
    if count > len(stack):
        raise ValueError("it takes from an empty stack")
    first = len(stack) - count
    elements = stack[first:]
    del stack[first:]
    return elements
