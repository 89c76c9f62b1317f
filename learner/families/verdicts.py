"""Right answers whose first mistake a judge names before the group is trained (FAPO, arXiv:2510.22543). Pure."""

import re
from collections.abc import Mapping, Sequence

from learner.families.family import ChildTask, Settled, TaskFamily, member_of
from learner.families.notes import AnswerText, answer_of, filled, is_solved, transcript
from learner.rewards import FLAWED, as_given, last_turn, total_of, with_rewards
from learner.settings.families import ATTEMPT, VerdictFamily
from learner.trajectory import Trajectory, newest_version
from protocol.messages.episodes import Reward

JUDGEMENT = "judgement"
"""Outcome of judgements, which are not trained."""
HALF = 0.5
"""Share of the judgements without a mistake below which an answer is flawed."""
_NUMBER = re.compile(r"(?<![\d.])\d{1,4}(?![\d.]*\d)")


def named_step(text: str) -> int | None:
    r"""Return the number of the first mistake that a judgement names, 0 for none; None if it cannot be read.

    The last line that is not empty must hold exactly one whole number.

    Example:
        >>> named_step("Step 2 adds wrongly.\n2"), named_step("0"), named_step("2 or 3"), named_step("none")
        (2, 0, None, None)
    """
    found = _NUMBER.findall(text.strip().rpartition("\n")[2])
    return int(found[0]) if len(found) == 1 else None


def soundness(named: Sequence[int | None]) -> float:
    r"""Return how sound an answer is by the steps that its judgements name, 0 to 1.

    .. math:: \frac{|\{j: \hat t_j = 0\}|}{|\{j: \hat t_j \text{ can be read}\}|}

    It is 1 if none can be read: an answer is not blamed for its judge.

    Example:
        >>> soundness([0, 3, None, 0]), soundness([None]), soundness([])
        (0.6666666666666666, 1.0, 1.0)
    """
    read = [step for step in named if step is not None]
    return sum(step == 0 for step in read) / len(read) if read else 1.0


def judged(config: VerdictFamily, family: TaskFamily) -> list[Trajectory]:
    """Return the members of the first group that are judged: right ones, of a version that may judge."""
    first = sorted(family.stages[0].members, key=member_of)
    if not first or newest_version(first) < config.from_version:
        return []
    return [t for t in first if is_solved(config, t)]


def next_verdicts(config: VerdictFamily, family: TaskFamily, decode: AnswerText) -> list[ChildTask]:
    """Return the tasks of the judgements, `readers` for each right answer; none if they are here."""
    if len(family.stages) > 1:
        return []
    notes = [filled(config.note, {ATTEMPT: transcript(t, decode)}) for t in judged(config, family)]
    return [ChildTask(note, policy=config.judge) for note in notes for _ in range(config.readers)]


def steps_named(config: VerdictFamily, family: TaskFamily, decode: AnswerText) -> dict[str, list[int | None]]:
    """Return what the judgements say of each answer that is judged, by the name of the answer."""
    answers = judged(config, family)
    said: dict[str, list[int | None]] = {t.trajectory_id: [] for t in answers}
    for judgement in _judgements(family):
        place = member_of(judgement) // config.readers
        if place < len(answers):
            said[answers[place].trajectory_id].append(named_step(answer_of(judgement, decode)))
    return said


def settle_verdicts(config: VerdictFamily, family: TaskFamily, decode: AnswerText) -> Settled:
    """Return what is trained: the answers, each flawed one with the penalty, and no judgement.

    Rewards are composed when a group comes, before its judgements are there, so the penalty comes on top.
    """
    said = steps_named(config, family, decode)
    answers = [
        with_rewards(t, [*t.rewards, Reward(FLAWED, last_turn(t), -config.penalty)])
        if soundness(said.get(t.trajectory_id, ())) < HALF
        else t
        for t in family.stages[0].members
    ]
    return Settled(answers, {JUDGEMENT: _judgements(family)})


READ, REJECTED, AGREED = "family/readable_share", "family/flawed_share", "family/verdict_right_share"


def verdict_acts(
    config: VerdictFamily, family: TaskFamily, decode: AnswerText
) -> Mapping[str, Sequence[float]]:
    """Return for each metric 1 or 0: of judgements that can be read, of answers found flawed, and of true verdicts."""
    said = steps_named(config, family, decode)
    shown: dict[str, list[float]] = {READ: [], REJECTED: [], AGREED: []}
    for t in judged(config, family):
        named = said[t.trajectory_id]
        shown[READ] += [float(step is not None) for step in named]
        if any(step is not None for step in named):
            flawed = soundness(named) < HALF
            shown[REJECTED].append(float(flawed))
            if config.truth:
                shown[AGREED].append(float(flawed == (total_of(as_given(t), config.truth) <= 0)))
    return {name: values for name, values in shown.items() if values}


def _judgements(family: TaskFamily) -> list[Trajectory]:
    return [t for stage in family.stages[1:] for t in stage.members]
