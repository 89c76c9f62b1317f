"""Texts of episodes, as later tasks of a family quote them. Pure."""

import re
from collections.abc import Mapping
from itertools import takewhile

from learner.families.drafts import AnswerText, answer_of
from learner.trajectory import Trajectory
from protocol.messages.fields import MAX_TEXT


def transcript(t: Trajectory, decode: AnswerText) -> str:
    """Return what the policy and the environment said in an episode, without the first prompt.

    An episode of one answer is that answer. Otherwise the answers are numbered from 1, as "Step 1: ...", and what the
    environment said to an answer follows it on lines of its own.
    """
    if sum(turn.action for turn in t.turns) < 2:
        return answer_of(t, decode).strip()
    lines, step = [], 0
    for turn in t.turns[1:]:
        step += turn.action
        said = decode(t.token_ids[turn.start : turn.end].tolist()).strip()
        lines.append(f"Step {step}: {said}" if turn.action else said)
    return "\n".join(lines)


def first_answer(t: Trajectory, decode: AnswerText) -> str:
    """Return the text of the first action turn of a trajectory; of all action tokens if it has no turns."""
    turn = next((turn for turn in t.turns if turn.action), None)
    if turn is None:
        return answer_of(t, decode).strip()
    return decode(t.token_ids[turn.start : turn.end].tolist()).strip()


def own_lines(text: str, other: str) -> str:
    r"""Return the lines of a text without those at its beginning and its end that a different text has there, too.

    Two prompts of one environment share their system message and the words of their chat template. Nothing is taken
    away from texts that are equal.

    Example:
        >>> own_lines("system\nBe brief.\nuser\n1 + 2?\nassistant", "system\nBe brief.\nuser\n7 + 8?\nassistant")
        '1 + 2?'
    """
    lines, others = text.split("\n"), other.split("\n")
    if lines == others:
        return text
    begin = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(lines, others, strict=False)))
    ends = zip(reversed(lines[begin:]), reversed(others[begin:]), strict=False)
    end = len(lines) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends))
    return "\n".join(lines[begin:end]) or text


def filled(note: str, texts: Mapping[str, str]) -> str:
    """Return a note with texts in their places. Texts that are too long for a note are cut, each to an equal share.

    Example:
        >>> filled("You said {attempt}, then {reflection}.", {"{attempt}": "5", "{reflection}": "{attempt} is odd"})
        'You said 5, then {attempt} is odd.'
    """
    places = re.compile("|".join(map(re.escape, texts)))
    room = max(0, MAX_TEXT - len(note)) // max(1, len(places.findall(note)))
    return places.sub(lambda place: texts[place[0]][:room], note)[:MAX_TEXT]
