"""`[learner.algorithm.critic]`: the critic and its targets."""

from typing import Literal

from pydantic import Field

from protocol.section import Section


class CriticConfig(Section):
    """`[learner.algorithm.critic]`: the critic, which estimates the value of every action token and learns
    from returns."""

    model: Literal["head", "separate"] = "head"
    """Form of the critic. "head": a second head on the policy; "separate": a model with its own optimizer."""
    coefficient: float = Field(0.5, gt=0)
    """Factor of the value loss in the policy's loss. It has an effect with model = "head" only. Above 0."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the separate critic, or of the value head. Above 0."""
    target: Literal["monte_carlo", "lambda", "vtrace"] = "monte_carlo"
    """Targets of the values. "monte_carlo": returns of finished trajectories, on all of their
    action tokens (T-PPO); "lambda": lambda-returns (advantage plus value), on the tokens of the window;
    "vtrace": lambda-returns corrected for the behaviour policy (IMPALA, arXiv:1802.01561), on the tokens of
    the window."""
    clip_low: float = Field(0.5, ge=0)
    """How far below its earlier estimate a value may move in one update, in units of the return. The earlier
    estimate is from when the token was first trained. At least 0; 0 here and in `clip_high`: no clip."""
    clip_high: float = Field(0.6, ge=0)
    """How far above its earlier estimate a value may move in one update, in units of the return. At least 0.
    """
    warmup_steps: int = Field(0, ge=0)
    """Learner steps at the start that train the critic only. At least 0."""
