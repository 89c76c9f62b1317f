"""Settings of the learner."""

from typing import Annotated, Literal

from pydantic import Field

from learner.algorithm_config import GROUP_RELATIVE, AlgorithmConfig
from protocol.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class SamplingConfig(Section):
    """How training trajectories are sampled. Nucleus and top-k sampling are left out on purpose: they would make
    the behaviour probabilities of tokens outside the nucleus zero and the importance ratio undefined."""

    temperature: float = Field(1.0, gt=0)
    max_turn_tokens: int = Field(64, ge=1)
    """Action tokens per turn."""
    max_trajectory_tokens: int = Field(256, ge=2)
    """Prompt, observations and actions together."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(3e-4, gt=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float = Field(1.0, gt=0)


RESCUE_RULES = ("success", "per_prompt")
"""Replay rules that replace members of a failed group instead of adding to the batch."""


class ReplayConfig(Section):
    """`[learner.replay]`: part of each batch are trajectories that were trained before."""

    rule: Literal["uniform", "recent", "success", "per_prompt", "advantage", "difficulty"] = "recent"
    """What is kept and drawn: groups at random; groups, the newest likelier (ReMix, arXiv:2507.06892); groups
    whose success rate is near `target_success` (DOTS, arXiv:2506.05316); trajectories that succeeded, to
    rescue a group that failed completely (ARPO, arXiv:2505.16282), the last one per prompt only (RAPO,
    arXiv:2509.24107); trajectories that were better than the present baseline (SPEAR, arXiv:2509.22601)."""
    share: float = Field(0.4, gt=0, lt=1)
    """Of each batch. Rescue rules replace failed members instead, whatever the share."""
    capacity_groups: int = Field(512, ge=1)
    max_policy_lag: int = Field(2, ge=1)
    """Versions; what is older is thrown away."""
    max_uses: int = Field(4, ge=1)
    """How often one item is replayed."""
    min_size: int = Field(1, ge=1)
    """Items held before the first is drawn."""
    samples_per_insert: float | None = Field(None, gt=0)
    """Most samples per item inserted, in the long run."""
    target_success: float = Field(0.5, ge=0, le=1)
    temperature: float = Field(0.1, gt=0)
    per_prompt_capacity: int = Field(8, ge=1)
    warmup_steps: int = Field(0, ge=0)
    """Rule "advantage": learner steps over which the weight of what is replayed rises to 1."""
    stop_at_step: int = Field(0, ge=0)
    """No replay from this learner step on; 0: never stops."""


class LearnerConfig(Section):
    """`[learner]` of the run file."""

    steps: int = Field(100, ge=1)
    """Learner steps (batches trained)."""
    group_size: int = Field(8, ge=1)
    """Trajectories per task."""
    batch_trajectories: int = Field(128, ge=1)
    """Trajectories per learner step; a multiple of group_size."""
    max_policy_lag: int = Field(4, ge=0)
    """Oldest token that may carry gradient, in versions."""
    forced_lag: int = Field(0, ge=0)
    """With run.mode = "sync": train on batches that lag exactly so many versions. For experiments on staleness."""
    train_on: Literal["groups", "trajectories", "windows"] = "groups"
    """What a batch is made of: whole rollout groups; finished trajectories as they come, for methods with a
    critic; or windows (segments, see actor.segment_tokens) of trajectories that are still being generated
    (T-PPO)."""
    filter_uniform_groups: bool = True
    """Leave out groups whose returns are all equal: their group-relative advantage is zero. Such groups count as
    dropped by a filter, and the batch is filled with others."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    replay: ReplayConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    processes: int = Field(1, ge=1)
    """Learner ranks on this machine."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """What DeepSpeed shards over the ranks: 1 the optimizer's state, 2 gradients too, 3 weights too. "auto": 0 for one
    float32 rank, which has nothing to share and is spared the copies of gradients and weights; else 1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: int = Field(8192, ge=16)
    """Tokens in one forward and backward pass, padding included."""
    gradient_checkpointing: bool = False
    threads: int = Field(1, ge=1)
    """OpenMP threads per rank (CPU). `offbeat train` lets waiting threads sleep where those of learner and generators
    exceed the cores."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between two published versions."""
    publish_dtype: Literal["trained", "bfloat16"] = "trained"
    """Float type of published versions: the one that is trained, or bfloat16, which halves what travels. The policy
    that samples is then the rounded one, as its probabilities tell."""
    keep_versions: int = Field(3, ge=2)
    """Published versions kept for generators that are late."""
    checkpoint_every: int = Field(10, ge=0)
    """Learner steps between checkpoints: a learner that is killed does so many again at most. One takes 12 bytes per
    parameter on disk, and two are kept. 0: at the end only; a learner that is killed begins anew then, without
    what it has trained on."""
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

    @property
    def lag_bound(self) -> int:
        """Oldest token that may carry gradient the first time it is trained, in versions."""
        return max(self.max_policy_lag, self.forced_lag)

    @property
    def zero_stage_used(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage, with "auto" resolved."""
        if self.zero_stage != "auto":
            return self.zero_stage
        return 0 if self.processes == 1 and self.dtype == "float32" else 1

    @property
    def drops_uniform_groups(self) -> bool:
        """Whether groups without a signal are filtered out: only where advantages come from the group alone."""
        relative = self.algorithm.advantage.kind in GROUP_RELATIVE
        return self.filter_uniform_groups and self.train_on == "groups" and relative

    @property
    def group_members(self) -> int:
        """Trajectories per task: one more than trained where a greedy one serves as baseline."""
        return self.group_size + (self.algorithm.advantage.kind == "greedy")

    @property
    def units_per_batch(self) -> int:
        """Groups, trajectories or windows that are trained for the first time in one learner step."""
        if self.train_on != "groups":
            return self.batch_trajectories
        return self.fresh_trajectories // self.group_size

    @property
    def fresh_trajectories(self) -> int:
        """Trajectories of a batch that are trained for the first time: whole groups."""
        replay = self.replay
        if replay is None or replay.rule in RESCUE_RULES:
            return self.batch_trajectories
        groups = self.batch_trajectories / self.group_size * (1 - replay.share)
        return max(1, round(groups)) * self.group_size
