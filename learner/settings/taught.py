"""`[learner.taught]`: answers of teachers in groups that nobody solved."""

from pydantic import Field

from learner.settings.given import Conversations


class TaughtConfig(Conversations):
    """In a group in which nobody solved the task, answers that teachers wrote to this very prompt take the place of
    some members (AMPO, arXiv:2510.02227). They are right: whoever writes the file leaves wrong ones out. Their loss is
    an entry of `learner.algorithm.by_origin` with origin "taught"; see docs/understand/given.md."""

    members: int = Field(2, ge=1)
    """Most members of a group that are replaced, the last ones. Those answers come first whose tokens the policy holds
    to be likeliest. At least 1, below learner.group_size."""
    value: float = 1.0
    """Return of a taught answer, with which it is compared in its group."""
