"""Notices that the part which a method is named for does nothing: no rescue, no right retry. Pure.

A method can be selected on a job that lacks what it needs. Then everything runs, and what is trained is another method.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from learner.families.reactions import parts_of
from learner.settings.advantages import ModesReward
from learner.settings.families import TaughtFamily
from learner.settings.learner import LearnerConfig

IDLE_STEPS = 20
"""Steps in a row without an effect after which it is said."""


def named_parts(config: LearnerConfig) -> tuple[str, ...]:
    """Return the metrics that are above 0 in steps in which the replay table, the lane, a teacher, the price of a mode
    or the family acts.

    Example:
        >>> named_parts(LearnerConfig(replay={"rule": "success"})), named_parts(LearnerConfig())
        (('replay/share',), ())
    """
    replay = ("replay/share",) if config.replay is not None else ()
    lane = ("learner/lane_share",) if config.lane is not None else ()
    by_teachers = config.taught is not None or isinstance(config.family, TaughtFamily)
    taught = ("learner/taught_tokens",) if by_teachers else ()
    siblings = ("learner/distilled_share",) if config.algorithm.siblings is not None else ()
    modes = ("modes/paid_less_share",) if isinstance(config.reward.group, ModesReward) else ()
    return (
        replay
        + lane
        + taught
        + siblings
        + modes
        + (parts_of(config.family) if config.family is not None else ())
    )


@dataclass
class IdleParts:
    """Counts the steps in a row in which a part did nothing.

    Example:
        >>> idle = IdleParts(("replay/share",))
        >>> [idle.look({"replay/share": 0.0}) for _ in range(IDLE_STEPS)][-1]
        ['replay/share has been 0 for 20 steps: this part of the method has done nothing']
    """

    names: tuple[str, ...]
    steps: dict[str, int] = field(default_factory=dict)

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Count a step; return a sentence on each part that has now been idle for `IDLE_STEPS` steps, once in a row."""
        told = []
        for name in self.names:
            self.steps[name] = 0 if metrics.get(name, 0.0) > 0 else self.steps.get(name, 0) + 1
            if self.steps[name] == IDLE_STEPS:
                told.append(
                    f"{name} has been 0 for {IDLE_STEPS} steps: this part of the method has done nothing"
                )
        return told
