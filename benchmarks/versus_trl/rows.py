"""Writes the jsonl files of the tasks made of rows. The files depend on nothing, so both sides train the same rows."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("build/versus_trl")
ROWS = 2_000


def spelled() -> Iterator[tuple[str, str]]:
    """Yield words of three letters, and each word written twice."""
    draw = random.Random(1)
    for _ in range(ROWS):
        word = "".join(draw.choices("abcdefgh", k=3))
        yield word, 2 * word


def sums() -> Iterator[tuple[str, str]]:
    """Yield sums of two numbers of two digits, and their values."""
    draw = random.Random(2)
    for _ in range(ROWS):
        a, b = draw.randrange(10, 100), draw.randrange(10, 100)
        yield f"What is {a} + {b}? Just give the number.", str(a + b)


FILES = {"spelled.jsonl": spelled, "sums.jsonl": sums}


def write_rows(folder: Path = FOLDER) -> None:
    """Write all files. A prompt is a list with one message, as TRL takes conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in FILES.items():
        rows = ({"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in pairs())
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
