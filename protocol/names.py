"""Names of tasks, trajectories and units. They are composed and parsed here, and nowhere else.

    group         1g17            lineage 1, the group that was dealt out as number 17
    task          1g17.3          member 3 of this group
    stage         1g17r2          group 2 that the group 1g17 has asked for; the two are of the family 1g17
    chosen        1g17t42n12u3    group 17 has task 42, 12 members, and its task was dealt 3 times of late; see `Choice`
    trajectory    1g17.3.0        attempt 0 at this task
    window unit   1g17.3.0/2      segment 2 of this trajectory, delivered as a unit
    evaluation    1eval-before-5  evaluation "before" of epoch 1, task 5; its group has the same name

A unit of a whole group has the group's name, a unit of one trajectory the trajectory's name. To the
broker names are text, except that it appends and reads the attempt, and appends the segment index.
"""

import re
from typing import NamedTuple

SegmentKey = tuple[str, int]
"""Trajectory id and index of a segment."""

_GROUP = re.compile(r"(\d+)g(\d+)((?:t\d+)?(?:i\d+)?(?:n\d+)?(?:u\d+)?)(?:r(\d+))?")
_CHOICE = re.compile(r"([tinu])(\d+)")
_TRAINING_TASK = re.compile(_GROUP.pattern + r"\.(\d+)")
_LARGEST_ATTEMPT_DIGITS = 9


class Choice(NamedTuple):
    """What was chosen for a group by what is known of the tasks, so that it does not follow from the group's number.

    The name of the group says it. So whoever holds the group can tell, also after a restart of the learner.
    """

    task: int | None = None
    """Number of the task; None: it follows from the number of the group."""
    instruction: int | None = None
    """Number of the instruction that the note has; None: there is none."""
    size: int | None = None
    """Members of the group; None: as many as the settings say."""
    uses: int = 1
    """How often the task was dealt of late, this time included."""


PLAIN = Choice()


class TrainingTask(NamedTuple):
    """The parts of a training task's name."""

    lineage: int
    group_index: int
    member: int
    stage: int = 0
    """Number of the group in its family; 0 is the one that was dealt out."""
    choice: Choice = PLAIN


def group_id(lineage: int, group_index: int, choice: Choice = PLAIN) -> str:
    """Name a rollout group.

    Example:
        >>> group_id(1, 17), group_id(1, 17, Choice(task=42, size=12, uses=3))
        ('1g17', '1g17t42n12u3')
    """
    parts = zip("tin", (choice.task, choice.instruction, choice.size), strict=True)
    chosen = "".join(f"{letter}{number}" for letter, number in parts if number is not None)
    uses = f"u{choice.uses}" if choice.uses != 1 else ""
    return f"{lineage}g{group_index}{chosen}{uses}"


def choice_of(group: str) -> Choice:
    """Return what the name of a group says was chosen for it; `PLAIN` for a name of another form.

    Example:
        >>> choice_of("1g17t42u3r2"), choice_of("1g17") == choice_of("mine") == PLAIN
        (Choice(task=42, instruction=None, size=None, uses=3), True)
    """
    match = _GROUP.fullmatch(group)
    return _choice(match[3]) if match else PLAIN


def _choice(text: str) -> Choice:
    parts = {letter: int(digits) for letter, digits in _CHOICE.findall(text)}
    return Choice(parts.get("t"), parts.get("i"), parts.get("n"), parts.get("u", 1)) if parts else PLAIN


def without_choice(name: str) -> str:
    """Return the name of a group or task without what was chosen; a name of another form is returned as it is.

    Example:
        >>> without_choice("1g17t42n12.3"), without_choice("1g17t42r2"), without_choice("1eval-a-5")
        ('1g17.3', '1g17r2', '1eval-a-5')
    """
    match = _GROUP.fullmatch(name.partition(".")[0])
    return name if match is None else name[: match.start(3)] + name[match.end(3) :]


def group_index(group: str) -> int:
    """Return the number of a group: its place in the order in which groups were dealt out.

    Example:
        >>> group_index("3g17"), group_index("3g17r2"), group_index("3g17t42n8")
        (17, 17, 17)
    """
    match = _GROUP.fullmatch(group)
    if match is None:
        raise ValueError(f"{group!r} is no name of a rollout group")
    return int(match[2])


def stage_id(family: str, stage: int) -> str:
    """Name the group of a stage of a family; stage 0 has the name of the family.

    Example:
        >>> stage_id("1g17", 2), stage_id("1g17", 0)
        ('1g17r2', '1g17')
    """
    return f"{family}r{stage}" if stage else family


def family_of(group: str) -> str:
    """Return the family of a group: the group that was dealt out. A name of a different form is returned as it is.

    Example:
        >>> family_of("1g17r2"), family_of("1g17"), family_of("1eval-for-5")
        ('1g17', '1g17', '1eval-for-5')
    """
    return group.partition("r")[0] if _GROUP.fullmatch(group) else group


def stage_of(group: str) -> int:
    """Return the stage in the name of a group; 0 for a name without one.

    Example:
        >>> stage_of("1g17r2"), stage_of("1g17")
        (2, 0)
    """
    match = _GROUP.fullmatch(group)
    return int(match[4] or 0) if match else 0


def task_id(group: str, member: int) -> str:
    """Name a member of a rollout group.

    Example:
        >>> task_id("1g17", 3)
        '1g17.3'
    """
    return f"{group}.{member}"


def training_task(task: str) -> TrainingTask | None:
    """Parse the name of a training task; return None if the name has a different form.

    Example:
        >>> training_task("1g17.3"), training_task("1g17r2.0").stage
        (TrainingTask(lineage=1, group_index=17, member=3, stage=0, choice=...), 2)
        >>> training_task("1eval-before-5") is None
        True
    """
    match = _TRAINING_TASK.fullmatch(task)
    if match is None:
        return None
    lineage, index, chosen, stage, member = match.groups()
    return TrainingTask(int(lineage), int(index), int(member), int(stage or 0), _choice(chosen))


def group_of_task(task: str) -> str:
    """Return the group in a task's name.

    Example:
        >>> group_of_task("1g17.3")
        '1g17'
    """
    return task.rpartition(".")[0]


def trajectory_id(task: str, attempt: int) -> str:
    """Name the trajectory of one attempt at a task.

    Example:
        >>> trajectory_id("1g17.3", 0)
        '1g17.3.0'
    """
    return f"{task}.{attempt}"


def task_of(trajectory: str) -> str:
    """Return the task in a trajectory's name.

    Example:
        >>> task_of("1g17.3.0")
        '1g17.3'
    """
    return trajectory.rpartition(".")[0]


def attempt_of(trajectory: str) -> int:
    """Return the attempt in a trajectory's name; -1 if the name does not end in a plain number.

    Example:
        >>> attempt_of("1g17.3.12"), attempt_of("1g17.3.07"), attempt_of("mine")
        (12, -1, -1)
    """
    digits = trajectory.rpartition(".")[2]
    plain = digits.isascii() and digits.isdecimal() and len(digits) <= _LARGEST_ATTEMPT_DIGITS
    return int(digits) if plain and digits == str(int(digits)) else -1


def window_id(trajectory: str, index: int) -> str:
    """Name the unit of a single segment, a window.

    Example:
        >>> window_id("1g17.3.0", 2)
        '1g17.3.0/2'
    """
    return f"{trajectory}/{index}"


def window(unit: str) -> SegmentKey | None:
    """Return trajectory and segment index of a window, or None for a unit of whole trajectories.

    Example:
        >>> window("1g17.3.0/2"), window("1g17")
        (('1g17.3.0', 2), None)
    """
    name, slash, index = unit.partition("/")
    return (name, int(index)) if slash else None


def without_window(unit: str) -> str:
    """Return the group or trajectory that a unit is, or is a window of.

    Example:
        >>> without_window("1g17.3.0/2"), without_window("1g17")
        ('1g17.3.0', '1g17')
    """
    return unit.partition("/")[0]


def group_of_unit(unit: str) -> str:
    """Return the group in the name of a unit of any form.

    Example:
        >>> group_of_unit("1g17"), group_of_unit("1g17.3.0"), group_of_unit("1g17.3.0/2")
        ('1g17', '1g17', '1g17')
    """
    return unit.partition(".")[0]


def evaluation_id(epoch: int, tag: str, index: int) -> str:
    """Name a task of an evaluation; its group has the same name.

    Example:
        >>> evaluation_id(1, "before 0", 5)
        '1eval-before 0-5'
    """
    return f"{epoch}eval-{tag}-{index}"


def is_evaluation(name: str, epoch: int) -> bool:
    """Return whether a name belongs to an evaluation task of this epoch.

    Example:
        >>> is_evaluation("1eval-before 0-5", 1), is_evaluation("11eval-before 0-5", 1)
        (True, False)
    """
    return name.startswith(f"{epoch}eval-")
