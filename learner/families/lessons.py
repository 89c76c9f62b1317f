"""Lessons of a tiny model: how the tasks of a family are answered, made from solved tasks. Pure.

A model of a million parameters has never read a note. Without lessons it writes the characters of its one task behind
every note: no judgement can be read, no reflection names a step, and no retry goes on behind a mistake. A lesson shows
the form. What is right in it, such as the order of the answers that a judgement reads, is left to RL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from learner.families.judging import listed
from learner.families.notes import filled, hint_levels
from learner.settings.families import (
    ANSWERS,
    ATTEMPT,
    DRAFT,
    EXAMPLES,
    FUTURE,
    HINT,
    INSTRUCTION,
    REFLECTION,
    BranchFamily,
    DraftFamily,
    FamilyConfig,
    GuidedFamily,
    HintFamily,
    JudgeFamily,
    ProposeFamily,
    RefineFamily,
    RetryFamily,
    SteeredFamily,
    TaughtFamily,
    VerdictFamily,
)
from learner.settings.selection import PopulationSelection

EVERY = 3
"""One of so many solved tasks makes lessons: a form is learnt from fewer examples than the task, and notes are long."""


@dataclass(frozen=True)
class SolvedTask:
    """A demonstration in texts."""

    prompt: str
    """Last message before the first answer."""
    actions: Sequence[str]
    """What the policy says, turn by turn."""
    observations: Sequence[str] = ()
    """What the environment answers to each action but the last."""


@dataclass(frozen=True)
class Lesson:
    """A solved task with a note behind its prompt."""

    task: int
    """Place of the solved task."""
    note: str
    answer: str | None = None
    """The only answer. None: the answers of the solved task."""
    mistake: tuple[int, str] | None = None
    """An action that is not to be learnt, and before which action of the solved task it is taken."""


def lessons(family: FamilyConfig, tasks: Sequence[SolvedTask], rng: np.random.Generator) -> list[Lesson]:
    """Return the lessons of a family for every third task, in order; none for a family without notes."""
    made: list[Lesson] = []
    for number in range(0, len(tasks), EVERY):
        made += _of_task(family, number, tasks, rng)
    return made


def followed(
    population: PopulationSelection,
    tasks: Sequence[SolvedTask],
    rng: np.random.Generator,
    family: FamilyConfig | None = None,
) -> list[Lesson]:
    """Return what teaches a tiny model to follow instructions: behind the first one it answers right, behind the others
    it makes a mistake.

    So one of the instructions helps, and which one is for the run to find out. Half of the lessons have the first one.
    With equal shares a mistake would stand behind five of six lessons, and the model learns that before it learns to
    tell the instructions apart.

    Where the policy proposes instructions, it is taught to write those of `ProposeFamily.lessons`, and the first of
    these is the one that helps. So the population has none that does until the policy proposes it.
    """
    made = []
    taught = family.lessons if isinstance(family, ProposeFamily) else ()
    helpful, *others = (*taught, *population.instructions)
    for number in range(0, len(tasks), EVERY):
        answer = tasks[number].actions[-1]
        if rng.random() < 0.5:
            made.append(Lesson(number, helpful, answer))
        else:
            made.append(Lesson(number, others[rng.integers(len(others))], spoiled(answer, rng)))
        if isinstance(family, ProposeFamily) and taught:
            instruction = population.instructions[rng.integers(len(population.instructions))]
            texts = {INSTRUCTION: instruction, ATTEMPT: spoiled(answer, rng).strip()}
            made.append(Lesson(number, filled(family.note, texts), taught[rng.integers(len(taught))]))
    return made


def _of_task(
    family: FamilyConfig, number: int, tasks: Sequence[SolvedTask], rng: np.random.Generator
) -> list[Lesson]:
    task = tasks[number]
    match family:
        case JudgeFamily():
            right = rng.random(family.answers) < 0.5
            texts = [task.actions[-1] if good else spoiled(task.actions[-1], rng) for good in right]
            scores = ", ".join(f"{family.highest:g}" if good else "0" for good in right)
            return [Lesson(number, family.note.replace(ANSWERS, listed(texts)), scores)]
        case DraftFamily():
            draft = task.actions[-1] if rng.random() < 0.5 else spoiled(task.actions[-1], rng)
            return [Lesson(number, family.note.replace(DRAFT, draft))]
        case HintFamily():
            levels = hint_levels(["".join(task.actions)], family.shares)
            return (
                [Lesson(number, family.note.replace(HINT, levels[rng.integers(len(levels))]))]
                if levels
                else []
            )
        case RefineFamily():
            shown = min(family.horizon, int(rng.integers(len(task.actions))))
            pairs = zip(task.actions[:shown], task.observations, strict=False)
            future = "\n".join(text.strip() for pair in pairs for text in pair)
            return [Lesson(number, family.note.replace(FUTURE, future))] if shown else []
        case SteeredFamily(own=True):
            return [
                Lesson(number, family.note.replace(EXAMPLES, attempt_of(task.actions, task.observations)))
            ]
        case GuidedFamily() | SteeredFamily():
            others = [tasks[int(k)] for k in rng.integers(len(tasks), size=family.examples)]
            texts = [f"{other.prompt}\n{attempt_of(other.actions, other.observations)}" for other in others]
            return [Lesson(number, filled(family.note, {EXAMPLES: "\n\n".join(texts)}))]
        case RetryFamily():
            return _of_retry(family, number, tasks, rng)
        case BranchFamily() | TaughtFamily() | VerdictFamily() | ProposeFamily():
            # Planted mistakes are tasks of the environment, which has demonstrations of them. `followed` makes those of
            # proposals.
            return []
        case _:
            assert_never(family)


def _of_retry(
    family: RetryFamily, number: int, tasks: Sequence[SolvedTask], rng: np.random.Generator
) -> list[Lesson]:
    """Return how a wrong attempt is reflected on, and how it is tried again."""
    task, other = tasks[number], tasks[int(rng.integers(len(tasks)))]
    kept = int(rng.integers(len(task.actions)))
    mistake = other.actions[min(kept, len(other.actions) - 1)]
    attempt = attempt_of([*task.actions[:kept], mistake], task.observations[:kept])
    said = f"keep {kept} steps"
    texts = {ATTEMPT: attempt, REFLECTION: said}
    note = filled(family.note, texts) if family.note else ""
    if family.begin == "parting":
        return [Lesson(number, note, mistake=(kept, mistake))]
    reflection = [Lesson(number, filled(family.reflection, texts), said)] if family.reflection else []
    return [*reflection, Lesson(number, note)]


def attempt_of(actions: Sequence[str], observations: Sequence[str]) -> str:
    r"""Return the text of an attempt, as `learner.families.notes.transcript` writes that of an episode.

    Example:
        >>> attempt_of(["4+3", "7-8"], ["7"]), attempt_of(["=6"], [])
        ('Step 1: 4+3\n7\nStep 2: 7-8', '=6')
    """
    if len(actions) < 2:
        return "".join(actions).strip()
    lines = []
    for number, action in enumerate(actions, start=1):
        lines.append(f"Step {number}: {action.strip()}")
        if number <= len(observations):
            lines.append(observations[number - 1].strip())
    return "\n".join(lines)


def spoiled(text: str, rng: np.random.Generator) -> str:
    """Return a text with a mistake: two neighbours change places, or the last character is lost.

    Example:
        >>> spoiled("ab", np.random.default_rng(0)), spoiled("aa", np.random.default_rng(0))
        ('ba', 'a')
    """
    places = [n for n in range(len(text) - 1) if text[n] != text[n + 1]]
    if not places:
        return text[:-1]
    n = places[int(rng.integers(len(places)))]
    return text[:n] + text[n + 1] + text[n] + text[n + 2 :]
