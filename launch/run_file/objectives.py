"""What the rules of methods ask of a run file: its objectives in turn, and whether advantages compare members."""

from collections.abc import Iterator
from typing import NamedTuple

from learner.settings.advantages import GROUP_RELATIVE, comparisons_of
from learner.settings.algorithm import AlgorithmConfig, CorrectionConfig, SurrogateConfig
from learner.settings.learner import LearnerConfig


class ChangedObjective(NamedTuple):
    """The part of an objective that a reincarnation changes; `name` is the table of the run file."""

    name: str
    surrogate: SurrogateConfig
    corrections: tuple[CorrectionConfig, ...]
    updates_per_batch: int
    passes: int

    @property
    def steps(self) -> int:
        """Optimizer steps on one batch."""
        return self.updates_per_batch * self.passes


def objectives_of(algorithm: AlgorithmConfig) -> Iterator[ChangedObjective]:
    """Yield the objective of the first step, then the objective after the reincarnation, if there is one."""
    name, change = "learner.algorithm", algorithm.reincarnation
    yield ChangedObjective(
        name, algorithm.surrogate, algorithm.corrections, algorithm.updates_per_batch, algorithm.passes
    )
    if change is not None:
        name += ".reincarnation"
        yield ChangedObjective(
            name, change.surrogate, change.corrections, change.updates_per_batch, change.passes
        )


def compares_members(learner: LearnerConfig) -> bool:
    """Return whether advantages compare a trajectory with other sampled members of its group."""
    compared = comparisons_of(learner.algorithm.advantage)
    return learner.algorithm.advantage.kind in (*GROUP_RELATIVE, "risk") or (
        compared is not None and any("group" in term.among for term in compared.terms)
    )
