"""`[learner.algorithm.siblings]`: failures learn from an average of the policy that has read a solved answer."""

from pydantic import Field

from protocol.section import Section


class SiblingDistillation(Section):
    """A failure whose group has a solved answer learns from a frozen average of the policy that reads this answer first
    (SRPO, arXiv:2604.02288). The advantage of each of its tokens is how much likelier the token is to that average than
    to the policy, weighted by how sure the average is. It takes the place of the advantage that comes of rewards."""

    average: float = Field(0.05, gt=0, le=1)
    """Share of the new weights in the average after each update. Above 0, at most 1: the policy itself."""
    beta: float = Field(1.0, ge=0)
    """Weight of a token: exp(-beta H) with the average's entropy H, divided by the mean over all such tokens. At least
    0; 0: all weights are 1."""
    limit: float = Field(10.0, gt=0)
    """Largest absolute difference of the two log-probabilities that counts, in nats. Above 0."""
