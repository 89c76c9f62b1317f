"""`[learner.given]`: learn from conversations that another policy, or a person, has written."""

from collections.abc import Iterator

from pydantic import Field

from protocol.section import Section


class Conversations(Section):
    """Conversations that somebody else wrote."""

    file: str = ""
    """File of conversations, with the endings that `env.name = "rows"` reads. Each row has `messages`, which end with
    an answer; or a `prompt` and an `answer`; or tokens, as `offbeat journal export` writes them. Absent: the solutions
    that the environment knows."""
    experts: bool = False
    """True: learn what an expert answered, in place of what the policy wrote. The file is one of `offbeat journal
    export`, and of its episodes those count whose environment gave the expert's text as `StepResult.info["expert"]`."""
    content: str = ""
    """Hash of the file. Offbeat fills it in when a run starts, so that no learner goes on with a file that has changed
    since."""
    tasks: int = Field(2000, ge=1)
    """Training tasks whose solutions are taken, without a file. At least 1."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.experts and not self.file:
            yield f"{field}.experts is true but {field}.file is empty; name a file of `offbeat journal export`"


class GivenConfig(Conversations):
    """A part of each batch is given: conversations that somebody else wrote, whose answers the policy imitates. With
    `share = 1` nothing is sampled to train on. That is supervised training, often the stage before reinforcement
    learning; see docs/understand/given.md."""

    share: float = Field(1.0, gt=0, le=1)
    """Share of a batch's trajectories that are given. Above 0, at most 1; 1: all."""
    coefficient: float = Field(1.0, gt=0)
    """Weight in the loss of the mean negative log-probability of their answers' tokens. Above 0."""
    shaping: float | None = Field(None, gt=0, lt=1)
    """lambda of AMPO (arXiv:2510.02227): p / (p + lambda) takes the place of the log-probability, so that tokens which
    the policy holds to be impossible hardly move it. The paper has 0.1. Absent: the log-probability."""
