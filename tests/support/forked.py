"""Runs code in forked children, in scripts that tests start: pytest itself has threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pagedlora import InvalidArgumentError, PagedLoraError

ROOT = Path(__file__).parents[2]
_LIMIT_S = 60


def run_script(script: str, *arguments: object) -> list[str]:
    """Lines that a script prints in a process of its own; fails if it does, or hangs."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=5 * _LIMIT_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def refusal(call: Callable[[], object]) -> str:
    """What a call says that is refused as none of this process; else what it gave."""
    try:
        return f"gave {call()!r}"
    except InvalidArgumentError as error:
        return str(error)


def in_child(call: Callable[[], object]) -> str:
    """What becomes of a call in a forked child that ends as Python does.

    Returns:
        What the call returned or the package's error that it raised, as text; or how the child
        died: of a signal, 14 if it took for ever.
    """
    sys.stdout.flush()  # what is there yet is not the child's to print
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_LIMIT_S)
        try:
            answer = str(call())
        except PagedLoraError as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        sys.exit(0)  # with the interpreter's own end: atexit, and what is destroyed then
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return answer if status == 0 else f"died with {status}"
