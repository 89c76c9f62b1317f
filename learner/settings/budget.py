"""`[learner.budget]`: how many answers a task gets."""

from typing import Annotated, Literal

from pydantic import Field

from learner.settings.formulas import OwnFormula
from protocol.section import Section

MOST_TASKS = 20_000
"""Most tasks of a list whose answers are shared out: with more it takes longer than a group."""


class OwnPrediction(OwnFormula):
    """A prediction of your own. Its function takes `learner.selection.TaskStats` and the settings, and returns the
    probability of a success for each task of the list. All keys beside `kind` are its settings."""


class FixedBudget(Section):
    """Each task gets learner.group_size answers."""

    kind: Literal["fixed"] = "fixed"


class SharedBudget(Section):
    """The answers of a list of tasks, learner.group_size for each on average, are shared out among its tasks."""

    smallest: int = Field(2, ge=2)
    """Fewest answers to a task. At least 2, at most learner.group_size."""
    largest: int = Field(16, ge=2, le=256)
    """Most answers to a task. At least learner.group_size, at most 256."""
    predict: OwnPrediction | None = None
    """What predicts the success rate of a task. Absent: its own answers, with a prior of one success and one
    failure."""


class UncertaintyBudget(SharedBudget):
    """The next answer goes to the task whose mean reward it makes most certain, or that has few answers (XRPO,
    arXiv:2510.06672)."""

    kind: Literal["by_uncertainty"] = "by_uncertainty"
    alpha: float = Field(0.05, gt=0, lt=1)
    """The confidence interval of the mean has the level 1 - alpha. Above 0, below 1. Not in the paper."""
    explore: float = Field(0.1, ge=0)
    """Weight of the bonus for tasks with few answers. At least 0. Not in the paper."""


class ValueBudget(SharedBudget):
    """The next answer goes to the task whose utility B (1 - p) (1 - (1 - p)^(B - 1)) it raises most (V_0,
    arXiv:2602.03584). Without `largest` the hardest tasks would get all."""

    kind: Literal["by_value"] = "by_value"


BudgetConfig = Annotated[FixedBudget | UncertaintyBudget | ValueBudget, Field(discriminator="kind")]
