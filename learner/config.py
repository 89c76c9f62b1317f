"""Settings of the learner."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class SamplingConfig(_Section):
    """How training trajectories are sampled. Nucleus and top-k sampling are left out on purpose: they would make
    the behaviour probabilities of tokens outside the nucleus zero and the importance ratio undefined."""

    temperature: float = Field(1.0, gt=0)
    max_turn_tokens: int = Field(64, ge=1)
    """Action tokens per turn."""
    max_trajectory_tokens: int = Field(256, ge=2)
    """Prompt, observations and actions together."""


class GroupAdvantage(_Section):
    """Group-relative advantage (GRPO, arXiv:2402.03300)."""

    kind: Literal["group"] = "group"
    scale: Literal["std", "none"] = "std"
    """"std" divides by the group's standard deviation; "none" is the Dr. GRPO form (arXiv:2503.20783)."""


AdvantageConfig = GroupAdvantage


class TruncatedCorrection(_Section):
    """Weight min(ceiling, proximal / behaviour), detached (truncated importance sampling)."""

    kind: Literal["truncated"] = "truncated"
    ceiling: float = Field(2.0, gt=0)


class NoCorrection(_Section):
    """The staleness of a token is ignored."""

    kind: Literal["none"] = "none"


CorrectionConfig = Annotated[TruncatedCorrection | NoCorrection, Field(discriminator="kind")]


class ClipSurrogate(_Section):
    """PPO clip of current / proximal to [1 - low, 1 + high]."""

    kind: Literal["clip"] = "clip"
    low: float = Field(0.2, ge=0, lt=1)
    high: float = Field(0.28, ge=0)


SurrogateConfig = ClipSurrogate


class AlgorithmConfig(_Section):
    """`[learner.algorithm]`: the objective, put together from parts."""

    advantage: AdvantageConfig = GroupAdvantage()
    correction: CorrectionConfig = TruncatedCorrection()
    surrogate: SurrogateConfig = ClipSurrogate()
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    """Proximal policy: the learner's weights before the update, or the behaviour policy itself."""
    entropy_coefficient: float = Field(0.0, ge=0)
    kl_coefficient: float = Field(0.0, ge=0)
    """Of the k3 estimate of KL(current || proximal)."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps on one batch (its trajectories are dealt to that many mini-batches)."""


class OptimizerConfig(_Section):
    """AdamW and its schedule."""

    lr: float = Field(3e-4, gt=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float = Field(1.0, gt=0)


class LearnerConfig(_Section):
    """`[learner]` of the run file."""

    steps: int = Field(100, ge=1)
    """Learner steps (batches trained)."""
    group_size: int = Field(8, ge=1)
    """Trajectories per task."""
    batch_trajectories: int = Field(128, ge=1)
    """Trajectories per learner step; a multiple of group_size."""
    max_policy_lag: int = Field(4, ge=0)
    """Oldest token that may carry gradient, in versions."""
    filter_uniform_groups: bool = True
    """Leave out groups whose returns are all equal: their group-relative advantage is zero. Such groups count as
    dropped by a filter, and the batch is filled with others."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    processes: int = Field(1, ge=1)
    """Learner ranks on this machine."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward and backward pass, padding included."""
    gradient_checkpointing: bool = False
    threads: int = Field(1, ge=1)
    """OpenMP threads per rank (CPU)."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between two published versions."""
    keep_versions: int = Field(3, ge=2)
    """Published versions kept for generators that are late."""
    checkpoint_every: int = Field(0, ge=0)
    """Learner steps between checkpoints; 0: only at the end."""
    max_nonfinite_steps: int = Field(5, ge=1)
    """Skipped steps in a row after which the run stops."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Time for generators and actors to start: until the first trajectory has arrived, this is the deadline."""
    data_timeout_s: float = Field(300.0, gt=0)
    """Without a trajectory for so long the run stops with the reason."""
    evaluation_tasks: int = Field(256, ge=0)
    """Held-out tasks of the greedy evaluation before and after."""
    evaluation_every: int = Field(0, ge=0)
    """Learner steps between evaluations in between; 0: none."""
