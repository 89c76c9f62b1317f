"""Settings of the learner: `[learner]` of the run file and the tables inside it."""

from typing import Annotated, Literal

from pydantic import Field

from learner.credit.reward_config import RewardConfig
from learner.credit.signal import judges_groups
from learner.families.family_config import FamilyConfig
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.evaluation import EvaluationConfig
from learner.settings.lora import LoraConfig
from learner.settings.optimizer import OptimizerConfig
from learner.settings.replay import RESCUE_RULES, ReplayConfig
from learner.settings.sampling import SamplingConfig
from protocol.section import Section

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]

REDUCE_BUCKET = 500_000_000
"""Most gradients that a rank reduces over the ranks at a time. From ZeRO stage 1 on it holds a copy of them, also if it
is the only rank. 500 million is DeepSpeed's own number."""


class LearnerConfig(Section):
    """`[learner]` of the run file."""

    steps: int = Field(100, ge=0)
    """Learner steps of the run; one step trains one batch. At least 1; `offbeat eval` sets 0, and trains nothing."""
    group_size: int = Field(8, ge=1)
    """Trajectories of one rollout group that are trained, all of the same task. At least 1."""
    batch_trajectories: int = Field(128, ge=1)
    """Trajectories (or windows, see `train_on`) of one learner step. At least 1; with train_on = "groups" a
    multiple of `group_size`."""
    max_policy_lag: int = Field(4, ge=0)
    """Largest policy lag of a token that carries gradient, in versions. It also bounds how many trajectories
    are under way. At least 0. With `publish_every` = P a token of lag L may be P L + P - 1 updates old."""
    forced_lag: int = Field(0, ge=0)
    """Policy lag, in versions, that every batch has exactly; for experiments on staleness. At least 0; above
    0 only with run.mode = "sync" and train_on = "groups"."""
    train_on: Literal["groups", "trajectories", "windows"] = "groups"
    """Units of a batch. "groups": whole rollout groups. "trajectories": finished trajectories in the
    order of their arrival, for methods with a critic. "windows": segments (see actor.segment_tokens) of
    trajectories that are still being generated (T-PPO)."""
    filter_uniform_groups: bool = True
    """Drop groups in which every advantage is zero, because all returns are equal. They count as dropped by a
    filter, and other groups fill the batch. Groups that a replay rule can rescue are kept. The filter acts only with
    train_on = "groups" and an advantage of kind "group", "leave_one_out" or "token_group", or "compared" if all its
    terms are among the group. With several terms a group is dropped if no term has a difference."""
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    family: FamilyConfig | None = None
    replay: ReplayConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    processes: int = Field(1, ge=1)
    """Learner processes (ranks) on each host of the learner. At least 1."""
    nodes: int = Field(1, ge=1)
    """Hosts of the learner, with `processes` ranks each. At least 1. Above 1 they must share `run.dir`, and
    `offbeat learner RUN_FILE --node 1` starts the ranks of the second one, see docs/run/gpus.md."""
    rendezvous: str = Field("", pattern=r"^$|^\[?[^\s\[\]]+\]?:[1-9]\d*$")
    """HOST:PORT of the first host, at which the ranks of all hosts find each other; for `nodes` above 1."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field((), strict=False)
    """GPUs of the ranks, one each, as places in CUDA_VISIBLE_DEVICES or numbers on this host. Absent: the first ones
    that no generator is given."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """ZeRO stage: what DeepSpeed shards over the ranks. 0: nothing; 1: the optimizer's state; 2: gradients
    too; 3: weights too. "auto": 2 with bfloat16, 0 for a single float32 rank, which has nothing to shard and so
    avoids copies of gradients and weights, else 1. bfloat16 needs 2 or 3."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Float type of the model that is trained. "auto": bfloat16 on GPUs that compute in it, else float32. With
    bfloat16 the optimizer still has weights and moments in float32, and gradients are summed over micro-batches in
    float32."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of its GPU's memory that a rank may use for tensors (GPU only). "auto": all of a GPU of its own; on a
    shared one what the engines leave, see docs/run/gpus.md."""
    offload: Literal["none", "optimizer"] = "none"
    """What is kept in the host's memory instead of the GPU's. "optimizer": float32 weights and averages of AdamW, 12
    bytes for each trained parameter, divided by the ranks. The optimizer then steps on the CPU, with `threads`
    threads. It needs `zero_stage` 2 or 3."""
    micro_batch_tokens: int = Field(8192, ge=16)
    """Most tokens in one forward and backward pass, padding included. At least 16, and enough for one
    trajectory."""
    share_prefixes: bool = True
    """Compute tokens that trajectories of a group begin with once for all of them, where that is cheaper. The
    gradients are those of separate computations, up to rounding. Without effect for models with local attention. With
    `algorithm.routes` "behaviour" a token is shared only if its experts are equal, too."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of storing them: less memory, more time."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """OpenMP threads per rank, on CPU. At least 1; more with `offload`. If the threads of learner and generators
    together exceed the cores, `offbeat train` makes waiting threads sleep instead of spin. "auto": an equal part of the
    host's cores for each process that computes, 1 for models below 20 million parameters, and 1 by hand."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between two published versions, without skipped steps. At least 1; must be 1 with
    run.mode = "sync"."""
    publish_dtype: Literal["trained", "bfloat16"] = "trained"
    """Float type of published versions: that of the trained weights, or bfloat16, which halves the bytes of
    float32 weights. Generators then sample from the rounded policy, and report its probabilities as behaviour
    probabilities."""
    keep_versions: int = Field(3, ge=2)
    """Published versions that are kept for slow generators. At least 2."""
    checkpoint_every: int = Field(10, ge=0)
    """Learner steps between two checkpoints, and so the most steps that a killed learner repeats. A
    checkpoint takes 12 bytes per trained parameter on disk; the newest two are kept. 0: one checkpoint at the end
    only; a learner that is killed earlier restarts at step 0, and does not get the trained data back."""
    keep_best: bool = True
    """Write the model in Hugging Face format, as `models/best-step-N` in the run folder, when an evaluation during
    training is the best so far of the first set. It replaces the one before. With `publish_every` = P the weights
    may be P - 1 updates newer than the version that was evaluated."""
    export_every: int = Field(0, ge=0)
    """Learner steps between two models in Hugging Face format, `models/step-N` in the run folder, which all stay.
    0: none. The last model is always written, as `model`."""
    max_nonfinite_steps: int = Field(5, ge=1)
    """Consecutive steps with a loss or gradient that is not finite after which the run stops. Such steps are
    skipped. At least 1."""
    max_failed_episodes: int = Field(64, ge=1)
    """Consecutive episodes that fail after which the run stops with an error that says why. If an episode has
    ended well before, the failures must also last for `data_timeout_s`. At least 1."""
    max_uniform_groups: int = Field(128, ge=1)
    """Consecutive groups with equal returns after which the run stops, if `filter_uniform_groups` drops them. With
    no other group so far this is an error. Otherwise such groups must also come for `data_timeout_s`, and the run
    ends as one that has nothing left to learn. At least 1."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds that generators and actors have to start: if no data arrives within them, the run stops with an
    error. Above 0."""
    data_timeout_s: float = Field(300.0, gt=0)
    """Seconds without new data, after the first has arrived, after which the run stops with an error that
    says what is missing. Above 0, and longer than broker.group_deadline_s."""
    evaluation_tasks: int = Field(256, ge=0)
    """Held-out tasks of each greedy evaluation; there is one before the first step and one at the end. 0: no
    evaluations."""
    evaluation_every: int = Field(0, ge=0)
    """Learner steps between further evaluations during training. 0: none."""
    evaluation: dict[SetName, EvaluationConfig] = Field(default_factory=dict)
    """Further sets of held-out tasks."""

    @property
    def evaluation_sets(self) -> dict[str, EvaluationConfig]:
        """All evaluation sets by name; "" is the greedy one of `evaluation_tasks`."""
        sets = dict(self.evaluation)
        if self.evaluation_tasks:
            sets = {"": EvaluationConfig(tasks=self.evaluation_tasks, temperature=0.0), **sets}
        return sets

    @property
    def lag_bound(self) -> int:
        """Largest policy lag, in versions, of a token that is trained for the first time."""
        return max(self.max_policy_lag, self.forced_lag)

    @property
    def ranks(self) -> int:
        """Learner processes on all hosts."""
        return self.nodes * self.processes

    @property
    def zero_stage_used(self) -> Literal[0, 1, 2, 3]:
        """ZeRO stage, with "auto" resolved."""
        if self.zero_stage != "auto":
            return self.zero_stage
        if self.dtype_used == "bfloat16":
            return 2
        return 0 if self.ranks == 1 else 1

    @property
    def threads_used(self) -> int:
        """OpenMP threads per rank; an "auto" that `launch.hardware` has not resolved is 1."""
        return 1 if self.threads == "auto" else self.threads

    @property
    def dtype_used(self) -> Literal["float32", "bfloat16"]:
        """Float type of the model that is trained; an "auto" that `launch.hardware` has not resolved is float32."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def drops_uniform_groups(self) -> bool:
        """Whether groups without a signal are dropped: only where advantages come from the group alone."""
        relative = judges_groups(self.algorithm.advantage)
        return self.filter_uniform_groups and self.train_on == "groups" and relative

    @property
    def group_members(self) -> int:
        """Trajectories per task: one more than are trained if a greedy one serves as baseline."""
        return self.group_size + (self.algorithm.advantage.kind == "greedy")

    @property
    def greedy_member(self) -> int | None:
        """Place of the greedy member in its group; None if there is none."""
        return self.group_size if self.group_members > self.group_size else None

    @property
    def first_members(self) -> int:
        """Trajectories of a group that is dealt out; a family may ask for other groups after it."""
        return self.group_members if self.family is None else self.family.first(self.group_size)

    @property
    def largest_group(self) -> int:
        """Trajectories of the largest group that may be under way."""
        return self.group_members if self.family is None else self.family.largest(self.group_size)

    @property
    def units_per_batch(self) -> int:
        """Groups, trajectories or windows that are trained for the first time in one learner step."""
        if self.train_on != "groups":
            return self.batch_trajectories
        return self.fresh_trajectories // self.group_size

    @property
    def fresh_trajectories(self) -> int:
        """Trajectories of a batch that are trained for the first time; always whole groups."""
        replay = self.replay
        if replay is None or replay.rule in RESCUE_RULES or replay.fire_at:
            return self.batch_trajectories
        groups = self.batch_trajectories / self.group_size * (1 - replay.share)
        return max(1, round(groups)) * self.group_size
