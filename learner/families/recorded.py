"""Families of a recording, which holds the groups that were trained, the first groups, and the tasks. Pure."""

from collections.abc import Mapping, Sequence

from learner.errors import CannotRetrain
from learner.families.drafts import AnswerText
from learner.families.family import ChildTask, FamilyStage, TaskFamily
from learner.families.family_config import FamilyConfig
from learner.families.reactions import settle
from learner.units import Unit
from protocol import names
from protocol.messages.episodes import Task


def joined(
    config: FamilyConfig,
    groups: Sequence[Unit],
    *,
    others: Sequence[Unit] = (),
    tasks: Sequence[Task] = (),
    decode: AnswerText | None = None,
) -> list[Unit]:
    """Return the families of recorded groups, each as the unit that the recorded run trained.

    Members that did not begin as their tasks ask for are left out, as the recorded run did.

    Args:
        config: settings of the recorded run.
        groups: units of a batch, in the order of the batch.
        others: units that were not trained, among them first groups of these families.
        tasks: tasks of the groups that have a note or a prefix.
        decode: turns the tokens of an answer into text, see `settle`.

    Raises:
        CannotRetrain: answers were valued by judgements that were not trained, so the recording lacks them.
    """
    children = {task.task_id: ChildTask(task.note, task.start) for task in tasks}
    first = {unit.group_id: FamilyStage(unit.group_id, "", unit.trajectories) for unit in (*others, *groups)}
    families: dict[str, list[Unit]] = {}
    for group in groups:
        families.setdefault(names.family_of(group.group_id), []).append(group)
    units = []
    for family_id, parts in families.items():
        family = TaskFamily(family_id)
        for group in sorted(parts, key=lambda part: names.stage_of(part.group_id)):
            stage = FamilyStage(group.group_id, group.unit_id, group.trajectories)
            if names.stage_of(group.group_id) and family_id in first:
                stage = stage.checked(first[family_id], _asked(group, children))
            family.add(stage)
        settled = settle(config, family, decode)
        if not settled.trained:
            raise CannotRetrain(
                f"family {family_id}: its answers were valued by judgements that were not trained, and a recording has "
                "only what was trained"
            )
        units.append(settled.unit(family))
    return units


def _asked(group: Unit, children: Mapping[str, ChildTask]) -> list[ChildTask]:
    """Return the tasks of a group by member; those without a note or a prefix are plain."""
    size = max((t.group_size for t in group.trajectories), default=0)
    return [children.get(names.task_id(group.group_id, member), ChildTask()) for member in range(size)]
