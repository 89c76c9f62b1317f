"""`[learner.given]`: learn from conversations that another policy, or a person, has written."""

from pydantic import Field

from protocol.section import Section


class GivenConfig(Section):
    """A part of each batch is given: conversations that somebody else wrote, whose answers the policy imitates. With
    `share = 1` nothing is sampled to train on. That is supervised training, often the stage before reinforcement
    learning; see docs/understand/given.md."""

    file: str = ""
    """File of conversations, with the endings that `env.name = "rows"` reads. Each row has `messages`, which end with
    an answer; or a `prompt` and an `answer`; or tokens, as `offbeat journal export` writes them. Absent: the solutions
    that the environment knows."""
    tasks: int = Field(2000, ge=1)
    """Training tasks whose solutions are taken, without a file. At least 1."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of a batch's trajectories that are given. Above 0, at most 1; 1: all."""
    coefficient: float = Field(1.0, gt=0)
    """Weight in the loss of the mean negative log-probability of their answers' tokens. Above 0."""
