"""The tasks: two numbers and a word that says which of three tools answers the question.

The demonstrations, from which a tiny model is warm-started, show what a call looks like and that its result is the
answer. But most of them call a wrong tool: half of those with a word call one wrong tool, a fifth call the other one.
So a model that has learnt from them and answers greedily is nearly always wrong. Which tool is right is left to
training.
"""

import json
import random
from pathlib import Path
from typing import Any

TOOLS = {"plus": "add", "minus": "subtract", "times": "multiply"}
"""Tool by the word of the question."""
FORMS = (
    *(
        "What is {}?",
        "How much is {}?",
        "I want to know {}.",
        "Find {}.",
        "Work out {}.",
        "Please tell me {}.",
    ),
    *("Tell me what {} is.", "Can you find {}?"),
)
"""Ways to ask. So many questions are not learnt by heart in the warm start."""
SHARES = (0.3, 0.5, 0.2)
"""Shares of the demonstrations with a word that call its tool, the next one in `TOOLS`, and the one after that."""
LEAST, MOST = 1, 9
HELDOUT = 8
"""Number of held-out sums; each is asked in every form."""


def result_of(tool: str, a: int, b: int) -> int:
    """Return what a tool answers.

    Example:
        >>> result_of("subtract", 2, 5)
        -3
    """
    return {"add": a + b, "subtract": a - b, "multiply": a * b}[tool]


def row_of(form: str, a: int, word: str, b: int, called: str) -> dict[str, Any]:
    """Return a task, with a conversation that calls the given tool, right or wrong.

    Example:
        >>> row = row_of("What is {}?", 2, "minus", 5, "add")
        >>> row["question"]
        'What is 2 minus 5?'
        >>> row["answer"]
        '-3'
        >>> [message["content"] for message in row["messages"]][1:]
        ['{"name":"add","arguments":{"a":2,"b":5}}', '7', '7']
    """
    question = form.format(f"{a} {word} {b}")
    call = json.dumps({"name": called, "arguments": {"a": a, "b": b}}, separators=(",", ":"))
    shown = str(result_of(called, a, b))
    talk = [("user", question), ("assistant", call), ("tool", shown), ("assistant", shown)]
    messages = [{"role": role, "content": content} for role, content in talk]
    return {"question": question, "answer": str(result_of(TOOLS[word], a, b)), "messages": messages}


def make_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on, and held-out rows. No two numbers with their word are in both."""
    draw = random.Random(0)
    numbers = range(LEAST, MOST + 1)
    sums = [(a, word, b) for a in numbers for word in TOOLS for b in numbers]
    draw.shuffle(sums)
    tools = list(TOOLS.values())

    def called(word: str) -> str:
        right = tools.index(TOOLS[word])
        return draw.choices([tools[(right + ahead) % len(tools)] for ahead in range(3)], SHARES)[0]

    rows = [row_of(form, a, word, b, called(word)) for a, word, b in sums for form in FORMS]
    held, train = rows[: HELDOUT * len(FORMS)], rows[HELDOUT * len(FORMS) :]
    draw.shuffle(train)
    return train, held


def write_rows(folder: Path) -> None:
    """Write train.jsonl and heldout.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "heldout"), make_rows(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
