"""`[learner]` of the run file, and its tables for sampling, evaluation, optimizer, adapters and replay."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from learner.settings.advantages import RewardConfig, judges_groups
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.budget import BudgetConfig, FixedBudget, SharedBudget
from learner.settings.families import FamilyConfig, SteeredFamily
from learner.settings.given import Conversations, GivenConfig
from learner.settings.selection import SelectionConfig, SequentialSelection
from learner.settings.surrogates import ShapedSurrogate
from learner.settings.taught import TaughtConfig
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

    def contradictions(self, field: str) -> Iterator[str]:
        longest = self.context_tokens
        if self.max_context_tokens > self.max_trajectory_tokens:
            yield (
                f"{field}.max_context_tokens {longest} is above max_trajectory_tokens {self.max_trajectory_tokens}, "
                "which bounds all branches together; raise the latter"
            )
        if self.max_turn_tokens >= longest:
            yield (
                f"{field}.max_turn_tokens {self.max_turn_tokens} leaves no room for a prompt in {self.context_setting} "
                f"{longest}; raise the latter"
            )


class LaneConfig(Section):
    """`[learner.lane]`: members of each group that are sampled at another temperature, beside `group_size` of them.
    What is right there is trained by REINFORCE at temperature 1, and raises or lowers the entropy (AEPO,
    arXiv:2510.08141). Needs train_on = "groups", a surrogate of kind "clip" and sampling.temperature = 1."""

    members: int = Field(1, ge=1)
    """Members of each group in the lane. At least 1."""
    target_entropy: float = Field(0.5, gt=0)
    """Entropy to hold, in nats: with more than that in the last batch the lane is sampled at `low`, else at `high`.
    Above 0. Before the first step nothing is measured, and `high` is taken."""
    high: float = Field(1.2, gt=1)
    """Temperature that raises the entropy. Above 1."""
    low: float = Field(0.8, gt=0, lt=1)
    """Temperature that lowers it. Above 0, below 1."""
    coefficient: float = Field(1.0, gt=0)
    """Advantage of a right answer of the lane. A wrong one is not trained. Above 0."""

    def temperature(self, entropy: float | None) -> float:
        """Return the temperature of the lane, by the mean entropy of the last batch in nats; None: not measured.

        Example:
            >>> lane = LaneConfig(target_entropy=0.5)
            >>> lane.temperature(0.4), lane.temperature(0.5), lane.temperature(0.6), lane.temperature(None)
            (1.2, 1.2, 0.8, 1.2)
        """
        return self.low if entropy is not None and entropy > self.target_entropy else self.high


class EvaluationConfig(Section):
    """`[learner.evaluation.NAME]`: a set of held-out tasks, and how they are answered. Its metrics are
    `evaluation/NAME/...`. Every set is also evaluated before the first step and at the end."""

    tasks: int = Field(64, ge=1)
    """Held-out tasks, those with the first indices. At least 1."""
    first_task: int = Field(0, ge=0)
    """Index of the first held-out task, so that sets may have different tasks."""
    env: str = ""
    """Label of the `[[env]]` table that has the tasks. With `weight = 0` there, nothing is trained on it. Absent: all
    environments, by their weights."""
    samples: int = Field(1, ge=1)
    """Answers to each task. Above 1 only with `temperature` above 0."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = Field((), strict=False)
    """Values of k for pass@k, at most `samples`; pass@1 is always reported. Absent: `samples`."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of sampling: the share of probability that is sampled from. Above 0, at most 1."""
    every: int | None = Field(None, ge=0)
    """Learner steps between evaluations during training. 0: none. Absent: learner.evaluation_every."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Values of k above 1, sorted."""
        return tuple(sorted({k for k in self.pass_at or (self.samples,) if k > 1}))

    @property
    def answers(self) -> int:
        """Answers to all tasks."""
        return self.tasks * self.samples

    def contradictions(self, field: str) -> Iterator[str]:
        if self.samples > 1 and not self.temperature:
            yield f"{field}.samples is {self.samples} but its temperature is 0: all answers would be equal; raise it"
        if most := [k for k in self.pass_at if k > self.samples]:
            yield f"{field}.pass_at has {max(most)}, but samples is {self.samples}; raise samples to at least that"


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up. Above 0. Absent: 1e-6 for all weights of a language model that is trained
    already, 2e-5 for adapters (`[learner.lora]`), 3e-4 for a tiny model that is made here (`[model.tiny]`)."""
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    """Decay rates of AdamW's averages of the gradient and of its square. Each at least 0 and below 1."""
    eps: float = Field(1e-8, gt=0)
    """Term that AdamW adds to its denominator. Above 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW. At least 0; 0 turns it off."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises linearly to `lr`. 0: no warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to zero at the end of the run, linearly or as
    half a cosine."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Norm to which a larger gradient is clipped. Above 0."""


ModuleNames = Annotated[tuple[str, ...], Field(strict=False)]
ALL_LINEAR = "all-linear"
"""Value of `LoraConfig.targets`: every linear layer but the output layer."""


class LoraConfig(Section):
    """`[learner.lora]`: train adapters of low rank in place of the model's own weights (LoRA, arXiv:2106.09685).
    Evaluations and the final model have the adapters merged into the weights, see docs/run/lora.md. It needs the extra
    `lora`, and a learning rate 10 to 100 times that of full weights."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters: the columns of B and rows of A in W + alpha / rank · B A. At least 1, at most the smaller
    side of every layer that is adapted."""
    alpha: float | None = Field(None, gt=0)
    """Scale of the adapters, which is divided by `rank`. Above 0. Absent: twice the rank, so that what an adapter
    adds does not depend on its rank."""
    targets: str | ModuleNames = ALL_LINEAR
    """Layers that get an adapter: "all-linear" for every linear layer but the output layer, or a list of names such as
    ["q_proj", "v_proj"]. A name stands for every linear layer whose path ends with it."""
    publish: Literal["adapter", "merged"] = "merged"
    """What a policy version is. "adapter": A and B alone, which vLLM puts beside the model's weights: small versions
    and short pauses, but slower sampling. "merged": all weights of the model."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names in `targets`; none for "all-linear"."""
        if isinstance(self.targets, str):
            return () if self.targets == ALL_LINEAR else (self.targets,)
        return self.targets

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    @property
    def words(self) -> str:
        """The settings as words, by which a checkpoint says what it holds.

        Example:
            >>> LoraConfig(rank=8, targets=["v_proj", "q_proj"]).words
            'rank 8, alpha 16, targets q_proj, v_proj'
        """
        targets = ", ".join(sorted(self.names)) or ALL_LINEAR
        return f"rank {self.rank}, alpha {self.scale * self.rank:g}, targets {targets}"

    def contradictions(self, field: str) -> Iterator[str]:
        if isinstance(self.targets, str):
            return
        if not self.targets:
            yield (
                f'{field}.targets is empty: nothing would be trained; name layers, use "{ALL_LINEAR}", or take '
                f"[{field}] out to train all weights"
            )
        if ALL_LINEAR in self.targets:
            yield (
                f'{field}.targets has "{ALL_LINEAR}" in a list of names; write targets = "{ALL_LINEAR}", or names only'
            )


RESCUE_RULES = ("success", "per_prompt")
"""Replay rules that replace members of a failed group instead of adding to the batch."""


class ReplayConfig(Section):
    """`[learner.replay]`: the replay table. A part of each batch is trajectories that were trained before.
    With the rules "uniform", "recent" and "difficulty", an item of the table is a rollout group (a single
    trajectory with learner.train_on = "trajectories"); with the other rules it is a trajectory."""

    rule: Literal["uniform", "recent", "success", "per_prompt", "advantage", "difficulty"] = "recent"
    """Items that are kept and drawn. "uniform": any group, with equal probability. "recent": any group,
    newer groups with higher probability (ReMix, arXiv:2507.06892). "difficulty": groups whose success rate is
    near `target_success` (DOTS, arXiv:2506.05316). "success": successful trajectories, each of which replaces
    a member of a group that failed completely (ARPO, arXiv:2505.16282). "per_prompt": the same replacement,
    with only the last successful trajectory of each prompt (RAPO, arXiv:2509.24107). "advantage":
    trajectories whose return is above the present baseline (SPEAR, arXiv:2509.22601)."""
    share: float = Field(0.4, gt=0, lt=1)
    """Share of each batch that is replayed. Above 0 and below 1. The rules "success" and "per_prompt" ignore
    it: they replace one member of each failed group."""
    capacity_groups: int = Field(512, ge=1)
    """Most items in the table; the oldest is evicted first. At least 1."""
    max_policy_lag: int = Field(2, ge=1)
    """Largest policy lag of an item, and of a replayed token that carries gradient, in versions; older items
    are evicted. The lag of an item is the lag of its newest token. At least 1."""
    max_uses: int = Field(4, ge=1)
    """How often an item is replayed before it is evicted. At least 1."""
    min_size: int = Field(1, ge=1)
    """Items that the table must hold before the first is drawn. At least 1, at most `capacity_groups`."""
    samples_per_insert: float | None = Field(None, gt=0)
    """Upper limit, in the long run, of items drawn per item inserted. Above 0, at most `max_uses`. Absent: no
    limit."""
    target_success: float = Field(0.5, ge=0, le=1)
    """Rule "difficulty": the success rate that is preferred. 0 to 1."""
    temperature: float = Field(0.1, gt=0)
    """Rule "difficulty": an item with success rate p has the weight
    exp(-|p - target_success| / temperature). Above 0."""
    outcome: str = Field("correct", min_length=1)
    """Rules "success" and "per_prompt": value of a trajectory that decides whether it is a success and whether its
    group failed. "correct": 1 if the environment says that the answer is right (`StepResult.correct`), 0 if it says
    that it is not, and the return if it says nothing. "return": the return, which partial credit raises for wrong
    answers, too. Any other word is the name of a reward, as the environment gave it, without weights."""
    per_prompt_capacity: int = Field(8, ge=1)
    """Rule "success": most trajectories kept of one prompt; the newest stay. At least 1."""
    warmup_steps: int = Field(0, ge=0)
    """Rule "advantage": learner steps in which the weight of replayed trajectories rises from 0 to 1. 0: the
    weight is always 1."""
    only_with: str = ""
    """Rule "advantage": name of a mark; a trajectory whose sum of it is not above 0 is not stored (SPEAR stores answers
    with calls of tools). Absent: all."""
    fire_at: int = Field(0, ge=0)
    """Rule "advantage": number of items that may be drawn at which all of them are replayed at once, and the table is
    emptied, as SPEAR does. At most `capacity_groups`; `share` has no effect then. 0: items are drawn by `share`. The
    items are trained in the pass of the fresh ones and count in its mean over tokens, also while their weight is
    near 0: where they are 41 % of a batch's tokens, the fresh part of that step is 0.59 of what it is without them."""
    stop_at_step: int = Field(0, ge=0)
    """Learner step from which on nothing is replayed. 0: replay never ends."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.outcome != "correct" and self.rule not in RESCUE_RULES:
            yield (
                f'{field}.outcome is "{self.outcome}" but {field}.rule is "{self.rule}", which asks for none; take it '
                f"out, or use one of {', '.join(RESCUE_RULES)}"
            )
        if self.rule != "advantage" and (
            alone := [name for name in ("fire_at", "only_with") if getattr(self, name)]
        ):
            yield (
                f'{field}.{alone[0]} is set but {field}.rule is "{self.rule}"; take it out, or use rule = "advantage"'
            )


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
    under_way: Literal["bound", "needed"] = "bound"
    """How much work is under way in an asynchronous run. "bound": as much as `max_policy_lag` allows. "needed": as
    little as keeps the learner fed, by the measured durations of groups and steps (`learner/under_way.py`), and never
    more than "bound". Tokens are fresher then. Only with train_on = "groups" or "trajectories", without a family."""
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
    terms are among the group. With several terms a group is dropped if no term has a difference. With `amplify` a
    perfect return has the advantage 1 also where all members have it, so such groups are never dropped (R3L)."""
    selection: SelectionConfig = SequentialSelection()
    budget: BudgetConfig = FixedBudget()
    sampling: SamplingConfig = SamplingConfig()
    lane: LaneConfig | None = None
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    family: FamilyConfig | None = None
    replay: ReplayConfig | None = None
    given: GivenConfig | None = None
    taught: TaughtConfig | None = None
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
    """State that the host's memory keeps, not the GPU's. "optimizer": float32 weights and averages of AdamW, 12
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
    sampler_gap: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Largest mean difference, in nats, between the log-probabilities of generators and learner in the first batch of a
    run. Above it the run ends before anything is trained. "auto": what rounding explains, 0.0005 with float32
    on both sides, 0.1 with bfloat16, 0.02 with float16. Raise it for generators with quantised weights."""
    publish_every: int = Field(1, ge=1)
    """Learner steps between two published versions, without skipped steps. At least 1; must be 1 with
    run.mode = "sync"."""
    publish_dtype: Literal["trained", "bfloat16"] = "trained"
    """Float type of published versions: that of the trained weights, or bfloat16, which halves the bytes of
    float32 weights. Generators then sample from the rounded policy, and report its probabilities as behaviour
    probabilities."""
    keep_versions: int = Field(3, ge=2)
    """Published versions that are kept for slow generators. At least 2."""
    annotations_mib: int = Field(256, ge=0)
    """Most MiB of what the learner made of each sampled token: log-probability, ratio, correction, advantage, entropy,
    and whether and why it was masked or clipped. The folder `annotations` of the run has it, 14 bytes a token with half
    floats; the oldest steps go first. `offbeat journal export --trained` reads it. 0: none."""
    annotations_float: Literal["float16", "float32"] = "float16"
    """Float type of these numbers. Half floats have three digits. float32 has the learner's own numbers, bit for
    bit, and takes 26 bytes a token."""
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
    ended well before and something was trained, the failures must also last for `data_timeout_s`. At least 1."""
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
        """OpenMP threads per rank; an "auto" that `launch.preflight.hardware` has not resolved is 1."""
        return 1 if self.threads == "auto" else self.threads

    @property
    def dtype_used(self) -> Literal["float32", "bfloat16"]:
        """Float type of the model that is trained; float32 for an "auto" that is not resolved yet."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def drops_uniform_groups(self) -> bool:
        """Whether groups without a signal are dropped: only where advantages come from the group alone."""
        # A teacher has something to say of each token, whatever the returns are.
        relative = judges_groups(self.algorithm.advantage) and self.algorithm.distillation is None
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
        if self.family is not None:
            return self.family.first(self.group_size)
        return self.group_members + (0 if self.lane is None else self.lane.members)

    @property
    def largest_group(self) -> int:
        """Trajectories of the largest group that may be under way."""
        if isinstance(self.budget, SharedBudget):
            return self.budget.largest
        return self.first_members if self.family is None else self.family.largest(self.group_size)

    @property
    def units_per_batch(self) -> int:
        """Groups, trajectories or windows that are trained for the first time in one learner step."""
        if self.train_on != "groups":
            return self.batch_trajectories - self.given_trajectories
        return self.fresh_trajectories // self.group_size

    @property
    def fresh_trajectories(self) -> int:
        """Trajectories of a batch that are trained for the first time; always whole groups."""
        if self.given is not None:
            return self.batch_trajectories - self.given_trajectories
        replay = self.replay
        if replay is None or replay.rule in RESCUE_RULES or replay.fire_at:
            return self.batch_trajectories
        groups = self.batch_trajectories / self.group_size * (1 - replay.share)
        return max(1, round(groups)) * self.group_size

    @property
    def given_trajectories(self) -> int:
        """Conversations of a batch that somebody else wrote; whole groups are left for the others."""
        if self.given is None:
            return 0
        size = self.group_size if self.train_on == "groups" else 1
        units = round(self.batch_trajectories / size * self.given.share)
        if self.given.share < 1:
            units = min(max(1, units), self.batch_trajectories // size - 1)
        return units * size

    @property
    def conversations(self) -> tuple[str, Conversations] | None:
        """The setting that names conversations which somebody else wrote, and what it says; None: there are none."""
        if self.given is not None:
            return "learner.given", self.given
        if self.taught is not None:
            return "learner.taught", self.taught
        if isinstance(self.family, SteeredFamily) and not self.family.own:
            return "learner.family", self.family
        return None

    @property
    def given_loss(self) -> tuple[float, float | None]:
        """Weight in the loss of what is given or imitated, and the lambda of its shape; None: the log-probability."""
        if self.given is None:
            return self.algorithm.imitation_coefficient, None
        loss = next((each for each in self.algorithm.by_origin if each.origin == "given"), None)
        if loss is None:
            return self.given.coefficient, self.given.shaping
        assert isinstance(loss.surrogate, ShapedSurrogate)
        return self.given.coefficient * loss.weight, loss.surrogate.shaping

    def contradictions(self, field: str) -> Iterator[str]:
        yield from self._batches(field)
        yield from self._hosts(field)
        if self.under_way == "needed" and (self.family is not None or self.train_on == "windows"):
            what = "learner.family" if self.family is not None else 'learner.train_on = "windows"'
            yield (
                f'{field}.under_way is "needed", which has no figures for {what}: a unit there comes in parts; take '
                "one of them out"
            )
        if self.forced_lag and self.train_on != "groups":
            yield (
                f'{field}.forced_lag is {self.forced_lag} but {field}.train_on is "{self.train_on}": only whole groups '
                'can be held back; use train_on = "groups"'
            )
        if "reward" in self.evaluation:
            yield (
                f"{field}.evaluation.reward: evaluation/reward/ has the means of rewards by name; give the set another "
                "name"
            )
        if self.sampling.context_tokens > self.micro_batch_tokens:
            what = "branch" if self.sampling.max_context_tokens else "trajectory"
            yield (
                f"{field}.micro_batch_tokens {self.micro_batch_tokens} cannot hold one {what} of "
                f"{self.sampling.context_tokens} tokens; raise it"
            )
        yield from self.stages_too_low(field)

    def _batches(self, field: str) -> Iterator[str]:
        batch, group = self.batch_trajectories, self.group_size
        if self.train_on != "groups":
            return
        if group > batch:
            yield (
                f"{field}.group_size is {group} but {field}.batch_trajectories is {batch}: no batch can hold a whole "
                f"group; raise batch_trajectories to at least {group}"
            )
        elif batch % group:
            yield (
                f"{field}.batch_trajectories is {batch}, not a multiple of {field}.group_size {group}; use "
                f"{batch // group * group} or {(batch // group + 1) * group}"
            )

    def _hosts(self, field: str) -> Iterator[str]:
        if self.nodes > 1 and not self.rendezvous:
            yield (
                f"{field}.nodes is {self.nodes}, but the ranks do not know where to meet; set {field}.rendezvous to "
                "HOST:PORT of the first host, for example 10.0.0.1:29500"
            )
        if self.nodes == 1 and self.rendezvous:
            yield (
                f"{field}.rendezvous is {self.rendezvous}, but {field}.nodes is 1, so nobody would meet there; raise "
                f"{field}.nodes, or take it out"
            )

    def stages_too_low(self, field: str) -> Iterator[str]:
        """Yield the refusals of a ZeRO stage that sums bfloat16 badly, or that leaves nothing to offload.

        The stage may depend on the float type, and that on the GPUs. So this is asked again when they are known.
        """
        if self.zero_stage_used < 2 and self.dtype_used == "bfloat16":
            yield (
                f"{field}.zero_stage is {self.zero_stage_used} but {field}.dtype is bfloat16: gradients would be "
                'summed in bfloat16, which loses small ones; use zero_stage 2, 3 or "auto"'
            )
        if self.algorithm.gradient_alignment is not None and self.zero_stage_used:
            yield (
                f"{field}.algorithm.gradient_alignment compares whole gradients, but ZeRO stage {self.zero_stage_used} "
                f'shards or copies them; set {field}.zero_stage = 0, and {field}.dtype = "float32"'
            )
        undecided = self.zero_stage == "auto" and self.dtype == "auto"
        if self.offload != "none" and self.zero_stage_used < 2 and not undecided:
            yield (
                f'{field}.offload is "{self.offload}" but {field}.zero_stage is {self.zero_stage_used}, which keeps '
                "the optimizer beside the weights; use zero_stage 2 or 3"
            )
