"""Episodes that are tried again after they failed (R3L, arXiv:2601.03715; Agent-R, arXiv:2501.11425). Pure."""

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.families.branching import branch_turns, prefix_of
from learner.families.drafts import AnswerText
from learner.families.family import ChildTask, Settled, TaskFamily, member_of, prompt_of
from learner.families.family_config import ATTEMPT, REFLECTION, RetryFamily
from learner.families.hints import is_solved
from learner.families.transcripts import filled, first_answer, transcript
from learner.trajectory import Trajectory
from protocol.messages.episodes import TaskStart, Turn
from protocol.messages.fields import MAX_PREFIX_BYTES

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
