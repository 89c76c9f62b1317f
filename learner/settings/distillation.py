"""`[learner.algorithm.distillation]`: a teacher whose log-probabilities are advantages of the policy's own tokens."""

from collections.abc import Iterator

from pydantic import Field

from protocol.section import Section

URL = ("http://", "https://")
"""Beginnings of a teacher's address."""
TINY = "tiny"
"""Name of the teacher that is made like the run's tiny model."""


class Distillation(Section):
    """Distillation on the policy's own samples: the advantage of a token is how much likelier it is to a teacher, so
    that the policy goes down the reverse KL (docs/run/distillation.md). Staleness is corrected as for every
    advantage."""

    teacher: str = Field(min_length=1)
    """The teacher: a model folder, or a name on the hub, which the learner holds beside the policy; or the base URL of
    an OpenAI-compatible server, up to and with `/v1`. It has the tokens of the policy. `tiny` is the run's own tiny
    model after all steps of its warm start, where the policy stops at `model.tiny.warm_start.stop_at`."""
    coefficient: float = Field(1.0, gt=0)
    """Factor of log teacher - log proximal in the advantage. Above 0."""
    rewards: bool = False
    """True: it is added to the advantage that comes of rewards. False: it takes its place, and rewards are only
    recorded."""
    limit: float = Field(10.0, gt=0)
    """Largest absolute difference of the two log-probabilities that counts, in nats. Above 0."""
    model: str = ""
    """Name of the model at the URL."""
    concurrent: int = Field(8, ge=1)
    """Most requests to the URL at a time, of each rank."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest time for the log-probabilities of one batch from the URL, with repetitions. Then the learner ends."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key for the URL. If it is not set, none is sent."""

    @property
    def remote(self) -> bool:
        """Whether the teacher is a server."""
        return self.teacher.startswith(URL)

    @property
    def tiny(self) -> bool:
        """Whether the teacher is made here, like the run's tiny model."""
        return self.teacher == TINY

    def contradictions(self, field: str) -> Iterator[str]:
        if self.remote and not self.model:
            yield f"{field}.teacher is a URL but {field}.model is empty; name the model at this URL"
        if not self.remote and self.model:
            yield (
                f"{field}.model is {self.model!r} but {field}.teacher is no URL, which begins with http:// or "
                "https://; take model out"
            )
