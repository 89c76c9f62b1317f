"""The tasks and arms of benchmarks/versus_trl/program.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.versus_trl.rows import FOLDER, write_rows
from launch.run_file.load import load
from launch.run_file.sections import RunConfig

SETTINGS = Path(__file__).with_name("versus_trl.toml")


@dataclass(frozen=True)
class Arm:
    """A trainer and its settings."""

    ours: bool
    threads: int
    """Threads of each process that computes."""
    mode: str = "sync"
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskSettings:
    """A task: its arms, its limits of steps and seconds, the reward level to reach, and its overrides."""

    arms: tuple[str, ...]
    steps: int
    seconds: float
    level: float
    window: int
    """Number of trajectories in a point of the reward curve."""
    overrides: tuple[str, ...] = ()
    seconds_of: tuple[tuple[str, float], ...] = ()
    """Seconds of the arms that get less or more time than ``seconds``."""


DECOUPLED = (
    "learner.algorithm.surrogate.centre=proximal",
    "learner.algorithm.corrections=[{kind = 'truncated'}]",
)
"""Our default objective. Without lag its gradient equals the gradient of the other arms' objective. With lag,
a clip around the behaviour policy would stop the gradient of a stale token as soon as the policy has moved by
20 %."""

LAG_1 = ("learner.max_policy_lag=1",)
"""Override for generators that wait for the learner anyway: then a higher bound only makes tokens older."""

WIDE = (
    "generator.kv_on_update=kept",
    "generator.max_num_seqs=128",
    "actor.concurrent_episodes=160",
    "learner.max_policy_lag=4",
)
"""Overrides for more requests in the engine at a time, and a KV cache that is kept and not computed again."""

BF16 = ("learner.dtype=bfloat16", "generator.dtype=bfloat16")
"""Overrides for bfloat16. Master weights and AdamW stay in float32 on both sides: our side uses DeepSpeed's
mixed precision, TRL's side uses autocast, which is TRL's default."""

ARMS = {
    "sync": Arm(True, 1),
    "sync-2": Arm(True, 2),
    "async": Arm(True, 1, "async", DECOUPLED),
    "async-lag-1": Arm(True, 1, "async", DECOUPLED + LAG_1),
    "async-wide": Arm(True, 1, "async", DECOUPLED + WIDE),
    "sync-2-bf16": Arm(True, 2, overrides=BF16),
    "async-bf16": Arm(True, 1, "async", DECOUPLED + BF16),
    "async-wide-bf16": Arm(True, 1, "async", DECOUPLED + WIDE + BF16),
    "trl": Arm(False, 2),
    "trl-bf16": Arm(False, 2, overrides=BF16),
    "trl-1": Arm(False, 1),
    "trl-batching": Arm(False, 1),
    "trl-vllm": Arm(False, 1),
    "trl-environment": Arm(False, 1),
    "trl-rollout": Arm(False, 1),
}
MODEL_1M = (
    "model.tiny.hidden_size=128",
    "model.tiny.intermediate_size=384",
    "model.tiny.layers=4",
    "model.tiny.heads=4",
)
MODEL_10M = (
    "model.tiny.hidden_size=384",
    "model.tiny.intermediate_size=1024",
    "model.tiny.layers=6",
    "model.tiny.heads=6",
    "model.tiny.head_dim=64",
    "model.tiny.warm_start.lr=2e-4",
    "learner.optimizer.lr=2e-4",
    "generator.kv_cache_mb=256",
)
TOOL = (
    "model.tiny.hidden_size=128",
    "model.tiny.intermediate_size=384",
    "model.tiny.heads=4",
    "model.tiny.warm_start.steps=300",
    "model.tiny.warm_start.demonstrations=4000",
    "model.tiny.warm_start.batch=32",
    "model.tiny.warm_start.lr=2e-3",
    "env.name=benchmarks.envs.known_work:WorkSuite",
    "env.params={kinds = [[12, 3, 1.0]], latency_s = [0.2, 2.0]}",
    "generator.max_model_len=128",
    "generator.max_num_seqs=128",
    "actor.concurrent_episodes=256",
    "learner.batch_trajectories=64",
    "learner.max_policy_lag=4",
    "learner.sampling.max_turn_tokens=16",
    "learner.sampling.max_trajectory_tokens=96",
)
REWARDS = "benchmarks/versus_trl/rewards.py"
ROWS = (
    "env.name=rows",
    f"env.params={{train = '{FOLDER}/spelled.jsonl', reward = '{REWARDS}:letters'}}",
    "learner.sampling.max_turn_tokens=12",
    "learner.sampling.max_trajectory_tokens=32",
)
SMOLLM2 = (
    "model.path=smollm2",
    "env.name=rows",
    f"env.params={{train = '{FOLDER}/sums.jsonl', reward = '{REWARDS}:last_number'}}",
    "generator.max_model_len=256",
    "generator.kv_cache_mb=256",
    "learner.sampling.temperature=0.7",
    "learner.sampling.max_turn_tokens=16",
    "learner.sampling.max_trajectory_tokens=128",
    "learner.optimizer.lr=1e-5",
)
TASKS = {
    "letter": TaskSettings(("trl", "trl-1", "trl-vllm", "sync", "async", "async-wide"), 70, 120.0, 0.7, 64),
    "letter-1m": TaskSettings(("trl", "trl-1", "sync", "sync-2", "async", "async-wide"), 40, 120.0, 0.7, 64, MODEL_1M),
    "letter-10m": TaskSettings(
        (
            "trl", "trl-1", "trl-bf16", "sync", "sync-2", "async", "async-wide",
            "sync-2-bf16", "async-bf16", "async-wide-bf16",
        ),
        40, 120.0, 0.7, 64, MODEL_10M,
    ),
    "rows": TaskSettings(("trl", "trl-1", "sync", "async"), 70, 120.0, 0.7, 64, ROWS),
    "sums": TaskSettings(("trl", "async", "async-lag-1"), 40, 640.0, 0.5, 64, SMOLLM2),
    "tool": TaskSettings(
        ("trl-environment", "trl-rollout", "sync", "async"), 200, 90.0, 0.5, 128, TOOL,
        (("trl-environment", 300.0), ("async", 45.0)),
    ),
}  # fmt: skip


def configured(task: str, arm: str, seed: int, overrides: Sequence[str]) -> RunConfig:
    """Return the run file of one run. Write the rows that it may train."""
    write_rows()
    own = (
        f"run.seed={seed}",
        f"run.mode={ARMS[arm].mode}",
        f"run.name={task}-{arm}-{seed}",
        f"generator.threads={ARMS[arm].threads}",
    )
    return load(SETTINGS, [*TASKS[task].overrides, *ARMS[arm].overrides, *overrides, *own])
