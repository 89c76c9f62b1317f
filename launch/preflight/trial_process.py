"""Asks a program that needs torch or vLLM, in a process of its own.

The caller may live as long as the run, and must not keep the memory of such a library. The program writes what it found
as JSON in one line: `{"wrong": [...], "remarks": [...]}`. Other lines, of libraries and of code of the user, are passed
over.
"""

import json
import subprocess
import sys
from typing import NamedTuple

TRY_S = 300.0
"""Longest that a trial may take, imports included."""
SHOWN_CHARS = 600


class Found(NamedTuple):
    """What a trial found."""

    wrong: list[str]
    """Why the run cannot work."""
    remarks: list[str]


class NoAnswer(Exception):
    """The trial came to no end, or failed. The text says how, and can stand behind a colon."""


def ask(module: str, *arguments: str, text: str = "") -> Found:
    """Run ``python -m MODULE ARGUMENTS`` and return what it found.

    Args:
        text: standard input.

    Raises:
        NoAnswer: it took longer than `TRY_S`, failed, or wrote no result.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=TRY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"it did not come to an end within {TRY_S:g} s") from None
    if done.returncode:
        # The last line of a traceback says what went wrong.
        raise NoAnswer(done.stderr.strip().rpartition("\n")[2][:SHOWN_CHARS])
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"wrong":'):
            return Found(**json.loads(line))
    raise NoAnswer(f"it ended without a result: {done.stderr.strip()[-SHOWN_CHARS:]}")
