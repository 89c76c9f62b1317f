"""Families of a recording: only their groups that were trained are there. Pure."""

from collections.abc import Sequence

from learner.families.family import FamilyStage, TaskFamily
from learner.families.family_config import FamilyConfig
from learner.families.reactions import settle
from learner.units import Unit
from protocol import names


def joined(config: FamilyConfig, groups: Sequence[Unit]) -> list[Unit]:
    """Return the families of recorded groups, each as the unit that the recorded run trained.

    Args:
        config: settings of the recorded run.
        groups: units of a batch, in the order of the batch.
    """
    families: dict[str, list[Unit]] = {}
    for group in groups:
        families.setdefault(names.family_of(group.group_id), []).append(group)
    units = []
    for family_id, parts in families.items():
        family = TaskFamily(family_id)
        for group in sorted(parts, key=lambda part: names.stage_of(part.group_id)):
            family.add(FamilyStage(group.group_id, group.unit_id, group.trajectories))
        units.append(settle(config, family).unit(family))
    return units
