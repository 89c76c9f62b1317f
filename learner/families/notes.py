"""Families whose later tasks read a note behind the prompt: a draft, a hint, examples, or what really followed.

Drafts are iGRPO's (arXiv:2602.09000), examples are XRPO's seeding (arXiv:2510.06672), and refined episodes are
Dyna-Mind's (arXiv:2510.09577). Here are also the texts of episodes that notes quote. Everything is pure.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from learner.families.family import ChildTask, Settled, TaskFamily, member_of, prompt_of
from learner.settings.families import (
    DRAFT,
    EXAMPLES,
    FUTURE,
    HINT,
    DraftFamily,
    GuidedFamily,
    HintFamily,
    RefineFamily,
    SolvedFamily,
)
from learner.trajectory import Trajectory, is_right
from protocol.messages.episodes import Turn
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


UNHINTED, REPLACED = "unhinted", "replaced"
"""Outcomes of members of groups that a stronger hint replaced, and of a wrong answer that a right one replaced."""


def hint_levels(hints: Sequence[str], shares: Sequence[float]) -> list[str]:
    """Return the hints in rising strength: a share of the characters of one text, or of a list of texts.

    A hint that is empty, or that is the one before it, is left out. With one text of n characters, the hint of share w
    is its first round(w n) characters (GHPO, arXiv:2507.10628). With n texts it is the first ceil(w n) of them, each on
    a line of its own, so that hints accumulate (Scaf-GRPO, arXiv:2510.19807).

    Example:
        >>> hint_levels(["17 + 25 = 42"], [0.25, 0.5, 1.0])
        ['17 ', '17 + 2', '17 + 25 = 42']
        >>> hint_levels(["carry the 1", "it is 42"], [0.5, 0.75])
        ['carry the 1', 'carry the 1\\nit is 42']
    """
    levels: list[str] = []
    for share in shares:
        if len(hints) == 1:
            level = hints[0][: round(share * len(hints[0]))]
        else:
            level = "\n".join(hints[: math.ceil(share * len(hints))])
        if level and level not in levels:
            levels.append(level)
    return levels


def is_solved(config: SolvedFamily, t: Trajectory) -> bool:
    """Return whether a trajectory is right, by the rewards that the environment gave."""
    if config.reward:
        return t.reward_by_name.get(config.reward, 0.0) > config.above
    return is_right(t.return_, t.correct, config.above)


def next_hint(config: HintFamily, family: TaskFamily, group_size: int) -> list[ChildTask]:
    """Return the tasks with the next hint; none if the family is to be trained.

    There is no next hint if a member of the newest group is right, if the strongest one was given, or if the group was
    one of the first `warmup_groups`. The reaction depends on the delivered members alone, so it is the same after a
    restart.
    """
    if family.index < config.warmup_groups or any(is_solved(config, t) for t in family.stages[-1].members):
        return []
    levels = hint_levels(family.hints, config.shares) if family.stages[0].members else []
    given = len(family.stages) - 1
    if given >= len(levels):
        return []
    note = config.note.replace(HINT, levels[given])[:MAX_TEXT]
    return [ChildTask(note)] * (config.members or group_size)


def settle_hints(config: HintFamily, family: TaskFamily) -> Settled:
    """Return what is trained of a family with hints.

    Without `members` it is the newest group that has any member (GHPO). Otherwise it is the first group, in which the
    first right answer to a hint takes the place of the last member (Scaf-GRPO).
    """
    first, *hinted = family.stages
    if not config.members:
        last = next((stage for stage in reversed(family.stages) if stage.members), first)
        return Settled(
            last.members,
            {UNHINTED: [t for stage in family.stages if stage is not last for t in stage.members]},
        )
    newest = [t for stage in hinted for t in stage.members]
    right = next((t for t in newest if is_solved(config, t)), None)
    if first.number or right is None or not first.members:
        return Settled(first.members, {UNHINTED: newest})
    return Settled(
        [*first.members[:-1], replace(right, group_id=first.group_id)],
        {REPLACED: [first.members[-1]], UNHINTED: [t for t in newest if t is not right]},
    )


def example_text(t: Trajectory, asked: str, decode: AnswerText) -> str:
    """Return the text of a solved task for a note: its prompt, and what was said.

    Args:
        t: the solved task.
        asked: text of the prompt of the present task; the lines that both begin and end with are left out.
        decode: turns tokens into text.
    """
    return f"{own_lines(decode(prompt_of(t).tolist()), asked).strip()}\n{transcript(t, decode)}"


UNGUIDED, EXAMPLE = "unguided", "example"
"""Outcomes of a first group that a group with examples replaced, and of answers to other tasks."""


def other_tasks(index: int, count: int, rng: np.random.Generator) -> list[int]:
    """Return the numbers of different tasks, drawn from those before a task and, at the beginning, some after it.

    Example:
        >>> sorted(other_tasks(1, 3, np.random.default_rng(0)))
        [0, 2, 3]
    """
    tasks = [each for each in range(max(index, count) + 1) if each != index]
    return [int(each) for each in rng.choice(tasks, count, replace=False)]


def similarity(a: Trajectory, b: Trajectory) -> float:
    """Return the share of the different prompt tokens of two trajectories that both have, 0 to 1."""
    ours, theirs = set(prompt_of(a).tolist()), set(prompt_of(b).tolist())
    return len(ours & theirs) / max(1, len(ours | theirs))


def next_guided(
    config: GuidedFamily, family: TaskFamily, group_size: int, decode: AnswerText, rng: np.random.Generator
) -> list[ChildTask]:
    """Return the tasks that look for examples, or those with examples; none if the family is to be trained.

    Args:
        config: kind of the family.
        family: its groups so far.
        group_size: members of a group.
        decode: turns tokens into text.
        rng: generator that depends on the seed of the run and on the family alone.
    """
    first = family.stages[0].members
    if len(family.stages) > 2 or not first or any(is_solved(config, t) for t in first):
        return []
    if len(family.stages) == 1:
        return [ChildTask(index=index) for index in other_tasks(family.index, config.candidates, rng)]
    plain = first[0]
    solved: dict[bytes, Trajectory] = {}
    for t in family.stages[1].members:
        if is_solved(config, t):
            # The environment may have few tasks, so that two numbers stand for one: an answer of each is kept.
            solved.setdefault(prompt_of(t).tobytes(), t)
    solved.pop(prompt_of(plain).tobytes(), None)
    if not solved:
        return []
    nearest = sorted(solved.values(), key=lambda t: -similarity(t, plain))[: config.examples]
    asked = decode(prompt_of(plain).tolist())
    texts = [example_text(t, asked, decode) for t in nearest]
    return [ChildTask(filled(config.note, {EXAMPLES: "\n\n".join(texts)}))] * group_size


def settle_guided(config: GuidedFamily, family: TaskFamily) -> Settled:
    """Return what is trained of a family with examples: the group behind them, or else the first group."""
    by_stage = {stage.number: stage.members for stage in family.stages}
    first, guided = by_stage.get(0, ()), by_stage.get(config.stages, ())
    return Settled(guided or first, {UNGUIDED: first if guided else (), EXAMPLE: by_stage.get(1, ())})


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
