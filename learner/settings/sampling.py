"""`[learner.sampling]`: how training trajectories are sampled."""

from typing import Annotated

from pydantic import Field

from protocol.messages.fields import MAX_NAME, MAX_STOPS
from protocol.section import Section

StopString = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class SamplingConfig(Section):
    """How training trajectories are sampled. There is no nucleus and no top-k sampling, on purpose: they give
    the tokens that they cut off a behaviour probability of zero, and the importance ratio of those tokens
    would be undefined."""

    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. Above 0."""
    max_turn_tokens: int = Field(64, ge=1)
    """Most action tokens in one turn. At least 1, and less than `max_trajectory_tokens`."""
    max_trajectory_tokens: int = Field(1024, ge=2)
    """Most tokens of a trajectory: prompt, observations and actions together. At least 2. Absent: the smaller
    of generator.max_model_len and `micro_batch_tokens`."""
    max_context_tokens: int = Field(0, ge=0)
    """Most tokens of one branch of a trajectory, for agents with sub-agents or windows: a branch then has to fit the
    model's context, and all branches together `max_trajectory_tokens`. 0: a branch may be as long as the trajectory."""
    stop: tuple[StopString, ...] = Field((), max_length=MAX_STOPS, strict=False)
    """Strings that end a turn, for example ["\\nObservation:"], at most 16. The turn ends with the token that
    completes one of them. All its tokens are trained, and the environment gets the text before the string. Special
    tokens have no text, so no string matches them."""
    include_stop: bool = False
    """Leave the stop string in the environment's text."""
    max_trajectory_s: float = Field(600.0, gt=0)
    """Longest time of a trajectory, in seconds, without the waits for room at the broker. A longer one fails.
    At least actor.generator_timeout_s and actor.env_timeout_s together, which one turn may take."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of one branch."""
        return self.max_context_tokens or self.max_trajectory_tokens

    @property
    def context_setting(self) -> str:
        """Setting that says so."""
        return "max_context_tokens" if self.max_context_tokens else "max_trajectory_tokens"
