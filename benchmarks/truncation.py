"""Compare wall times to the same reward: windows (T-PPO), finished responses as they come, whole batches.

    python -m benchmarks.truncation [--seeds 0 1 2] [--minutes M] [--arms tppo streamed finished waiting]
                                    [--shares 0.5 0.9] [--set section.field=value ...]
                                    [--out FILE.json] [--plot FILE.png]

Every run starts the real system afresh, on a task with long-tailed responses (`benchmarks.envs.letters`).
Model, critic, objective, batch and learning rate (truncation.toml beside this file) are the same in all arms.
The arms differ in what they train on, and when:

- tppo: lockstep in windows, as in the paper: sample `actor.segment_tokens` tokens of each trajectory, train
  on them, go on with the same trajectories, and start new ones in place of those that ended;
- streamed: asynchronous; train on windows as they come, so that neither side waits for the other;
- finished: asynchronous; train on finished trajectories as they come;
- waiting: lockstep, the paper's baseline: sample a batch, wait for its longest response, train on it.

The arms take turns within a seed, in a different order for each seed. The time of a run counts from when all
roles are up, the first weights are evaluated, and the critic's warm-up steps are done.

The reward level that the arms have to reach follows a rule fixed beforehand: a share of the waiting arm's
gain between its first and its last evaluation, for the same seed. The reward over time is the reward of
training trajectories as they end. It is a mean over short and long tasks, weighted with their shares, in a
window centred on each moment, so that smoothing delays no arm. Evaluations sample held-out tasks as in
training. The clock stops during evaluations.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.envs.letters import LongTailSuite
from benchmarks.real_system import BudgetedCurriculum, System, running
from benchmarks.report import measured, pyplot, save_results, spread
from launch.run_file.load import load
from launch.run_file.sections import RunConfig
from learner.errors import Stopped
from learner.intake.session import BrokerSession
from learner.metrics import Report
from learner.process import join
from learner.publisher import Publisher
from learner.run import TrainingRun
from learner.run_files import next_epoch
from learner.settings.learner import LearnerConfig
from learner.trainer import Totals, Trainer
from learner.update.engine import TrainingEngine
from protocol import names
from protocol.session import Progress

ARMS = ("tppo", "streamed", "finished", "waiting")
SMOOTHED = {False: 96, True: 8}
"""Number of short (False) and of long (True) trajectories in the window of the reward curve."""
POINTS = 200
"""Number of points of a reward curve."""


@dataclass(frozen=True)
class Ended:
    """A training trajectory that ended, at the time at which the learner received it."""

    time: float
    """Seconds of training."""
    long: bool
    reward: float
    tokens: int


@dataclass(frozen=True)
class Run:
    """Results of one learner."""

    arm: str
    seed: int
    minutes: float
    start: float
    """Mean reward on held-out tasks before training."""
    end: float
    """Mean reward on held-out tasks after training."""
    curve: list[tuple[float, float]]
    """Points of the reward curve: seconds of training, and mean reward at that time."""
    steps: int
    tokens_per_second: float
    """Trained tokens per second."""
    generated_per_second: float
    idle_learner: float
    idle_generator: float
    running_requests: float
    """Mean over the steps."""
    lag_mean: float
    lag_max: int
    stale_tokens: float
    """Share of the action tokens in batches that were too stale to train on."""
    tokens_mean: float
    """Mean action tokens per finished trajectory."""
    tokens_99: float
    """99 % quantile of the action tokens per finished trajectory."""
    tokens_mean_last: float
    """Mean action tokens over the last fifth of the finished trajectories."""
    tail: float = field(default=0.0)
    """Length of the longest trajectory of a batch over the mean length, averaged over batches."""


def smoothed(ended: Sequence[Ended], *, long_share: float) -> list[tuple[float, float]]:
    """Return the mean reward over time, in windows centred on each moment.

    Short and long tasks have separate windows, and are weighted with their shares of the tasks. The curve
    covers the moments at which the windows of both kinds lie wholly inside the run.
    """
    weights = {kind: share for kind, share in ((False, 1 - long_share), (True, long_share)) if share}
    series = {kind: _moving([e for e in ended if e.long == kind], SMOOTHED[kind]) for kind in weights}
    if any(not len(times) for times, _ in series.values()):
        return []
    first, last = (
        max(times[0] for times, _ in series.values()),
        min(times[-1] for times, _ in series.values()),
    )
    moments = np.linspace(first, max(first, last), POINTS)
    rewards = sum(weights[kind] * np.interp(moments, *pair) for kind, pair in series.items())
    return [
        (round(float(t), 2), round(float(r), 4)) for t, r in zip(moments, np.asarray(rewards), strict=True)
    ]


def _moving(ended: Sequence[Ended], size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean times and the mean rewards of all sequences of ``size`` neighbours."""
    if len(ended) < size:
        return np.empty(0), np.empty(0)
    kernel = np.full(size, 1 / size)
    times, rewards = np.array([e.time for e in ended]), np.array([e.reward for e in ended])
    return np.convolve(times, kernel, "valid"), np.convolve(rewards, kernel, "valid")


def seconds_to(run: Run, level: float) -> float | None:
    """Return the time at which the curve first reaches a level, or None if it never does."""
    return next((t for t, reward in run.curve if reward >= level), None)


def ratios(runs: Sequence[Run], arm: str, share: float) -> list[float]:
    """Return for each seed the arm's time to a share of the waiting arm's gain, over the time of tppo.

    Seeds in which one of the two never got there are left out.
    """
    found = []
    for seed in sorted({run.seed for run in runs}):
        times = times_to(runs, seed, share)
        ours, theirs = times.get("tppo"), times.get(arm)
        if ours is not None and theirs is not None:
            found.append(theirs / max(ours, 1e-9))
    return found


def times_to(runs: Sequence[Run], seed: int, share: float) -> dict[str, float | None]:
    """Return for each arm the seconds to a share of the gain of the waiting arm with the same seed."""
    of_seed = {run.arm: run for run in runs if run.seed == seed}
    waiting = of_seed.get("waiting")
    if waiting is None:
        return {}
    level = waiting.start + share * (waiting.end - waiting.start)
    return {arm: seconds_to(run, level) for arm, run in of_seed.items()}


def tables(runs: Sequence[Run], shares: Sequence[float]) -> str:
    """Return Markdown tables: the times to the levels, and the figures of each arm."""
    seeds = sorted({run.seed for run in runs})
    arms = [arm for arm in ARMS if any(run.arm == arm for run in runs)]
    blocks = []
    for share in shares:
        rows = [f"| arm | {' | '.join(f'seed {seed}' for seed in seeds)} | time over tppo, median [spread] |"]
        rows.append("|---" * (len(seeds) + 2) + "|")
        for arm in arms:
            times = [_seconds(times_to(runs, seed, share).get(arm)) for seed in seeds]
            rows.append(
                f"| {arm} | {' | '.join(times)} | {spread(ratios(runs, arm, share), wanted=len(seeds))} |"
            )
        blocks.append("\n".join([f"**Seconds to {share:.0%} of the waiting arm's gain**", "", *rows]))
    rows = [
        "| arm | reward before | reward after | steps | trained tokens/s | generated tokens/s "
        "| idle learner / generator | running requests | lag mean / max | stale tokens "
        "| tokens per response mean / 99% / mean at the end | longest over mean |",
        "|---" * 12 + "|",
    ]
    rows += [row(arm, [run for run in runs if run.arm == arm]) for arm in arms]
    title = (
        f"**After {runs[0].minutes:g} minutes of training each** (median over seeds; reward: median [spread])"
    )
    return "\n\n".join([*blocks, "\n".join([title, "", *rows])])


def row(arm: str, runs: Sequence[Run]) -> str:
    def median(name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in runs))

    return (
        f"| {arm} | {median('start'):.3f} | {spread([run.end for run in runs], 3)} "
        f"| {median('steps'):.0f} | {median('tokens_per_second'):,.0f} | {median('generated_per_second'):,.0f} "
        f"| {median('idle_learner'):.0%} / {median('idle_generator'):.0%} | {median('running_requests'):.1f} "
        f"| {median('lag_mean'):.2f} / {max(run.lag_max for run in runs)} | {median('stale_tokens'):.1%} "
        f"| {median('tokens_mean'):.0f} / {median('tokens_99'):.0f} / {median('tokens_mean_last'):.0f} "
        f"| {median('tail'):.1f} |"
    )


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f}"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot the reward over wall time, with one colour per arm and one line per seed."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours = dict(zip(ARMS, ("#d62728", "#ff9896", "#1f77b4", "#444444"), strict=True))
    for run in runs:
        if run.curve:
            label = run.arm if run.seed == runs[0].seed else None
            axes.plot(*zip(*run.curve, strict=True), color=colours[run.arm], label=label, linewidth=1.3)
    axes.set(xlabel="seconds of training", ylabel="mean reward", ylim=(0, 1.02))
    axes.set_title("Long-tailed responses; one line a seed", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


SETTINGS = Path(__file__).with_name("truncation.toml")
TRAIN_ON = {
    "tppo": "windows",
    "streamed": "windows",
    "finished": "trajectories",
    "waiting": "trajectories",
}
LOCKSTEP = ("tppo", "waiting")


class TimedTrainer(Trainer):
    """A trainer that remembers when each trajectory ended, from the start of the clock on."""

    ended: list[Ended] | None = None

    def begin(self, is_long: Callable[[int], bool]) -> None:
        """Start the clock."""
        self.ended, self.totals, self.steps_before = [], Totals(), self.step
        self.training_began = time.monotonic()
        self._is_long = is_long

    @property
    def training_seconds(self) -> float:
        """Seconds since `begin`."""
        return time.monotonic() - self.training_began

    def record(self, *args: Any) -> None:
        """Note the trajectories of the step for the curve, then record the step as every trainer does."""
        for t in self.batches.intake.recent:
            if t.status != "failed" and self.ended is not None:
                long = self._is_long(names.group_index(t.group_id))
                self.ended.append(Ended(self.training_seconds, long, t.return_, t.action_tokens))
        super().record(*args)


def configured(arm: str, seed: int, minutes: float, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of one run."""
    mode = "sync" if arm in LOCKSTEP else "async"
    own = [
        f"run.seed={seed}",
        f"run.max_minutes={minutes}",
        f"run.mode={mode}",
        f"learner.train_on={TRAIN_ON[arm]}",
    ]
    return load(SETTINGS, [*overrides, *own])


def train(system: System, arm: str, config: RunConfig) -> Run:
    """Run one learner from the first weights until its time is up."""
    settings = config.learner.model_copy(update={"max_policy_lag": config.max_policy_lag})
    engine = TrainingEngine(
        settings,
        model=system.model,
        total_steps=settings.steps,
        seed=config.run.seed,
        segment_tokens=config.actor.segment_tokens,
    )
    epoch = next_epoch(system.folder)
    link = join(settings, system.config.broker.endpoint, system.folder.name, epoch=epoch, progress=Progress)
    report = Report(system.folder)
    publisher = Publisher(system.folder.name, system.folder, epoch=epoch, keep=settings.keep_versions)
    deadline = float("inf")
    try:
        suite = LongTailSuite(**config.env.params)
        curriculum = _curriculum(config, settings, epoch, suite)
        session = BrokerSession(
            link,
            curriculum,
            settings,
            lockstep=config.run.mode == "sync",
            stop_reason=lambda: system.stop_reason(deadline),
        )
        trainer = TimedTrainer(
            settings, system.folder, engine, session, publisher, report, seed=config.run.seed
        )
        run = TrainingRun(trainer, session)
        trainer.take_over(always=True)
        run.evaluate("before")
        _warm_up(run)
        trainer.begin(partial(_is_long, suite))
        deadline = trainer.training_began + config.run.max_minutes * 60
        seconds, generated = _until_stopped(run, trainer)
        run.evaluate("after")
    finally:
        link.close("done")
        report.close()
        publisher.close()
        engine.release()
    return _outcome(trainer, run.evaluations.records, arm, config, seconds, generated)


def _curriculum(
    config: RunConfig, settings: LearnerConfig, epoch: int, suite: LongTailSuite
) -> BudgetedCurriculum:
    """Return tasks that depend on the seed alone, each with the length that the suite gives it."""
    first = config.run.seed * 1_000_000
    curriculum = BudgetedCurriculum(config.env.name, settings, epoch, next_index=first)
    curriculum.budget = lambda index, split: suite.task(index, split).length
    return curriculum


def _warm_up(run: TrainingRun) -> None:
    """Learn for the steps in which only the critic learns."""
    critic = run.trainer.config.algorithm.critic
    while critic is not None and run.trainer.step < critic.warmup_steps:
        run.learn()


def _is_long(suite: LongTailSuite, index: int) -> bool:
    return suite.task(index, "train").long


def _until_stopped(run: TrainingRun, trainer: TimedTrainer) -> tuple[float, int]:
    """Train until the time is up. Return the seconds, and the tokens generated in them."""
    before = run.tokens_generated
    try:
        while True:
            run.learn()
    except Stopped:
        return trainer.training_seconds, run.tokens_generated - before


def _outcome(
    trainer: TimedTrainer,
    evaluations: list[dict[str, Any]],
    arm: str,
    config: RunConfig,
    seconds: float,
    generated: int,
) -> Run:
    text = (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if line["step"] > trainer.steps_before]
    assert trainer.ended is not None
    lags = {int(lag): count for lag, count in trainer.totals.lag_counts.items()}
    lengths = np.array([e.tokens for e in trainer.ended])
    batch = config.learner.batch_trajectories
    batches = lengths[: len(lengths) // batch * batch].reshape(-1, batch)

    def mean(name: str) -> float:
        return float(np.mean([line[name] for line in lines if name in line] or [0.0]))

    return Run(
        arm=arm,
        seed=config.run.seed,
        minutes=config.run.max_minutes,
        start=measured(evaluations[0], "return_mean"),
        end=measured(evaluations[-1], "return_mean"),
        curve=smoothed(trainer.ended, long_share=float(config.env.params["long_share"])),
        steps=trainer.step - trainer.steps_before,
        tokens_per_second=trainer.totals.trained_tokens / seconds,
        generated_per_second=generated / seconds,
        idle_learner=trainer.totals.wait_seconds / seconds,
        idle_generator=mean("generator/idle_share"),
        running_requests=mean("generator/running_requests"),
        lag_mean=sum(lag * n for lag, n in lags.items()) / max(1, sum(lags.values())),
        lag_max=max(lags, default=0),
        stale_tokens=mean("learner/stale_token_fraction"),
        tokens_mean=float(lengths.mean()),
        tokens_99=float(np.quantile(lengths, 0.99)),
        tokens_mean_last=float(lengths[-len(lengths) // 5 :].mean()),
        tail=float((batches.max(1) / batches.mean(1)).mean()),
    )


def run_all(args: argparse.Namespace) -> list[Run]:
    """Make all runs that the file does not have yet. Write the file after each. Return the runs."""
    settings = {"file": SETTINGS.read_text(encoding="utf-8"), "overrides": args.set}
    runs = earlier(args.out, settings)
    made = {(run.arm, run.seed, run.minutes) for run in runs}
    for turn, seed in enumerate(args.seeds):
        order = [*args.arms[turn % len(args.arms) :], *args.arms[: turn % len(args.arms)]]
        for arm in order:
            if (arm, seed, args.minutes) in made:
                continue
            config = configured(arm, seed, args.minutes, args.set)
            with running(config) as system:
                runs.append(train(system, arm, config))
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} seed {seed} {row(arm, runs[-1:])}\n")
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(
                json.dumps({"settings": settings, "runs": [asdict(run) for run in runs]}, indent=1)
            )
    return runs


def earlier(path: Path, settings: dict[str, Any]) -> list[Run]:
    """Return the runs in a file of results.

    Raises:
        SystemExit: the file was made with other settings.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings:
        raise SystemExit(f"{path} was made with other settings; move it away, or give another --out")
    return [
        Run(**{**run, "curve": [(time, reward) for time, reward in run["curve"]]}) for run in found["runs"]
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, per run")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--set", nargs="+", default=[], metavar="section.field=value")
    parser.add_argument("--out", type=Path, default=Path("build/truncation.json"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    runs = run_all(args)
    sys.stdout.write(tables(runs, args.shares) + "\n")
    if args.json is not None:
        save_results(args.json, {"arms": tables(runs, args.shares)}, [asdict(run) for run in runs])
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
