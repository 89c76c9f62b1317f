"""Answers that the policy judges itself, and judgements that are trained where the truth is known (URPO,
arXiv:2507.17515). Pure."""

import math
import re
from collections.abc import Sequence

import numpy as np

from learner.families.family import ChildTask, Settled, TaskFamily, member_of
from learner.families.notes import AnswerText, answer_of
from learner.rewards import as_given, last_turn, total_of, with_rewards
from learner.settings.families import ANSWERS, JudgeFamily
from learner.trajectory import Trajectory
from protocol.messages.episodes import Reward
from protocol.messages.fields import MAX_TEXT

JUDGED, AGREEMENT = "judged", "agreement"
"""Names of the rewards of an answer that has no reference, and of a judgement of answers that have one."""
UNJUDGED, JUDGEMENT = "unjudged", "judgement"
"""Outcomes of answers that nobody could value, and of judgements that nothing can be compared with."""
UNREADABLE = -1.0
"""Agreement of a judgement that cannot be read: that of the reversed order."""
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,18})?")
_DIGIT = re.compile(r"\d")
_BETWEEN = re.compile(r"[\s,;:=|]+")
_LABEL = re.compile(r"\W{0,8}(?:answer\s{0,4})?[(\[#]{0,2}(\d{1,3})[)\].:]{1,3}\s", re.IGNORECASE)
"""The number of an answer in front of its score, as the list of the answers has it."""
_AROUND = "()[]{}<>*_`\"'!"
"""Marks that may stand around a number."""


def scores_in(text: str, answers: int, highest: float) -> list[float] | None:
    """Return the numbers of a judgement, in the order in which it saw the answers; None if it cannot be read.

    The last line that is not empty must hold one number for each answer, from 0 to ``highest``, each a word by itself:
    ``9/10`` and ``1e1`` could mean another number, so they are none. A line that begins with the number of an answer,
    as ``(2) 5``, is one of several, and not a judgement of all.

    Example:
        >>> scores_in("The first is right.\\n9, 2.5", 2, 10.0), scores_in("9", 2, 10.0), scores_in("9 99", 2, 10.0)
        ([9.0, 2.5], None, None)
    """
    line = text.strip().rpartition("\n")[2]
    label = _LABEL.match(line)
    if label is not None and 1 <= int(label[1]) <= answers:
        return None
    words = [word.strip(_AROUND).rstrip(".") for word in _BETWEEN.split(line)]
    found = [_NUMBER.fullmatch(word) for word in words if _DIGIT.search(word)]
    scores = [float(number[0]) if number is not None else math.inf for number in found]
    return scores if len(scores) == answers and all(0 <= score <= highest for score in scores) else None


def agreement(scores: Sequence[float], truth: Sequence[float]) -> float:
    r"""Return how well numbers order answers whose truth is known, -1 to 1.

    .. math:: \tau = \frac{1}{|P|} \sum_{(i, j) \in P} \mathrm{sign}(s_i - s_j), \qquad P = \{(i, j): r_i > r_j\}

    This is Kendall's tau over the pairs that the truth tells apart. Equal numbers for such a pair count 0. It is our
    reading of URPO (arXiv:2507.17515), which names no measure.

    Args:
        scores: numbers of the judgement, one for each answer.
        truth: reward of each answer, in the same order.

    Raises:
        ValueError: the truth tells no two answers apart.

    Example:
        >>> agreement([9, 2, 5], [1, 0, 0]), agreement([2, 9, 5], [1, 0, 0]), agreement([5, 5], [1, 0])
        (1.0, -1.0, 0.0)
    """
    signs = [
        np.sign(scores[i] - scores[j])
        for i, better in enumerate(truth)
        for j, worse in enumerate(truth)
        if better > worse
    ]
    if not signs:
        raise ValueError(f"all {len(truth)} answers have the truth {truth[0] if truth else None}")
    return float(np.mean(signs))


def truth_of(config: JudgeFamily, answers: Sequence[Trajectory]) -> list[float] | None:
    """Return the reference of each answer, as the environment gave it; None if the task has none."""
    given = [as_given(t) for t in answers]
    name = config.reference
    if name != "return" and not all(any(r.name == name for r in t.rewards) for t in given):
        return None
    return [total_of(t, name) for t in given]


def order_of(family: TaskFamily, judgement: int, answers: int) -> list[int]:
    """Return the order in which a judgement reads the answers: its own one, so that no place is favoured.

    It depends on the family and on the number of the judgement alone.
    """
    order: list[int] = np.random.default_rng([family.index, judgement]).permutation(answers).tolist()
    return order


def next_judgements(
    config: JudgeFamily, family: TaskFamily, group_size: int, decode: AnswerText
) -> list[ChildTask]:
    """Return the tasks of the judgements; none if they could teach nothing, or if they are here."""
    if len(family.stages) > 1:
        return []
    answers = _by_member(family.stages[0].members)
    truth = truth_of(config, answers)
    if len(answers) < 2 or (truth is not None and len(set(truth)) == 1):
        return []
    room = (MAX_TEXT - len(config.note)) // len(answers) - len(f"({len(answers)}) \n")
    texts = [answer_of(t, decode).strip()[:room] for t in answers]
    return [
        ChildTask(config.note.replace(ANSWERS, listed([texts[i] for i in order_of(family, k, len(answers))])))
        for k in range(group_size - config.answers)
    ]


def settle_judgements(config: JudgeFamily, family: TaskFamily, decode: AnswerText) -> Settled:
    """Return what is trained of a family with judgements.

    With a reference: answers by their own rewards, and judgements by their `agreement`, as two groups. Without one: the
    answers, with the mean number of all judgements as further reward `judged`; all of them were valued by the same
    judgements, so by the same policy versions.
    """
    answers = _by_member(family.stages[0].members)
    judgements = _by_member([t for stage in family.stages[1:] for t in stage.members])
    scores = [_scores(config, family, t, len(answers), decode) for t in judgements]
    truth = truth_of(config, answers)
    if truth is None:
        read = [own for own in scores if own is not None]
        if not read:
            return Settled([], {UNJUDGED: answers, JUDGEMENT: judgements})
        means = np.mean(read, axis=0) / config.highest
        valued = [
            with_rewards(t, [*t.rewards, Reward(JUDGED, last_turn(t), float(mean))])
            for t, mean in zip(answers, means, strict=True)
        ]
        return Settled(valued, {JUDGEMENT: judgements})
    if len(set(truth)) < 2:
        return Settled(answers, {JUDGEMENT: judgements})
    agreements = [UNREADABLE if own is None else agreement(own, truth) for own in scores]
    valued = [
        with_rewards(t, [Reward(AGREEMENT, last_turn(t), value)])
        for t, value in zip(judgements, agreements, strict=True)
    ]
    return Settled([*answers, *valued], {})


def judgement_metrics(trained: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean agreement of the judgements of a batch, and the mean value that judgements gave to answers."""
    found: dict[str, list[float]] = {}
    for t in trained:
        for reward in t.rewards:
            if reward.name in (JUDGED, AGREEMENT):
                found.setdefault(f"family/{reward.name}", []).append(reward.value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def readable(config: JudgeFamily, family: TaskFamily, decode: AnswerText) -> list[float]:
    """Return 1 for each judgement of a family that can be read, else 0."""
    answers = len(family.stages[0].members)
    judgements = [t for stage in family.stages[1:] for t in stage.members]
    return [float(scores_in(answer_of(t, decode), answers, config.highest) is not None) for t in judgements]


def _scores(
    config: JudgeFamily, family: TaskFamily, judgement: Trajectory, answers: int, decode: AnswerText
) -> list[float] | None:
    """Return the number of each answer, in the order of the answers' members."""
    read = scores_in(answer_of(judgement, decode), answers, config.highest)
    if read is None:
        return None
    scores = [0.0] * answers
    for place, answer in enumerate(order_of(family, member_of(judgement), answers)):
        scores[answer] = read[place]
    return scores


def listed(texts: Sequence[str]) -> str:
    """Return texts with their numbers, each on a line of its own."""
    return "\n".join(f"({place}) {text}" for place, text in enumerate(texts, start=1))


def _by_member(members: Sequence[Trajectory]) -> list[Trajectory]:
    return sorted(members, key=member_of)
