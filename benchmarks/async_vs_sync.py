"""Compare asynchronous training with lockstep: wall time to equal trained tokens and equal held-out reward.

    python -m benchmarks.async_vs_sync [--arms uniform heavy ...] [--modes sync async] [--seeds 0 1]
                                       [--set section.field=value ...] [--out FILE.jsonl] [--plot FILE.png]

Every run starts the real system afresh: vLLM, DeepSpeed, ZeroMQ, one process per role. Model, task, batch,
objective, learning rate, and the number of episodes that the actor may run at a time are the same in both
modes (benchmarks/async_vs_sync/async_vs_sync.toml). Only `run.mode` differs. An arm sets the kind of work:

- uniform: all responses have the same length;
- heavy: lengths of 8 to 256 characters; each doubling of the length halves the number of tasks, except that
  256 is as frequent as 128; no response gets more tokens than its task asks for;
- tools: three turns, and after each a tool call of 0.2 to 2 s, log-uniform, seeded;
- tools-narrow: as tools, but with only as many concurrent episodes as a batch has, which is all that lockstep
  can use;
- learner: three passes over each batch, with a clip around the recomputed proximal policy, so that the
  learner is the bottleneck;
- generation: an engine that runs four requests at a time, so that generation is the bottleneck.

The bound on policy lag is just high enough to keep the slower side busy: one version where all responses take
equally long, four versions with tools. A higher bound would not be faster, and the samples would be staler.
With heavy-tailed lengths the bound is eight, because a response of the tail takes as long as several updates,
and only a few more episodes run at a time than a batch has.

The clock starts when all roles are up and the first weights are in service and evaluated. The pipeline is
empty then, in both modes. The clock stops after the arm's number of steps or minutes, whichever comes first.
Times are compared at a level that both modes have reached. The learner keeps copies of its weights on the
way. After the clock has stopped, it evaluates the copies on held-out tasks by sampling, without tool latency.

Each finished run is one line of FILE.jsonl. The benchmark does not repeat it unless settings have changed
since.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.envs.letters import WorkSuite
from benchmarks.real_system import BudgetedCurriculum, System, running
from benchmarks.report import measured, pyplot, save_results, spread
from launch.model import prepare
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
from learner.weight_copy import OutgoingWeights
from protocol.session import Progress

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def idle_share(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the generators' idle share between two reports: seconds without a request over seconds served.

    Example:
        >>> a = {"generator/idle_seconds_total": 2.0, "generator/serving_seconds_total": 10.0}
        >>> b = {"generator/idle_seconds_total": 3.0, "generator/serving_seconds_total": 20.0}
        >>> idle_share(a, b)
        0.1
    """
    idle, served = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("generator/idle_seconds_total", "generator/serving_seconds_total")
    )
    return idle / served if served > 0 else 0.0


def cpu_seconds(system: System) -> dict[str, float]:
    """Return the processor seconds of each role so far, with child processes. This process is the learner."""
    with urllib.request.urlopen(f"http://{system.config.broker.http}/status", timeout=5) as answer:
        peers = json.load(answer)["peers"]
    times = process_times()
    found = {"learner": times[os.getpid()][1]}
    for peer in peers:
        if peer["role"] != "learner":
            role, pid = peer["role"], int(peer["pid"])
            mine = [cpu for process, (parent, cpu) in times.items() if pid in (process, parent)]
            found[role] = found.get(role, 0.0) + sum(mine)
    others = {os.getpid(), *(int(peer["pid"]) for peer in peers)}
    broker = [
        cpu for process, (parent, cpu) in times.items() if parent == os.getpid() and process not in others
    ]
    found["broker"] = sum(broker)
    return found | {"others": machine_seconds() - sum(found.values())}


def machine_seconds() -> float:
    """Return the busy processor seconds of all cores, time stolen by the host included."""
    line = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    user, nice, system, _, _, interrupts, soft, stolen = map(int, line[1:9])
    return (user + nice + system + interrupts + soft + stolen) / TICKS_PER_S


def process_times() -> dict[int, tuple[int, float]]:
    """Return the parent and the processor seconds so far of each process, by process id."""
    found: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            # The process has ended meanwhile.
            continue
        found[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    return found


@dataclass(frozen=True)
class Step:
    """Figures of one finished learner step."""

    time: float
    """Seconds since the clock was started."""
    tokens: int
    """Action tokens trained since the clock was started."""
    waited: float
    """Seconds of the step spent waiting for a batch."""
    updated: float
    """Seconds of forward and backward passes and the optimizer."""
    reward: float | None
    """Mean return of the training trajectories that arrived; None if none did."""


@dataclass(frozen=True)
class Snapshot:
    """Held-out reward of the weights at one moment, evaluated after the clock was stopped."""

    time: float
    step: int
    reward: float


@dataclass(frozen=True)
class Run:
    """Results of one learner."""

    arm: str
    mode: str
    seed: int
    settings: str
    """Fingerprint of the settings. A table holds only runs with equal fingerprints."""
    seconds: float
    steps: list[Step]
    snapshots: list[Snapshot]
    idle_learner: float
    """Share of ``seconds`` in which the learner waited for a batch."""
    idle_generator: float
    """Share of the seconds in which the generator ran no request."""
    running_requests: float
    episodes_running: float
    """Mean over the steps, like ``running_requests``."""
    tokens_per_trajectory: float
    lag_mean: float
    lag_max: int
    stale_tokens: float
    """Share of the action tokens in batches that were too stale to train on."""
    cpu: dict[str, float] = field(default_factory=dict)
    """Cores that each role kept busy, and, as "others", those that other work on the machine kept busy."""


class TimedTrainer(Trainer):
    """A trainer that keeps step times and copies of its weights from `begin` on."""

    keep_steps, keep_seconds = 1, 1.0
    """Steps and seconds between two copies of the weights, whichever comes first."""
    gauges: list[dict[str, float]]

    def begin(self) -> None:
        """Start the clock. All roles are up, and the first weights have been evaluated."""
        self.totals, self.timed, self.kept = (
            Totals(),
            list[Step](),
            list[tuple[float, int, OutgoingWeights]](),
        )
        self.gauges, self.first_step = [self.batches.intake.gauges], self.step
        self.began = time.monotonic()

    def record(self, report: Any, trained: Any, updated: int, waited: float, wall: float) -> None:
        """Note the step for the benchmark, then record it as every trainer does."""
        if hasattr(self, "began"):
            arrived = [t.return_ for t in self.batches.intake.recent if t.status != "failed"]
            now = time.monotonic() - self.began
            self.timed.append(
                Step(
                    time=now,
                    tokens=self.totals.trained_tokens,
                    waited=waited,
                    updated=report.metrics["learner/step_seconds"],
                    reward=sum(arrived) / len(arrived) if arrived else None,
                )
            )
            self.gauges.append(self.batches.intake.gauges)
            done = self.step - self.first_step
            last = self.kept[-1] if self.kept else (0.0, 0)
            if now - last[0] >= self.keep_seconds or done - last[1] >= self.keep_steps:
                self.kept.append((now, done, self.copy()))
        super().record(report, trained, updated, waited, wall)

    def copy(self) -> OutgoingWeights:
        """Return a copy of the current weights."""
        weights = self.engine.weights()
        return OutgoingWeights(weights.shapes, [(name, tensor.clone()) for name, tensor in weights.tensors])


def judge(run: TrainingRun, trainer: TimedTrainer) -> list[Snapshot]:
    """Publish the kept weights one after the other, and evaluate each."""
    records = run.evaluations.records
    found = [Snapshot(0.0, 0, measured(records[0], "return_mean"))]
    for moment, done, weights in trainer.kept:
        trainer.version += 1
        trainer.publisher.publish(trainer.version, weights, announce=run.session.announce)
        run.evaluate(f"snapshot {done}")
        found.append(Snapshot(moment, done, measured(records[-1], "return_mean")))
    return found


def train(system: System, config: RunConfig, *, arm: str, settings: str, steps: int, kept: int) -> Run:
    """Run one learner: evaluate, start the clock, train, stop the clock, evaluate the kept weights."""
    mode, seed = config.run.mode, config.run.seed
    learner_config = config.learner.model_copy(update={"max_policy_lag": config.max_policy_lag})
    engine = TrainingEngine(learner_config, model=system.model, total_steps=learner_config.steps, seed=seed)
    epoch = next_epoch(system.folder)
    link = join(
        learner_config, system.config.broker.endpoint, system.folder.name, epoch=epoch, progress=Progress
    )
    report = Report(system.folder)
    publisher = Publisher(system.folder.name, system.folder, epoch=epoch, keep=learner_config.keep_versions)
    deadline = float("inf")
    curriculum = _curriculum(config, learner_config, epoch)
    try:
        session = BrokerSession(
            link,
            curriculum,
            learner_config,
            lockstep=mode == "sync",
            stop_reason=lambda: system.stop_reason(deadline),
        )
        trainer = TimedTrainer(learner_config, system.folder, engine, session, publisher, report, seed=seed)
        run = TrainingRun(trainer, session)
        trainer.keep_steps, trainer.keep_seconds = max(1, steps // kept), config.run.max_minutes * 60 / kept
        trainer.take_over(always=True)
        run.evaluate("before")
        used = cpu_seconds(system)
        trainer.begin()
        deadline = trainer.began + config.run.max_minutes * 60
        with contextlib.suppress(Stopped):
            while trainer.step < steps:
                run.learn()
        seconds = time.monotonic() - trainer.began
        used = {role: (cpu - used.get(role, 0.0)) / seconds for role, cpu in cpu_seconds(system).items()}
        snapshots = judge(run, trainer)
    finally:
        link.close("done")
        report.close()
        publisher.close()
        engine.release()
    return _outcome(trainer, arm, settings, config, seconds, snapshots, used)


def _curriculum(config: RunConfig, learner_config: LearnerConfig, epoch: int) -> BudgetedCurriculum:
    """Return tasks that depend on the seed alone, each with the length that the suite gives it, if it does."""
    first = config.run.seed * 1_000_000
    curriculum = BudgetedCurriculum(config.env.name, learner_config, epoch, next_index=first)
    suite = WorkSuite(**config.env.params)
    curriculum.budget = suite.budget if suite.budgeted else None
    return curriculum


def _outcome(
    trainer: TimedTrainer,
    arm: str,
    settings: str,
    config: RunConfig,
    seconds: float,
    snapshots: list[Snapshot],
    cpu: dict[str, float],
) -> Run:
    text = (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if "learner/policy_version" in line]
    lags = {int(lag): count for lag, count in trainer.totals.lag_counts.items()}
    trajectories = max(1, trainer.totals.trained_trajectories)

    def mean(name: str) -> float:
        return float(sum(line.get(name, 0.0) for line in lines) / max(1, len(lines)))

    return Run(
        arm=arm,
        mode=config.run.mode,
        seed=config.run.seed,
        settings=settings,
        seconds=seconds,
        steps=trainer.timed,
        snapshots=snapshots,
        idle_learner=sum(step.waited for step in trainer.timed) / seconds,
        idle_generator=idle_share(trainer.gauges[0], trainer.gauges[-1]),
        running_requests=mean("generator/running_requests"),
        episodes_running=mean("actor/episodes_running"),
        tokens_per_trajectory=trainer.totals.trained_tokens / trajectories,
        lag_mean=sum(lag * n for lag, n in lags.items()) / max(1, sum(lags.values())),
        lag_max=max(lags, default=0),
        stale_tokens=mean("learner/stale_token_fraction"),
        cpu=cpu,
    )


def read(lines: Sequence[str]) -> list[Run]:
    """Return the runs of the lines of a JSON Lines file."""
    found = []
    for values in map(json.loads, lines):
        values["steps"] = [Step(**step) for step in values["steps"]]
        values["snapshots"] = [Snapshot(**snapshot) for snapshot in values["snapshots"]]
        found.append(Run(**values))
    return found


SHARE = 0.9
"""Share of the smaller of both modes' reward gains. Times are compared at the reward that it gives."""


def time_to_tokens(run: Run, tokens: float) -> float | None:
    """Return the seconds until ``tokens`` were trained, interpolated linearly between steps.

    None: never reached.
    """
    return _first([(0.0, 0.0), *((step.time, float(step.tokens)) for step in run.steps)], tokens)


def time_to_reward(run: Run, level: float) -> float | None:
    """Return the seconds until the held-out reward was ``level``, interpolated linearly between snapshots.

    None: never reached.
    """
    return _first([(snapshot.time, snapshot.reward) for snapshot in run.snapshots], level)


def _first(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the time at which a curve first reaches a level. None: never."""
    before: tuple[float, float] | None = None
    for at, value in curve:
        if value >= level:
            if before is None or value == before[1]:
                return at
            return before[0] + (at - before[0]) * (level - before[1]) / (value - before[1])
        before = at, value
    return None


def token_ratio(sync: Run, async_: Run) -> float | None:
    """Return the time of lockstep over the time of the asynchronous run, to the tokens that both trained."""
    tokens = min(run.steps[-1].tokens for run in (sync, async_))
    return _over(time_to_tokens(sync, tokens), time_to_tokens(async_, tokens))


def reward_ratio(sync: Run, async_: Run) -> float | None:
    """Return the time of lockstep over the time of the asynchronous run, to a common held-out reward.

    That reward is the first weights' reward plus `SHARE` of the smaller gain of the two runs.
    """
    start = statistics.mean(run.snapshots[0].reward for run in (sync, async_))
    best = min(max(snapshot.reward for snapshot in run.snapshots) for run in (sync, async_))
    level = start + SHARE * (best - start)
    return _over(time_to_reward(sync, level), time_to_reward(async_, level))


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def pairs(runs: Sequence[Run], arm: str) -> list[tuple[Run, Run]]:
    """Return pairs of the lockstep run and the asynchronous run of the same seed."""
    of_arm = [run for run in runs if run.arm == arm]
    by = {(run.seed, run.mode): run for run in of_arm}
    seeds = sorted({run.seed for run in of_arm})
    return [(by[s, "sync"], by[s, "async"]) for s in seeds if (s, "sync") in by and (s, "async") in by]


def tables(runs: Sequence[Run], arms: Sequence[str]) -> str:
    """Return two Markdown tables: the ratios, and where the time went."""
    rows = [
        "| arm | repetitions | time to equal trained tokens: sync / async | to equal held-out reward |",
        "|---" * 4 + "|",
    ]
    for arm in arms:
        both = pairs(runs, arm)
        if both:
            tokens, rewards = ([ratio(*pair) for pair in both] for ratio in (token_ratio, reward_ratio))
            rows.append(
                f"| {arm} | {len(both)} | {spread(tokens, wanted=len(both))} | {spread(rewards, wanted=len(both))} |"
            )
    more = [
        "| arm | mode | s per step | trained tokens/s | idle learner / generator | episodes under way | lag mean / max "
        "| reward before, after | cores used: learner, generator, actor, broker; others |",
        "|---" * 9 + "|",
    ]
    for arm in arms:
        for mode in ("sync", "async"):
            of_mode = [run for run in runs if (run.arm, run.mode) == (arm, mode)]
            if of_mode:
                more.append(_row(arm, mode, of_mode))
    return "\n".join(["**Median, in brackets least and most**", "", *rows, "", *more])


def headlines(runs: Sequence[Run], arms: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the ratio of each arm in trained tokens, for the README."""
    return [
        (
            f"asynchronous, arm `{arm}`: speed to equal trained tokens",
            "lockstep on the same cores",
            spread([token_ratio(*pair) for pair in both], wanted=len(both)),
        )
        for arm in arms
        if (both := pairs(runs, arm))
    ]


def _row(arm: str, mode: str, runs: Sequence[Run]) -> str:
    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    cores = []
    for role in ("learner", "generator", "actor", "broker", "others"):
        measured = [run.cpu[role] for run in runs if role in run.cpu]
        cores.append(f"{median(measured):.2f}" if measured else "-")
    return (
        f"| {arm} | {mode} | {median([run.seconds / len(run.steps) for run in runs]):.2f} "
        f"| {median([run.steps[-1].tokens / run.seconds for run in runs]):,.0f} "
        f"| {median([run.idle_learner for run in runs]):.0%} / {median([run.idle_generator for run in runs]):.0%} "
        f"| {median([run.episodes_running for run in runs]):.0f} "
        f"| {median([run.lag_mean for run in runs]):.1f} / {max(run.lag_max for run in runs)} "
        f"| {median([run.snapshots[0].reward for run in runs]):.2f}, "
        f"{median([run.snapshots[-1].reward for run in runs]):.2f} "
        f"| {', '.join(cores)} |"
    )


def summary(run: Run) -> str:
    """Return one line of text about one run."""
    return f"seed {run.seed}, {len(run.steps)} steps in {run.seconds:.1f} s {_row(run.arm, run.mode, [run])}"


def plot(runs: Sequence[Run], arms: Sequence[str], path: Path) -> None:
    """Plot the held-out reward over wall time, with one panel per arm. The seed stands at the end of each line."""
    plt = pyplot()
    shown = [arm for arm in arms if pairs(runs, arm)]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 2.6 * lines), layout="constrained", squeeze=False
    )
    for place, axis in enumerate(axes.flat):
        if place >= len(shown):
            axis.set_visible(False)
            continue
        for run in (run for pair in pairs(runs, shown[place]) for run in pair):
            colour = "#d62728" if run.mode == "async" else "#444444"
            first = run.seed == min(r.seed for r in runs)
            points = [(snapshot.time, snapshot.reward) for snapshot in run.snapshots]
            axis.plot(
                *zip(*points, strict=True), color=colour, linewidth=1.3, label=run.mode if first else None
            )
            axis.annotate(
                f"seed {run.seed}", points[-1], xytext=(3, 0), textcoords="offset points", fontsize=6, color=colour,
                va="center",
            )  # fmt: skip
        axis.set_title(shown[place], fontsize=10)
        axis.grid(alpha=0.3)
        axis.set_xlabel("seconds of training", fontsize=8)
    axes[0][0].set_ylabel("held-out reward", fontsize=8)
    axes[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


SETTINGS = Path(__file__).with_name("async_vs_sync.toml")
MODES = ("sync", "async")
SNAPSHOTS = 10
UNIFORM = ("env.params.kinds=[[32, 1, 1.0]]", "learner.max_policy_lag=1")
TOOLS = (
    "env.params.kinds=[[12, 3, 1.0]]",
    "env.params.latency_s=[0.2, 2.0]",
    "learner.sampling.max_turn_tokens=16",
    "run.max_minutes=1.2",
)
ARMS: dict[str, tuple[int, tuple[str, ...]]] = {
    "uniform": (80, UNIFORM),
    "heavy": (
        60,
        (
            "env.params.kinds=[[8, 1, 0.5], [16, 1, 0.25], [32, 1, 0.125], [64, 1, 0.0625], [128, 1, 0.03125], "
            "[256, 1, 0.03125]]",
            "env.params.budgeted=true",
            "learner.sampling.max_turn_tokens=272",
            "learner.sampling.max_trajectory_tokens=300",
            "learner.max_policy_lag=8",
            "actor.concurrent_episodes=72",
        ),
    ),
    "tools": (50, TOOLS),
    "tools-narrow": (50, (*TOOLS, "actor.concurrent_episodes=64")),
    "learner": (
        40,
        (
            *UNIFORM,
            # The rate is lower because each version takes nine optimizer steps here.
            "learner.optimizer.lr=3e-4",
            "learner.algorithm.passes=3",
            "learner.algorithm.updates_per_batch=3",
            "learner.algorithm.proximal=recomputed",
            "learner.algorithm.corrections=[{kind='truncated', ceiling=2.0}]",
            "learner.algorithm.surrogate.kind=clip",
            "learner.algorithm.surrogate.centre=proximal",
            "learner.algorithm.surrogate.low=0.2",
            "learner.algorithm.surrogate.high=0.2",
        ),
    ),
    "generation": (40, (*UNIFORM, "generator.max_num_seqs=4")),
}
"""Upper limit of the learner steps of each arm, and its overrides of the common settings."""


def configured(arm: str, mode: str, seed: int, model: str, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of one run."""
    base = load(SETTINGS)
    own = [f"run.seed={seed}", f"run.mode={mode}", f"model.path={model}"]
    config = load(SETTINGS, [*ARMS[arm][1], *overrides, *own])
    params = {**config.env.params, "seed": seed + 1}
    env = config.env.model_copy(update={"params": params})
    return config.model_copy(
        update={"env": env, "model": base.model.model_copy(update={"path": model, "tiny": None})}
    )


def fingerprint(arm: str, overrides: Sequence[str]) -> str:
    """Return a hash of everything that a run depends on, except its mode and seed."""
    text = json.dumps([SETTINGS.read_text(encoding="utf-8"), ARMS[arm], list(overrides)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_all(args: argparse.Namespace) -> list[Run]:
    """Make the runs that have no result yet. Return all requested runs."""
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    known = read(out.read_text(encoding="utf-8").splitlines()) if out.exists() else []
    prints = {arm: fingerprint(arm, args.set) for arm in args.arms}
    wanted = [(seed, arm, mode) for seed in args.seeds for arm in args.arms for mode in _turns(args, seed)]
    done = {(run.seed, run.arm, run.mode) for run in known if run.settings == prints.get(run.arm)}
    for seed, arm, mode in wanted:
        if (seed, arm, mode) in done:
            continue
        model = str(prepare(load(SETTINGS)))
        config = configured(arm, mode, seed, model, args.set)
        with running(config) as system:
            run = train(
                system,
                config,
                arm=arm,
                settings=prints[arm],
                steps=args.steps or ARMS[arm][0],
                kept=SNAPSHOTS,
            )
        with open(out, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(run)) + "\n")
        known.append(run)
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {summary(run)}\n")
    return [
        run for run in known if (run.seed, run.arm, run.mode) in wanted and run.settings == prints[run.arm]
    ]


def _turns(args: argparse.Namespace, seed: int) -> list[str]:
    """Return the modes, in reverse order for odd seeds."""
    return list(args.modes) if seed % 2 == 0 else list(reversed(args.modes))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=0, help="learner steps, if not those of the arm")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.field=value")
    parser.add_argument("--out", type=Path, default=Path("build/async_vs_sync.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    runs = run_all(args)
    sys.stdout.write(tables(runs, args.arms) + "\n")
    if args.json is not None:
        found = [asdict(run) for run in runs]
        save_results(args.json, {"arms": tables(runs, args.arms)}, found, headlines(runs, args.arms))
    if args.plot:
        plot(runs, args.arms, args.plot)


if __name__ == "__main__":
    main()
