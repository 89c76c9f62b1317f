"""`[learner.family]` of kinds whose second group reads the first one: judgements and refined episodes."""

from typing import Literal

from pydantic import Field, field_validator

from protocol.messages.fields import MAX_TEXT
from protocol.section import Section

MAX_FRAME = MAX_TEXT // 4
"""Most characters of the words around a text in a note."""
ANSWERS, FUTURE = "{answers}", "{future}"


def with_place(note: str, place: str, field: str = "note") -> str:
    """Return the words of a note, in which the place of a text stands once.

    Raises:
        ValueError: it does not.
    """
    if note.count(place) != 1:
        raise ValueError(f"{field} is {note!r}; write {place} once, where the text is to stand")
    return note


class JudgeFamily(Section):
    """Some members of a group answer the task; the others read these answers and give each a number. Where the task has
    a reference, judgements are trained to agree with it. Where it has none, the numbers are the reward of the answers
    (URPO, arXiv:2507.17515). It is for tasks of one turn."""

    kind: Literal["judge"] = "judge"
    answers: int = Field(4, ge=2)
    """Answers to each task; the rest of learner.group_size are judgements. At least 2, at most
    learner.group_size - 2, so that two judgements are compared."""
    reference: str = Field("return", min_length=1)
    """Name of the reward that is the truth about an answer. A task whose answers did not all get it has no reference.
    "return": the return of an answer, so that every task has a reference."""
    highest: float = Field(10.0, gt=0)
    """Largest number that a judgement may give; the smallest is 0. Above 0."""
    note: str = Field(
        "Do not answer. These are answers to it:\n{answers}\nRate each from 0 to 10. Write one number for each, in "
        "this order, on the last line.",
        max_length=MAX_FRAME,
    )
    """Words around the answers, which stand where `{answers}` is, each with a number in brackets before it. A judgement
    is read from its last line, which must hold as many numbers as there are answers."""
    deadline_s: float = Field(1800.0, gt=0)
    """Seconds that a family waits for its next group. Then what is there is trained. Above 0. If nothing else comes
    meanwhile, as in lockstep, a shorter learner.data_timeout_s ends the run before."""

    @field_validator("note")
    @classmethod
    def _with_answers(cls, note: str) -> str:
        return with_place(note, ANSWERS)

    @property
    def stages(self) -> int:
        """Most groups after the first one."""
        return 1

    def first(self, group_size: int) -> int:
        """Return the members of the first group."""
        return self.answers

    def largest(self, group_size: int) -> int:
        """Return the members of the largest group."""
        return max(self.answers, group_size - self.answers)


class RefineFamily(Section):
    """Some members of a group are plain episodes. Each of the others reads how one of these really went on, and plays
    the task anew (Dyna-Mind, arXiv:2510.09577). A right one that beats the mean of both groups has advantage 1, the
    others 0. Plain episodes are compared with each other alone. Tasks need several turns."""

    kind: Literal["refine"] = "refine"
    rollouts: int = Field(4, ge=2)
    """Plain episodes of each task; the rest of learner.group_size are refined ones. At least 2, at most
    learner.group_size - 2: one alone has nobody to be compared with."""
    horizon: int = Field(5, ge=1)
    """Most actions of the plain episode that are shown, each with the observation that really followed. At least 1."""
    note: str = Field(
        "An earlier plan and what really followed:\n{future}\nUse this to do better.", max_length=MAX_FRAME
    )
    """Words around the actions and observations, which stand where `{future}` is."""
    deadline_s: float = Field(1800.0, gt=0)
    """Seconds that a family waits for its next group. Then what is there is trained. Above 0. If nothing else comes
    meanwhile, as in lockstep, a shorter learner.data_timeout_s ends the run before."""

    @field_validator("note")
    @classmethod
    def _with_future(cls, note: str) -> str:
        return with_place(note, FUTURE)

    @property
    def stages(self) -> int:
        """Most groups after the first one."""
        return 1

    def first(self, group_size: int) -> int:
        """Return the members of the first group."""
        return self.rollouts

    def largest(self, group_size: int) -> int:
        """Return the members of the largest group."""
        return max(self.rollouts, group_size - self.rollouts)
