"""The same training by us and by TRL's `GRPOTrainer`: trained tokens per second, and wall time to a reward.

    python -m benchmarks.versus_trl [--tasks letter tool ...] [--arms trl sync async ...] [--seeds 0 1 2]
                                    [--steps N] [--cores 0,1] [--out FILE.jsonl] [--plot FILE.png] [--table]

Same first weights and tokenizer, tasks in the same order, prompts and generations per step, limits, optimizer, clip and
precision (benchmarks/versus_trl.toml); the same cores, to which all processes of a run are bound. The start-up is told
apart; the clock starts with the first step. TRL is an optional dependency (the extra `bench`).

Tasks: `letter`, one turn with a dense reward, a model of 0.1 million parameters; `letter-1m`, the same with 0.9
million; `tool`, three turns, each answered by a tool after 0.2 to 2 s (log-uniform), with 0.4 million.

Arms: `sync` and `async` are ours, a thread a process. `trl` has two threads, `trl-1` one. `trl-batching` generates with
transformers' continuous batching, `trl-vllm` with vLLM in its process. On `tool`, `trl-environment` uses
`environment_factory` as documented, `trl-rollout` a `rollout_func` of ours, which awaits all tool calls of a turn
together.

A finished run is a line of FILE.jsonl; those that are there are not run again, unless settings have changed since.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.versus_trl_runs import Spec, curve, ratio, seconds_to, spread, step_seconds, tokens_per_second
from launch.config import RunConfig, load

ROOT = Path(__file__).parents[1]
SETTINGS = Path(__file__).with_suffix(".toml")
GRACE_S = 300.0
"""For what a run does beside its steps."""
STOP_S = 30.0


@dataclass(frozen=True)
class Arm:
    """Who trains, and how."""

    ours: bool
    threads: int
    mode: str = "sync"


@dataclass(frozen=True)
class TaskSettings:
    """What is trained, for how long, and the reward to be reached."""

    arms: tuple[str, ...]
    steps: int
    seconds: float
    level: float
    window: int
    """Trajectories in a point of the reward curve."""
    overrides: tuple[str, ...] = ()
    seconds_of: tuple[tuple[str, float], ...] = ()
    """Of arms that get less or more time."""


ARMS = {
    "sync": Arm(True, 1),
    "async": Arm(True, 1, "async"),
    "trl": Arm(False, 2),
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
TOOL = (
    "model.tiny.hidden_size=128",
    "model.tiny.intermediate_size=384",
    "model.tiny.heads=4",
    "model.tiny.warm_start.steps=300",
    "model.tiny.warm_start.demonstrations=4000",
    "model.tiny.warm_start.batch=32",
    "model.tiny.warm_start.lr=2e-3",
    "env.name=benchmarks.async_vs_sync_env:WorkSuite",
    "env.params={kinds = [[12, 3, 1.0]], latency_s = [0.2, 2.0]}",
    "generator.max_model_len=128",
    "generator.max_num_seqs=128",
    "actor.concurrent_episodes=256",
    "learner.batch_trajectories=64",
    "learner.max_policy_lag=4",
    "learner.sampling.max_turn_tokens=16",
    "learner.sampling.max_trajectory_tokens=96",
)
TASKS = {
    "letter": TaskSettings(("trl", "trl-1", "sync", "async"), 70, 120.0, 0.7, 64),
    "letter-1m": TaskSettings(("trl", "trl-1", "sync", "async"), 40, 120.0, 0.7, 64, MODEL_1M),
    "tool": TaskSettings(
        ("trl-environment", "trl-rollout", "sync", "async"), 200, 90.0, 0.5, 128, TOOL,
        (("trl-environment", 300.0),),
    ),
}  # fmt: skip


def configured(task: str, arm: str, seed: int, overrides: Sequence[str]) -> RunConfig:
    """The run file of one run."""
    own = (f"run.seed={seed}", f"run.mode={ARMS[arm].mode}", f"run.name={task}-{arm}-{seed}")
    return load(SETTINGS, [*TASKS[task].overrides, *overrides, *own])


def fingerprint(config: RunConfig, arm: str, steps: int, seconds: float) -> str:
    """Of all settings that a result depends on."""
    parts = [
        p.model_dump_json()
        for p in (config.model, config.env, config.generator, config.actor, config.learner)
    ]
    text = "".join([*parts, repr(ARMS[arm]), str(steps), str(seconds)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(task: str, arm: str, config: RunConfig, steps: int, seconds: float, cores: str) -> dict[str, Any]:
    """One run, in a process of its own.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    from launch.model import prepare

    model = str(prepare(config).resolve())
    with tempfile.TemporaryDirectory() as folder:
        spec, out, log = (Path(folder) / name for name in ("spec.json", "out.json", "log"))
        threads = ARMS[arm].threads
        Spec(arm, config.model_dump(mode="json"), model, folder, steps, seconds, threads).write(spec)
        side = "ours" if ARMS[arm].ours else "peer"
        command = [sys.executable, "-m", f"benchmarks.versus_trl_{side}", str(spec), str(out)]
        if cores:
            command = ["taskset", "-c", cores, *command]
        with open(log, "w") as sink:
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment(threads), stdout=sink, stderr=sink, start_new_session=True
            )
            try:
                status: int | str = child.wait(timeout=seconds + GRACE_S)
            except subprocess.TimeoutExpired:
                status = "no end"
            finally:
                _end(child)
        if status != 0 or not out.exists():
            raise RuntimeError(f"{task}, {arm}: ended with {status}:\n{log.read_text()[-3000:]}")
        return dict(json.loads(out.read_text()))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask a run that is not done to stop what it started, then kill it."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def environment(threads: int) -> dict[str, str]:
    """Threads pinned, no look-ups, quiet."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    pinned = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return os.environ | quiet | pinned | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is missing; returns all results asked for."""
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    results = []
    for turn, (seed, task) in enumerate((s, t) for s in args.seeds for t in args.tasks):
        settings = TASKS[task]
        arms = args.arms or settings.arms
        for arm in [*arms[turn % len(arms) :], *arms[: turn % len(arms)]]:
            steps = args.steps or settings.steps
            seconds = args.seconds or dict(settings.seconds_of).get(arm, settings.seconds)
            config = configured(task, arm, seed, args.set)
            cell = {
                "task": task,
                "arm": arm,
                "seed": seed,
                "settings": fingerprint(config, arm, steps, seconds),
            }
            done = [r for r in known if cell.items() <= r.items()]
            if not done and not args.table:
                load_before = os.getloadavg()[0]
                outcome = run(task, arm, config, steps, seconds, args.cores)
                done = [cell | {"load": load_before} | outcome]
                with open(out, "a") as lines:
                    lines.write(json.dumps(done[0]) + "\n")
                sys.stderr.write(f"{time.strftime('%H:%M:%S')} {task} {arm} seed {seed}: {brief(done[0])}\n")
            results += done[-1:]
    return results


def measures(result: dict[str, Any]) -> dict[str, float | None]:
    """What is compared."""
    settings = TASKS[result["task"]]
    return {
        "tokens": tokens_per_second(result["steps"]),
        "step": step_seconds(result["steps"]),
        "level": seconds_to(curve(result["rewards"], settings.window), settings.level),
        "startup": result["startup"],
        "steps": float(len(result["steps"])),
    }


def brief(result: dict[str, Any]) -> str:
    """A line on one run."""
    found = measures(result)
    points = curve(result["rewards"], TASKS[result["task"]].window) or [(0.0, 0.0)]
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in result["phases"].items())
    told = ", ".join(f"{name} {value and round(value, 3)}" for name, value in found.items())
    return f"{told}; reward {points[0][1]:.3f} -> {points[-1][1]:.3f}; a step: {phases}; {result['notes']}"


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: what each arm did, and ours over each of TRL's arms."""
    return "\n\n".join(
        block
        for task in TASKS
        if (of_task := [r for r in results if r["task"] == task])
        for block in (_arms_table(task, of_task), _ratio_table(task, of_task))
    )


def _by_seed(results: Sequence[dict[str, Any]], arm: str, what: str) -> list[float | None]:
    seeds = sorted({r["seed"] for r in results})
    found = {r["seed"]: measures(r)[what] for r in results if r["arm"] == arm}
    return [found.get(seed) for seed in seeds]


def _present(results: Sequence[dict[str, Any]], *, ours: bool) -> list[str]:
    return [name for name, arm in ARMS.items() if arm.ours == ours and any(r["arm"] == name for r in results)]


def _arms_table(task: str, results: Sequence[dict[str, Any]]) -> str:
    level = TASKS[task].level
    rows = [
        f"**{task}** (median, in brackets least and most over seeds)",
        "",
        f"| arm | trained tokens/s | seconds a step | seconds to reward {level:g} | steps | start-up, s | runs |",
        "|---" * 7 + "|",
    ]
    for arm in (*_present(results, ours=False), *_present(results, ours=True)):
        values = {
            what: _by_seed(results, arm, what) for what in ("tokens", "step", "level", "steps", "startup")
        }
        count = sum(r["arm"] == arm for r in results)
        rows.append(
            f"| {arm} | {spread(values['tokens'], 0)} | {spread(values['step'], 3)} "
            f"| {spread(values['level'], 1, wanted=count)} | {spread(values['steps'], 0)} "
            f"| {spread(values['startup'], 0)} | {count} |"
        )
    return "\n".join(rows)


def _ratio_table(task: str, results: Sequence[dict[str, Any]]) -> str:
    peers = _present(results, ours=False)
    rows = [
        f"**{task}: ours over TRL's** (tokens/s; time to the reward; per seed, then median)",
        "",
        "| | " + " | ".join(f"over {peer}" for peer in peers) + " |",
        "|---" * (len(peers) + 1) + "|",
    ]
    for arm in _present(results, ours=True):
        cells = []
        for peer in peers:
            speed = ratio(_by_seed(results, arm, "tokens"), _by_seed(results, peer, "tokens"))
            time_ = ratio(_by_seed(results, peer, "level"), _by_seed(results, arm, "level"))
            cells.append(f"{spread(speed)}; {spread(time_)}")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward over wall time, a panel per task, an arm a colour, a seed a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tasks = [task for task in TASKS if any(r["task"] == task for r in results)]
    figure, panels = plt.subplots(
        1, len(tasks), figsize=(5 * len(tasks), 4), layout="constrained", squeeze=False
    )
    colours = dict(zip(ARMS, plt.get_cmap("tab10").colors, strict=False))
    for axes, task in zip(panels[0], tasks, strict=True):
        labelled = set()
        for result in (r for r in results if r["task"] == task):
            arm, points = result["arm"], curve(result["rewards"], TASKS[task].window)
            if points:
                label = None if arm in labelled else arm
                axes.plot(*zip(*points, strict=True), color=colours[arm], label=label, linewidth=1.3)
                labelled.add(arm)
        axes.axhline(TASKS[task].level, color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel="seconds since the first step", ylabel="mean reward", title=task)
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="as a rule those of the task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="at most, of a run")
    parser.add_argument("--seconds", type=float, help="of a run, at most")
    parser.add_argument("--cores", default="0,1", help="for taskset; empty: not bound")
    parser.add_argument("--set", nargs="+", default=[], metavar="section.field=value")
    parser.add_argument("--out", type=Path, default=Path("build/versus_trl.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--table", action="store_true", help="run nothing, print what there is")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
    results = run_all(args)
    sys.stdout.write(tables(results) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
