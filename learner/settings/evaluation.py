"""`[learner.evaluation.NAME]`: a set of held-out tasks, and how they are answered."""

from typing import Annotated

from pydantic import Field

from protocol.section import Section


class EvaluationConfig(Section):
    """`[learner.evaluation.NAME]`: a set of held-out tasks, and how they are answered. Its metrics are
    `evaluation/NAME/...`. Every set is also evaluated before the first step and at the end."""

    tasks: int = Field(64, ge=1)
    """Held-out tasks, those with the first indices. At least 1."""
    first_task: int = Field(0, ge=0)
    """Index of the first held-out task, so that sets may have different tasks."""
    env: str = ""
    """Label of the `[[env]]` table that has the tasks. With `weight = 0` there, nothing is trained on it. Absent: all
    environments, by their weights."""
    samples: int = Field(1, ge=1)
    """Answers to each task. Above 1 only with `temperature` above 0."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field((), strict=False)
    """Values of k for pass@k, at most `samples`; pass@1 is always reported. Absent: `samples`."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of sampling: the share of probability that is sampled from. Above 0, at most 1."""
    every: int | None = Field(None, ge=0)
    """Learner steps between evaluations during training. 0: none. Absent: learner.evaluation_every."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k above 1, sorted."""
        return tuple(sorted({k for k in self.pass_at or (self.samples,) if k > 1}))

    @property
    def answers(self) -> int:
        """Answers to all tasks."""
        return self.tasks * self.samples
