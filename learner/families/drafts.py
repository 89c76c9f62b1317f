"""Drafts that are not trained, and answers that begin from the best of them (iGRPO, arXiv:2602.09000). Pure."""

from collections.abc import Callable, Sequence

from learner.families.family import ChildTask, Settled, TaskFamily
from learner.families.family_config import DRAFT, DraftFamily
from learner.trajectory import Trajectory
from protocol.messages.fields import MAX_TEXT

AnswerText = Callable[[Sequence[int]], str]
"""Turns token ids into text, without special tokens."""
OUTCOME = "draft"
"""Outcome of drafts."""


def best_draft(drafts: Sequence[Trajectory]) -> Trajectory:
    """Return the draft with the highest return, the first of several."""
    return max(drafts, key=lambda t: t.return_)


def answer_of(t: Trajectory, decode: AnswerText) -> str:
    """Return the text of the last action turn of a trajectory."""
    last = max((turn.start for turn in t.turns if turn.action), default=0)
    return decode(t.token_ids[last:][t.action_mask[last:]].tolist())


def next_after_drafts(
    config: DraftFamily, family: TaskFamily, group_size: int, decode: AnswerText
) -> list[ChildTask]:
    """Return the tasks with the best draft behind the prompt; none if the family is to be trained."""
    drafts = family.stages[0].members
    if len(family.stages) > 1 or not drafts:
        return []
    room = MAX_TEXT - len(config.note)
    note = config.note.replace(DRAFT, answer_of(best_draft(drafts), decode)[:room])
    return [ChildTask(note)] * group_size


def settle_drafts(family: TaskFamily) -> Settled:
    """Return what is trained of a family with drafts: the answers with a draft behind the prompt, and no draft."""
    answers = [t for stage in family.stages if stage.number for t in stage.members]
    return Settled(
        answers, {OUTCOME: [t for stage in family.stages if not stage.number for t in stage.members]}
    )
