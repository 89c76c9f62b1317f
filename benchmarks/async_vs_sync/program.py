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
import hashlib
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.async_vs_sync.run import Run, read, train
from benchmarks.async_vs_sync.table import headlines, plot, summary, tables
from benchmarks.report import save_results
from benchmarks.staleness.lag_system import running
from launch.model import prepare
from launch.run_file.load import load
from launch.run_file.sections import RunConfig

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
