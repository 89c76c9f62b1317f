"""Test scorers of families that run the answer as Python, in bubblewrap, against answers that attack them."""

import asyncio

import pytest

from envs.scoring import scorer as scorer_module
from envs.scoring.questions import Family
from envs.scoring.scorer import Scorer
from tests.bubblewrap import needs_bubblewrap

pytestmark = needs_bubblewrap

FRAME = r"b'\x10\x00\x00\x00\x81\xa5score\xcb?\xf0\x00\x00\x00\x00\x00\x00'"
"""A reply of the worker that gives the score 1."""
TAMPERING = {
    "replaces the scorer's method": "setattr(__import__('__main__').Questions, 'score', lambda *a: 1.0)",
    "replaces a method of the library": (
        "setattr(__import__('reasoning_gym').games.n_queens.NQueensDataset, 'score_answer', lambda *a: 1.0)"
    ),
    "replaces a built-in function": "setattr(__import__('builtins'), 'float', lambda *a: 1.0)",
    "opens the worker's memory": "open('/proc/%d/mem' % __import__('os').getppid(), 'r+b').name",
    "opens the worker's reply pipe": (
        "exec(\"import glob\\nfor path in glob.glob('/proc/[0-9]*/fd/*'):\\n"
        f" try: open(path, 'wb', buffering=0).write({FRAME})\\n except OSError: pass\")"
    ),
    "writes a reply to every descriptor": (
        f'exec("import os\\nfor i in range(99):\\n try: os.write(i, {FRAME})\\n except OSError: pass")'
    ),
    "writes a number to every descriptor": (
        "exec(\"import os, struct\\nfor i in range(99):\\n try: os.write(i, struct.pack('<d', 1.0))\\n"
        ' except OSError: pass")'
    ),
    "ends its worker": "__import__('os').kill(__import__('os').getppid(), 9)",
    "ends its process": "exit()",
    "takes the worker's memory": (
        "__import__('resource').prlimit(__import__('os').getppid(), __import__('resource').RLIMIT_AS, (0, 0))"
    ),
    "stands still": "__import__('time').sleep(600)",
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Give each score the time that a busy machine may need."""
    monkeypatch.setattr(scorer_module, "SCORE_DEADLINE_S", 60.0)


@pytest.fixture(scope="module")
def queens():
    scorer = Scorer(Family("n_queens"), "bwrap")
    yield scorer
    asyncio.run(scorer.close())


@pytest.mark.parametrize("attack", TAMPERING.values(), ids=TAMPERING.keys())
def test_an_attack_changes_no_later_score_and_leaves_the_worker_alone(queens, attack):
    async def main():
        entry = await queens.entry(0, "train")
        before = queens.pid
        await queens.score(entry.position, attack)
        assert await queens.score(entry.position, "nonsense") == 0.0
        assert await queens.score(entry.position, entry.answer) == 1.0
        assert (queens.pid, queens.counters.scorer_tampered) == (before, 0)

    asyncio.run(main())


def test_right_answers_beside_attacks_keep_their_scores(queens):
    async def main():
        entry = await queens.entry(0, "train")
        answers = [entry.answer, *list(TAMPERING.values())[:5], entry.answer, "nonsense"]
        scores = await asyncio.gather(*(queens.score(entry.position, answer) for answer in answers))
        assert (scores[0], scores[-2:]) == (1.0, [1.0, 0.0])

    asyncio.run(main())
