"""Groups with a wrong answer ask the policy for a better instruction (INSPO, arXiv:2512.01945). Pure.

What comes back is text of a model in training, and it will stand in prompts. So it is read strictly, or not at all.
"""

from collections.abc import Sequence

from learner.families.family import ChildTask, Settled, TaskFamily, member_of
from learner.families.notes import AnswerText, filled, first_answer, is_solved, transcript
from learner.settings.families import ATTEMPT, INSTRUCTION, ProposeFamily
from learner.trajectory import Trajectory

PROPOSAL = "proposal"
"""Outcome of proposals, which are not trained."""
_MARKS = frozenset("<>[]|\uff5c\ufffd")
"""Characters of which chat templates make their marks, and the one that stands for bytes without a meaning."""


def proposed(text: str, longest: int) -> str | None:
    r"""Return the instruction in an answer: its last line that is not empty. None if it may not stand in a prompt.

    Args:
        text: the answer, without special tokens.
        longest: most characters of an instruction.

    Example:
        >>> proposed("The order was wrong.\nRead it from the end.\n", 200)
        'Read it from the end.'
        >>> [proposed(text, 20) for text in ("", "42", "End.<|im_end|>", "Read\x1b[2J", "x" * 21)]
        [None, None, None, None, None]
    """
    line = text.strip().rpartition("\n")[2].strip()
    if len(line) > longest or not line.isprintable() or _MARKS.intersection(line):
        return None
    return line if any(character.isalpha() for character in line) else None


def next_proposal(
    config: ProposeFamily, family: TaskFamily, instruction: str, decode: AnswerText
) -> list[ChildTask]:
    """Return the task of a proposal; none if the family is to be trained, or if nobody is wrong.

    It quotes the wrong answer with the lowest return, the first one of several.

    Args:
        config: kind of the family.
        family: its groups so far.
        instruction: the one that stood behind the prompt of the first group.
        decode: turns tokens into text.
    """
    wrong = [t for t in family.stages[0].members if not is_solved(config, t)]
    if len(family.stages) > 1 or family.index % config.every or not wrong:
        return []
    worst = min(wrong, key=lambda t: (t.return_, member_of(t)))
    texts = {INSTRUCTION: instruction, ATTEMPT: transcript(worst, decode)}
    return [ChildTask(filled(config.note, texts))]


def settle_proposals(config: ProposeFamily, family: TaskFamily, decode: AnswerText | None) -> Settled:
    """Return what is trained, the first group alone, and what was proposed.

    Args:
        config: kind of the family.
        family: all its groups.
        decode: turns tokens into text; None: nobody reads the proposals, as when a recorded run is trained again.
    """
    said = _proposals(family)
    read = () if decode is None else tuple(read_proposals(config, family, decode))
    return Settled(family.stages[0].members, {PROPOSAL: said}, read)


def read_proposals(config: ProposeFamily, family: TaskFamily, decode: AnswerText) -> list[str | None]:
    """Return the instruction in each proposal of a family; None for one that cannot be read."""
    return [proposed(first_answer(t, decode), config.longest) for t in _proposals(family)]


def _proposals(family: TaskFamily) -> Sequence[Trajectory]:
    return [t for stage in family.stages[1:] for t in stage.members]
