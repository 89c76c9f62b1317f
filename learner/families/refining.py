"""Episodes that are played anew by a policy that has read how an earlier one went on (Dyna-Mind, arXiv:2510.09577).
Pure."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from learner.families.answer_config import FUTURE, RefineFamily
from learner.families.drafts import AnswerText
from learner.families.family import ChildTask, Settled, TaskFamily, member_of
from learner.trajectory import Trajectory
from protocol.messages.episodes import Turn
from protocol.messages.fields import MAX_TEXT


def shown_turns(t: Trajectory, horizon: int) -> list[Turn]:
    """Return the first actions of an episode, each with the observation that followed it; at most `horizon` actions.

    An action without an observation behind it, such as the last one, shows nothing that the policy could not know. The
    list is empty for an episode with several conversations.
    """
    if any(turn.back != 1 for turn in t.turns):
        return []
    turns: list[Turn] = []
    for action, observation in zip(t.turns, t.turns[1:], strict=False):
        if action.action and not observation.action and len(turns) < 2 * horizon:
            turns += [action, observation]
    return turns


def true_future(t: Trajectory, horizon: int, decode: AnswerText) -> str:
    """Return the text of the actions that an episode took and of the observations that really followed, in order."""
    texts = [decode(t.token_ids[turn.start : turn.end].tolist()).strip() for turn in shown_turns(t, horizon)]
    return "\n".join(texts)


def next_refined(
    config: RefineFamily, family: TaskFamily, group_size: int, *, room: int, decode: AnswerText
) -> list[ChildTask]:
    """Return the tasks of the refined episodes; none if they are here, or if no episode has a future to be read.

    The plain episodes are taken in turn, by the number of their members.

    Args:
        config: settings.
        family: the groups that have been delivered.
        group_size: plain and refined episodes together.
        room: tokens that a trajectory may have. An episode whose shown part takes more than half of it is left out.
        decode: turns token ids into text.
    """
    if len(family.stages) > 1:
        return []
    plain = sorted(family.stages[0].members, key=member_of)
    tokens = [sum(turn.end - turn.start for turn in shown_turns(t, config.horizon)) for t in plain]
    known = [t for t, own in zip(plain, tokens, strict=True) if 0 < own <= room // 2]
    cut = MAX_TEXT - len(config.note)
    notes = [config.note.replace(FUTURE, true_future(t, config.horizon, decode)[:cut]) for t in known]
    return [ChildTask(notes[k % len(notes)]) for k in range(group_size - config.rollouts)] if notes else []


def refined_advantages(refined: Sequence[Trajectory], plain: Sequence[Trajectory]) -> list[float]:
    r"""Return the advantage of each refined episode, 0 or 1.

    .. math::
        A_i = \mathbb{1}\left[\text{right}_i \wedge R_i > \max(\bar R_\text{plain}, \bar R_\text{refined})\right]

    Dyna-Mind, arXiv:2510.09577. Where the environment does not say what is right, the return alone decides.
    """
    groups = [[t.return_ for t in group] for group in (plain, refined) if group]
    bar = max((float(np.mean(returns)) for returns in groups), default=0.0)
    return [float(t.correct is not False and t.return_ > bar) for t in refined]


def refined_metrics(trained: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of the refined episodes of a batch that have an advantage."""
    own = [t.advantage for t in trained if t.advantage is not None]
    return {"family/refined_share": float(np.mean(own))} if own else {}


def settle_refined(family: TaskFamily) -> Settled:
    """Return what is trained: plain episodes as a group of their own, and refined ones with their own advantage."""
    plain = list(family.stages[0].members)
    refined = [t for stage in family.stages[1:] for t in stage.members]
    own = refined_advantages(refined, plain)
    return Settled([*plain, *(replace(t, advantage=a) for t, a in zip(refined, own, strict=True))], {})
