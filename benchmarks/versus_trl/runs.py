"""Tasks, arms, and the input and result of a run of `benchmarks.versus_trl`, in the same form for both sides.

Each side notes when each step ended and how many tokens it trained, and when each trajectory's reward was
known. The functions below compute every compared figure from these two lists.
"""

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import half_interval
from launch.run_file.load import load
from launch.run_file.sections import RunConfig

FOLDER = Path("build/versus_trl")
ROW_COUNT = 2_000


def spelled() -> Iterator[tuple[str, str]]:
    """Yield words of three letters, and each word written twice."""
    draw = random.Random(1)
    for _ in range(ROW_COUNT):
        word = "".join(draw.choices("abcdefgh", k=3))
        yield word, 2 * word


def sums() -> Iterator[tuple[str, str]]:
    """Yield sums of two numbers of two digits, and their values."""
    draw = random.Random(2)
    for _ in range(ROW_COUNT):
        a, b = draw.randrange(10, 100), draw.randrange(10, 100)
        yield f"What is {a} + {b}? Just give the number.", str(a + b)


def easy_sums() -> Iterator[tuple[str, str]]:
    """Yield sums of two numbers from 1 to 12, and their values."""
    draw = random.Random(3)
    for _ in range(ROW_COUNT):
        a, b = draw.randrange(1, 13), draw.randrange(1, 13)
        yield f"What is {a} + {b}? Just give the number.", str(a + b)


FILES = {"spelled.jsonl": spelled, "sums.jsonl": sums, "easy_sums.jsonl": easy_sums}


def write_rows(folder: Path = FOLDER) -> None:
    """Write all files. A prompt is a list with one message, as TRL takes conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, pairs in FILES.items():
        rows = ({"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in pairs())
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
    ends_at_level: bool = False
    """Whether a run ends as soon as it has reached the level: more seeds in the same time."""


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
    "env.name=benchmarks.envs.letters:WorkSuite",
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
EASY_SUMS = (f"env.params={{train = '{FOLDER}/easy_sums.jsonl', reward = '{REWARDS}:last_number'}}",)
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
    "easy-sums": TaskSettings(
        ("trl", "sync", "async-lag-1"), 40, 640.0, 0.5, 128, SMOLLM2 + EASY_SUMS, ends_at_level=True
    ),
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


@dataclass(frozen=True)
class Spec:
    """Specification of one run, for the process that makes it."""

    arm: str
    config: dict[str, Any]
    """The run file, seed included."""
    model: str
    """Folder of the first weights and the tokenizer."""
    folder: str
    """Folder for everything that the run writes."""
    steps: int
    seconds: float
    """Seconds after which no further step begins."""
    threads: int
    """OpenMP threads of each process."""
    level: float | None = None
    """Reward at which the run ends; None: it does not end for a reward."""
    window: int = 1
    """Number of last trajectories whose mean reward is held against the level."""

    def over(self, rewards: Sequence[tuple[float, float]]) -> bool:
        """Return whether the mean of the last rewards has reached the level."""
        last = [reward for _, reward in rewards[-self.window :]]
        return self.level is not None and len(last) == self.window and statistics.fmean(last) >= self.level

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Spec":
        return Spec(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Run:
    """Result of one run. Times are seconds since the first step began."""

    startup: float
    """Seconds from the start of the process until the first step."""
    steps: list[tuple[float, int]]
    """End of each step, and the action tokens it trained."""
    rewards: list[tuple[float, float]]
    """Time at which the trainer knew a trajectory's reward, and the reward."""
    phases: dict[str, float]
    """Mean seconds per step of each phase that the side reports."""
    notes: dict[str, Any]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def tokens_per_second(steps: Sequence[tuple[float, int]], *, settle: int = 3) -> float | None:
    """Return the trained tokens per second after the first ``settle`` steps, or None with too few steps.

    Example:
        >>> tokens_per_second([(5.0, 100), (6.0, 100), (7.0, 120), (8.0, 80)], settle=1)
        100.0
    """
    settle = min(settle, len(steps) - 1)
    if settle < 1:
        return None
    return sum(tokens for _, tokens in steps[settle:]) / (steps[-1][0] - steps[settle - 1][0])


def step_seconds(steps: Sequence[tuple[float, int]]) -> float | None:
    """Return the median time from the end of one step to the end of the next.

    Example:
        >>> step_seconds([(5.0, 100), (6.0, 100), (7.5, 120), (8.5, 80)])
        1.0
    """
    ends = [end for end, _ in steps]
    return statistics.median(np.diff(ends).tolist()) if len(ends) > 1 else None


def curve(rewards: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Return the mean time and the mean reward of each window of ``window`` consecutive trajectories.

    A point has the mean of the times and not the last one. Otherwise smoothing would delay the time at which
    a reward was earned, and these times are compared.

    Example:
        >>> curve([(1.0, 0.0), (1.0, 0.5), (3.0, 0.5), (3.0, 1.0)], 2)
        [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75)]
    """
    if len(rewards) < window:
        return []
    points = np.array(sorted(rewards, key=lambda point: point[0]))
    sums = np.cumsum(np.vstack([np.zeros(2), points]), axis=0)
    means = (sums[window:] - sums[:-window]) / window
    return [(round(float(t), 6), round(float(r), 6)) for t, r in means]


def seconds_to(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the time at which a curve first reaches a level, or None if it never does.

    Example:
        >>> seconds_to([(1.0, 0.25), (2.0, 0.5), (3.0, 0.75)], 0.5)
        2.0
    """
    return next((t for t, reward in points if reward >= level), None)


@dataclass(frozen=True)
class Reached:
    """What a level of reward cost."""

    steps: float
    seconds: float
    tokens: float
    """Trained tokens."""


def reached(
    steps: Sequence[tuple[float, int]], rewards: Sequence[tuple[float, float]], window: int, level: float
) -> Reached | None:
    """Return what the first window of rewards cost whose mean has reached a level; None if there is none.

    Each figure is the mean over the trajectories of the window, as in `curve`: the number of the step in which a
    reward became known, its time, and the tokens trained up to the end of that step.

    Example:
        >>> steps = [(10.0, 100), (20.0, 80)]
        >>> reached(steps, [(9.0, 0.0), (9.0, 1.0), (19.0, 1.0), (19.0, 1.0)], 2, 1.0)
        Reached(steps=1.5, seconds=14.0, tokens=140.0)
        >>> reached(steps, [(9.0, 0.0)], 2, 1.0) is None
        True
    """
    known = sorted(rewards, key=lambda point: point[0])
    ends = np.array([end for end, _ in steps])
    trained = np.cumsum([tokens for _, tokens in steps])
    for first in range(len(known) - window + 1):
        part = known[first : first + window]
        if sum(reward for _, reward in part) / window >= level:
            times = np.array([time for time, _ in part])
            numbers = np.minimum(np.searchsorted(ends, times), len(ends) - 1)
            return Reached(float(numbers.mean()) + 1, float(times.mean()), float(trained[numbers].mean()))
    return None


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % interval by Student's t; with one value all three are that value.

    Example:
        >>> [round(v, 3) for v in mean_interval([0.1, 0.2, 0.3])]
        [0.2, -0.048, 0.448]
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    half = half_interval(values, 0.975)
    return mean, mean - half, mean + half


def ratio(theirs: Sequence[float | None], ours: Sequence[float | None]) -> list[float]:
    """Return theirs over ours for each seed for which both have a value.

    Example:
        >>> ratio([4.0, None, 9.0], [2.0, 1.0, 3.0])
        [2.0, 3.0]
    """
    pairs = zip(theirs, ours, strict=True)
    return [a / b for a, b in pairs if a is not None and b is not None]
