"""Families whose later episodes begin in the middle of a sampled one: branches and retries. Pure.

Branches are ARPO's (arXiv:2507.19849) and AEPO's (arXiv:2510.14545); their common beginnings share advantages. Retries
begin from a wrong episode, with a note on its mistake (R3L, arXiv:2601.03715) or behind the mistake (Agent-R,
arXiv:2501.11425).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.families.family import ChildTask, Settled, TaskFamily, member_of, prompt_of
from learner.families.notes import AnswerText, filled, first_answer, is_solved, transcript
from learner.settings.families import ATTEMPT, REFLECTION, BranchFamily, RetryFamily
from learner.trajectory import Trajectory
from protocol.messages.episodes import TaskStart, Turn
from protocol.messages.fields import MAX_PREFIX_BYTES


def surprisal(t: Trajectory, turn: int, tokens: int) -> float:
    """Return the mean of -log p over the first tokens of an action turn, in nats.

    Its expectation is their mean entropy, so it needs no more than the log-probabilities that were recorded.
    """
    at = next(each for each in t.turns if each.index == turn)
    return float(-t.logp_behaviour[at.start : min(at.end, at.start + tokens)].mean())


def branch_probability(change: float, weight: float, *, streak: int = 0, penalty: float = 0.0) -> float:
    r"""Return the probability of a branch for a change dH of the uncertainty.

    .. math::
        P = \mathrm{clip}\left(1 - \frac{1}{2 k} + w \, \Delta H, 0, 1\right), \qquad k = \max(0, 1 - p \, c)

    It is 0 if k is 0. ARPO's program (arXiv:2507.19849) draws u uniformly and branches if clip(u - w dH, 0, 1) <= 1/2,
    which is P with k = 1. AEPO's (arXiv:2510.14545) branches if k (u + w dH) >= 1/2, with p = 0.05, so that branches in
    a row become rare.

    Args:
        change: dH, in nats.
        weight: w.
        streak: c, the rounds in a row before this one in which an episode of the group branched.
        penalty: p, from 0.

    Example:
        >>> branch_probability(0.0, 0.2), branch_probability(1.0, 0.2), branch_probability(-9.0, 0.2)
        (0.5, 0.7, 0.0)
        >>> [round(branch_probability(0.0, 0.2, streak=c, penalty=0.05), 4) for c in (0, 5, 10, 20)]
        [0.5, 0.3333, 0.0, 0.0]
    """
    kept = max(0.0, 1.0 - penalty * streak)
    return min(1.0, max(0.0, 1.0 - 0.5 / kept + weight * change)) if kept else 0.0


def whole_episodes(group_size: int, gap: float, *, weight: float = 0.5) -> int:
    r"""Return how many members of a group are whole episodes; the others are branches.

    .. math:: m = \min(n, \lfloor n \, \sigma(\beta (H_\text{root} - \bar H_\text{steps})) \rfloor + 1)

    AEPO, arXiv:2510.14545, section 3.1, in the form of its program, where beta is 0.5. A prompt that is more uncertain
    than the steps behind it is sampled anew, and one that is less is branched.

    Args:
        group_size: n.
        gap: uncertainty of the first answer less the mean over all answers, in nats.
        weight: beta.

    Example:
        >>> [whole_episodes(16, gap) for gap in (-2.0, 0.0, 2.0, 99.0)]
        [5, 9, 12, 16]
    """
    return min(group_size, int(group_size / (1 + math.exp(-weight * gap))) + 1)


def entropy_gap(config: BranchFamily, members: Sequence[Trajectory]) -> float:
    """Return the uncertainty of the first answers less the mean over all answers, in nats, as the mean over episodes.

    The first answers are measured over `root_tokens` tokens, and all answers over `tokens`.
    """
    gaps = []
    for t in members:
        turns = [turn.index for turn in t.turns if turn.action]
        if turns:
            steps = [surprisal(t, turn, config.tokens) for turn in turns]
            gaps.append(surprisal(t, turns[0], config.root_tokens) - float(np.mean(steps)))
    return float(np.mean(gaps)) if gaps else 0.0


def branch_turns(t: Trajectory) -> list[int]:
    """Return the action turns before which a branch may begin: all but the first, each behind an observation."""
    if any(turn.back != 1 for turn in t.turns) or not _alternates(t):
        return []
    return [turn.index for turn in t.turns if turn.action][1:]


def chosen(
    config: BranchFamily, parents: Sequence[Trajectory], rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """Yield member and turn of each branch: turn by turn, and within a turn in the order of the members."""
    turns, streak = [branch_turns(t) for t in parents], 0
    for round_ in range(max(map(len, turns), default=0)):
        branched = False
        for member, t in enumerate(parents):
            if round_ >= len(turns[member]):
                continue
            turn, change = turns[member][round_], 0.0
            if config.where == "uncertain":
                first = next(each.index for each in t.turns if each.action)
                change = surprisal(t, turn, config.tokens) - surprisal(t, first, config.tokens)
            chance = branch_probability(change, config.weight, streak=streak, penalty=config.penalty)
            if rng.random() < chance:
                branched = True
                yield member, turn
        streak = streak + 1 if branched else 0


def next_branches(
    config: BranchFamily, family: TaskFamily, *, group_size: int, room: int, rng: np.random.Generator
) -> list[ChildTask]:
    """Return the branches of a family's whole episodes, and whole episodes for what is left of the budget.

    With `whole = "entropy_gap"` the first group decides how many whole episodes there are. The others are a group of
    their own, which comes before the branches.

    Args:
        group_size: whole episodes and branches together.
        room: tokens that a trajectory may have.
        rng: generator that depends on the seed of the run and on the family alone.
    """
    first = family.stages[0].members
    if not first:
        return []
    whole = config.rollouts
    if config.whole == "entropy_gap":
        whole = max(whole, whole_episodes(group_size, entropy_gap(config, first), weight=config.gap_weight))
    further, before = whole - config.rollouts, family.stages[: 2 if whole > config.rollouts else 1]
    if further and len(family.stages) == 1:
        return [ChildTask()] * further
    parents, budget = [t for stage in before for t in stage.members], group_size - whole
    if len(family.stages) > len(before) or not budget:
        return []
    children: list[ChildTask] = []
    for member, turn in chosen(config, parents, rng):
        start = prefix_of(parents[member], turn)
        if len(start.token_ids) <= min(MAX_PREFIX_BYTES, 4 * (room - 1)):
            children.append(ChildTask(start=start))
        if len(children) == budget:
            return children
    return [*children, *[ChildTask()] * (budget - len(children))]


def prefix_of(t: Trajectory, turn: int) -> TaskStart:
    """Return the beginning of a trajectory, up to the first token of an action turn."""
    end = next(each.start for each in t.turns if each.index == turn)
    return TaskStart(
        token_ids=t.token_ids[:end].astype("<i4").tobytes(),
        turns=[each for each in t.turns if each.index < turn],
        parent=t.trajectory_id,
    )


def settle_branches(family: TaskFamily) -> Settled:
    """Return what is trained of a family with branches: everything, as members of one group."""
    members = [t for stage in family.stages for t in stage.members]
    return Settled([replace(t, group_id=family.family_id) for t in members], {})


def shared_prefix_advantages(
    trajectories: Sequence[Trajectory], advantages: NDArray[np.float64], *, shared: str
) -> NDArray[np.float64]:
    r"""Return the advantage of each token, [ΣT], where branches share the beginnings of other trajectories.

    .. math:: A'_t = \frac{1}{|S_t|} \sum_{i \in S_t} A_i \quad\text{("mean")}, \qquad \sum_{i \in S_t} A_i
        \quad\text{("sum")}

    S_t are the trajectory that has sampled the token and all whose prefix holds it. The two are the hard and the soft
    form of ARPO (arXiv:2507.19849). The sum has the gradient of training each copy of the prefix.

    Args:
        trajectories: whole groups, [S]. The prefix of a branch is what it has before its first action token, and
            belongs to its `parent`. If the parent is not there, nobody trains the prefix.
        advantages: of each trajectory, [S].
        shared: "mean" or "sum".
    """
    rows = [np.full(len(t), a, dtype=np.float64) for t, a in zip(trajectories, advantages, strict=True)]
    counts = [np.ones(len(t)) for t in trajectories]
    places = {t.trajectory_id: i for i, t in enumerate(trajectories)}
    for t, advantage in zip(trajectories, advantages, strict=True):
        if (owner := places.get(t.parent)) is not None:
            rows[owner][: t.prompt_tokens] += advantage
            counts[owner][: t.prompt_tokens] += 1
    if shared == "mean":
        rows = [row / count for row, count in zip(rows, counts, strict=True)]
    return np.concatenate([np.zeros(0), *rows])


def success_rates(trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
    r"""Return the share of right answers among the samples that went on from the tokens before each token, [ΣT].

    .. math:: \hat V(s) = \frac{1}{|N(s)|} \sum_{i \in N(s)} \hat V(s_i), \qquad \hat V(\text{end}) = 0 \text{ or } 1

    s is what stands before the token. N(s) are the finished trajectories of the group that were sampled from s on, in
    which each has gone to a state s_i. A branch was sampled from its beginning on alone: before it, its answer counts
    for its parent, whose value at the branching is the mean of both. So a state with many branches behind it has no
    more weight than one without. DAPO, arXiv:2412.18279, samples continuations of each step for this estimate.

    Args:
        trajectories: whole groups, [S]; without branches, too, states that several members share have their mean.

    Returns:
        Shares from 0 to 1; 0 for all tokens of unfinished trajectories.
    """
    # One more place than tokens: the last is what stands behind the last token.
    rates = [np.zeros(len(t) + 1) for t in trajectories]
    groups: dict[str, list[int]] = {}
    for i, t in enumerate(trajectories):
        if t.status != "unfinished":
            groups.setdefault(t.group_id, []).append(i)
    # Each entry is a set of trajectories with the same tokens before `start`, and the place at which they part. Sets
    # are split until each has one member; then rates go back from the ends to the beginnings.
    waiting, splits = [(members, 0) for members in groups.values()], []
    while waiting:
        members, start = waiting.pop()
        end = _parting(trajectories, members, start)
        splits.append((members, start, end))
        parts: dict[int, list[int]] = {}
        for i in members:
            t = trajectories[i]
            # One that has ended here is a part of its own.
            parts.setdefault(int(t.token_ids[end]) if end < len(t) else -1 - i, []).append(i)
        waiting += [(part, end + 1) for part in parts.values() if len(part) > 1]
        for i, *others in parts.values():
            if not others:
                rates[i][end + 1 :] = trajectories[i].solved
    for members, start, end in reversed(splits):
        ways = [(trajectories[i], rates[i]) for i in members]
        behind = np.array([rate[end + 1] if end < len(t) else t.solved for t, rate in ways])
        begins = np.array([t.prompt_tokens if t.parent else 0 for t, _ in ways])
        if (sampled := behind[begins <= end]).size:
            for _, rate in ways:
                rate[start : end + 1] = sampled.mean()
    return np.concatenate([np.zeros(0), *(rate[:-1] for rate in rates)])


def _parting(trajectories: Sequence[Trajectory], members: Sequence[int], start: int) -> int:
    """Return the first place from ``start`` on at which the members differ, or at which one of them has ended."""
    shortest = min(len(trajectories[i]) for i in members)
    rows = np.stack([trajectories[i].token_ids[start:shortest] for i in members])
    different = (rows != rows[0]).any(axis=0)
    return start + int(different.argmax()) if different.any() else shortest


def _alternates(t: Trajectory) -> bool:
    return all(turn.index == n and turn.action == bool(n % 2) for n, turn in enumerate(t.turns))


OUTCOME = "reflection"
"""Outcome of reflections."""
EMPTY = np.empty(0, np.uint8)
_KEPT = re.compile(r"\bkeep\s+(\d{1,4})\b", re.IGNORECASE)


def kept_steps(reflection: str) -> int:
    """Return the number of steps that a reflection keeps, by its last "keep K"; 0 if it names none.

    Example:
        >>> kept_steps("The third step was wrong: keep 2 steps."), kept_steps("All was wrong.")
        (2, 0)
    """
    named = _KEPT.findall(reflection)
    return int(named[-1]) if named else 0


def parting_step(wrong: Trajectory, right: Trajectory) -> int:
    """Return the number of first steps that two episodes of a task share, token by token."""
    pairs = zip(_actions(wrong), _actions(right), strict=False)
    same = (bool(np.array_equal(a, b)) for a, b in pairs)
    return next((n for n, equal in enumerate(same) if not equal), min(_steps(wrong), _steps(right)))


def next_retries(
    config: RetryFamily, family: TaskFamily, *, budget: int, room: int, decode: AnswerText
) -> list[ChildTask]:
    """Return the tasks of a family's reflections, or of its retries; none if the family is to be trained.

    Nothing is retried if no first episode is wrong. With "parting", a wrong one is retried only if it went on behind
    the first step that a right one did not take, and if there is room for this beginning.

    Args:
        config: kind of the family.
        family: its groups so far.
        budget: retries of a task.
        room: tokens that a trajectory may have.
        decode: turns tokens into text.
    """
    first = family.stages[0].members
    wrong = [t for t in first if not is_solved(config, t)]
    right = [t for t in first if is_solved(config, t)]
    if config.begin == "parting":
        wrong = [t for t in wrong if _retry(config, t, right, "", room=room, decode=decode)]
    if len(family.stages) > config.stages or not wrong:
        return []
    parents = [wrong[n % len(wrong)] for n in range(budget)]
    if config.reflection and len(family.stages) == 1:
        return [ChildTask(filled(config.reflection, {ATTEMPT: transcript(t, decode)})) for t in parents]
    attempts = [(t, "") for t in parents]
    if config.reflection:
        reflections = family.stages[1].members
        attempts = [(parents[member_of(t) % budget], first_answer(t, decode)) for t in reflections]
    retries = [_retry(config, t, right, said, room=room, decode=decode) for t, said in attempts]
    return [each for each in retries if each is not None]


def settle_retries(config: RetryFamily, family: TaskFamily) -> Settled:
    """Return what is trained of a family with retries: first episodes and retries as one group, and no reflection."""
    by_stage = {stage.number: list(stage.members) for stage in family.stages}
    first, retries = by_stage.get(0, []), by_stage.get(config.stages, [])
    reflections = by_stage.get(1, []) if config.reflection else []
    if config.mask_shared:
        first = [without_shared(t, retries) for t in first]
    if config.clean and first:
        retries = [behind_prompt(t, prompt_of(first[0])) for t in retries]
    trained = [replace(t, group_id=family.family_id) for t in (*first, *retries)]
    return Settled(trained, {OUTCOME: reflections})


def behind_prompt(t: Trajectory, prompt: NDArray[np.int32]) -> Trajectory:
    """Return a trajectory with a different first prompt, [P] token ids, in front of its other tokens.

    The behaviour log-probabilities stay those behind the prompt that was sampled from.
    """
    end = len(prompt_of(t))
    front, moved = len(prompt), len(prompt) - end
    first, *later = t.turns or [Turn(0, 0, end, False)]
    turns = [msgspec.structs.replace(first, end=front)]
    turns += [msgspec.structs.replace(turn, start=turn.start + moved, end=turn.end + moved) for turn in later]
    stays = t.routed_token >= end
    return replace(
        t,
        token_ids=np.concatenate([prompt, t.token_ids[end:]]),
        action_mask=np.concatenate([np.zeros(front, np.bool_), t.action_mask[end:]]),
        logp_behaviour=np.concatenate([np.zeros(front, np.float32), t.logp_behaviour[end:]]),
        policy_version=np.concatenate([np.full(front, -1, np.int32), t.policy_version[end:]]),
        routed_token=t.routed_token[stays] + np.int32(moved),
        routed_experts=t.routed_experts.reshape(len(stays), -1)[stays].reshape(-1) if stays.any() else EMPTY,
        turns=turns if t.turns else [],
        origin="guided",
        moved=t.moved + moved,
    )


def without_shared(t: Trajectory, retries: Sequence[Trajectory]) -> Trajectory:
    """Return a first episode without training of the turns that its own retries repeat, as auxiliary turns.

    Other episodes of the group train these steps, even if theirs are equal (R3L, arXiv:2601.03715).

    Args:
        t: a member of the first group.
        retries: retries of the family; each repeats steps of its `parent`.
    """
    begin = len(prompt_of(t))
    own = [each for each in retries if each.parent == t.trajectory_id]
    # The prompt of a retry may have a note, so the two beginnings differ in length.
    shared = max((begin + each.prompt_tokens - len(prompt_of(each)) for each in own), default=begin)
    repeated_turns = {turn.index for turn in t.turns if turn.action and turn.end <= shared}
    return replace(t, auxiliary=sorted({*t.auxiliary, *repeated_turns})) if repeated_turns else t


def _retry(
    config: RetryFamily,
    wrong: Trajectory,
    right: Sequence[Trajectory],
    reflection: str,
    *,
    room: int,
    decode: AnswerText,
) -> ChildTask | None:
    """Return the task that tries a wrong episode again; None if "parting" has no place for it to begin."""
    texts = {ATTEMPT: transcript(wrong, decode), REFLECTION: reflection}
    note = filled(config.note, texts) if config.note else ""
    match config.begin:
        case "prompt":
            return ChildTask(note)
        case "named":
            return ChildTask(note, _start(wrong, kept_steps(reflection), note, room))
        case "parting":
            # The first step that differs is repeated, too, so that the retry goes on behind the mistake. Nothing may
            # follow it if the nearest right episode parts last; then a less near one decides.
            places = sorted({parting_step(wrong, t) + 1 for t in right}, reverse=True)
            starts = (_start(wrong, kept, note, room) for kept in places)
            return next((ChildTask(note, start) for start in starts if start is not None), None)


def _start(t: Trajectory, kept: int, note: str, room: int) -> TaskStart | None:
    """Return the beginning of an episode up to and with what follows a step; None: it begins with the prompt.

    None if the episode has no further step there, or if prefix and note do not fit into a task or a trajectory.
    """
    places = branch_turns(t)
    if not 0 < kept <= len(places):
        return None
    start = prefix_of(t, places[kept - 1])
    most = min(MAX_PREFIX_BYTES - len(note.encode()), 4 * (room - 1))
    return start if len(start.token_ids) <= most else None


def _actions(t: Trajectory) -> list[NDArray[np.int32]]:
    return [t.token_ids[turn.start : turn.end] for turn in t.turns if turn.action]


def _steps(t: Trajectory) -> int:
    return sum(turn.action for turn in t.turns)
