"""Compare the same training with Offbeat and TRL's `GRPOTrainer`: trained tokens/s, wall time to a reward.

    python -m benchmarks.versus_trl [--tasks letter tool ...] [--arms trl sync async ...] [--seeds 0 1 2]
                                    [--steps N] [--cores 0,1] [--out FILE.jsonl] [--plot FILE.png] [--table]

Both sides have the same first weights and tokenizer, tasks in the same order, prompts and generations per
step, limits, optimizer and clip (benchmarks/versus_trl/versus_trl.toml). All processes of a run are bound to
the same cores. The clock starts with the first step, and the start-up time is reported separately. TRL is an
optional dependency (the extra `bench`).

Tasks:

- `letter`: one turn with a dense reward, a model of 0.1 million parameters;
- `letter-1m`, `letter-10m`: the `letter` task with models of 0.9 and 10 million parameters;
- `rows`, `sums`: a jsonl file and a reward function in TRL's form, which both sides take unchanged: words of three
  letters for a model of 0.1 million parameters, and sums of two digits for SmolLM2 (135 million);
- `easy-sums`: sums of numbers from 1 to 12, which SmolLM2 gets right in about a quarter of its answers at the start. So
  its first successes are not left to chance, and a run ends where it has reached the level;
- `tool`: three turns, each answered by a tool after 0.2 to 2 s (log-uniform), a model of 0.4 million
  parameters.

Arms:

- `sync`, `async`: Offbeat with one thread per process. All asynchronous arms use the decoupled objective;
- `sync-2`: two threads each in learner and generator, which work in turns;
- `async-lag-1`: lets the generators be one version ahead at most;
- `async-wide`: samples more at a time, with a higher lag bound, and keeps the KV cache over weight updates;
- `trl`, `trl-1`: TRL with two threads and with one;
- `trl-batching`, `trl-vllm`: generate with transformers' continuous batching, and with vLLM in the trainer's
  process;
- `trl-environment`, `trl-rollout` (on `tool`): use `environment_factory` as documented, and our own
  `rollout_func`, which awaits all tool calls of a turn together;
- arms that end in `-bf16` compute in bfloat16, with master weights in float32 on both sides. All others use
  float32.

Each finished run is one line of FILE.jsonl. The benchmark does not repeat it unless settings have changed
since.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import pyplot, save_results, spread
from benchmarks.versus_trl.runs import (
    ARMS,
    TASKS,
    Spec,
    configured,
    curve,
    mean_interval,
    ratio,
    reached,
    seconds_to,
    step_seconds,
    tokens_per_second,
)
from launch.run_file.sections import RunConfig


def measures(result: dict[str, Any]) -> dict[str, float | None]:
    """Return the compared figures of one run."""
    settings = TASKS[result["task"]]
    at = reached(result["steps"], result["rewards"], settings.window, settings.level)
    return {
        "tokens": tokens_per_second(result["steps"]),
        "step": step_seconds(result["steps"]),
        "level": seconds_to(curve(result["rewards"], settings.window), settings.level),
        "level_steps": None if at is None else at.steps,
        "level_tokens": None if at is None else at.tokens,
        "startup": result["startup"],
        "steps": float(len(result["steps"])),
    }


def brief(result: dict[str, Any]) -> str:
    """Return one line of text about one run."""
    found = measures(result)
    points = curve(result["rewards"], TASKS[result["task"]].window) or [(0.0, 0.0)]
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in result["phases"].items())
    told = ", ".join(f"{name} {value and round(value, 3)}" for name, value in found.items())
    return f"{told}; reward {points[0][1]:.3f} -> {points[-1][1]:.3f}; a step: {phases}; {result['notes']}"


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Return Markdown tables for each task: the figures of each arm, and ours over each of TRL's arms."""
    return "\n\n".join(
        block
        for task in TASKS
        if (of_task := [r for r in results if r["task"] == task])
        for block in (_arms_table(task, of_task), _level_table(task, of_task), _ratio_table(task, of_task))
        if block
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


def _level_table(task: str, results: Sequence[dict[str, Any]]) -> str:
    """Return what each arm needed to the level, and TRL's over ours; "" with fewer than three seeds.

    A ratio is the geometric mean over the seeds that both arms have.
    """
    seeds = {r["seed"] for r in results}
    if len(seeds) < 3:
        return ""
    level = TASKS[task].level
    kinds = {"level_steps": "steps", "level": "seconds", "level_tokens": "trained tokens"}
    arms = (*_present(results, ours=False), *_present(results, ours=True))
    values = {(arm, what): _by_seed(results, arm, what) for arm in arms for what in kinds}
    rows = [
        f"**{task}: to reward {level:g}** (mean and 95 % interval of the mean over seeds)",
        "",
        f"| | {' | '.join(kinds.values())} | reached |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    for arm in arms:
        known = [[v for v in values[arm, what] if v is not None] for what in kinds]
        cells = [_interval(of) if of else "-" for of in known]
        count = sum(r["arm"] == arm for r in results)
        rows.append(f"| {arm} | {' | '.join(cells)} | {len(known[0])} of {count} |")
    for peer in _present(results, ours=False):
        for arm in _present(results, ours=True):
            ratios = [ratio(values[peer, what], values[arm, what]) for what in kinds]
            cells = [_interval([math.log(v) for v in of], exp=True) if of else "-" for of in ratios]
            rows.append(f"| {peer} over {arm} | {' | '.join(cells)} | {len(ratios[0])} of {len(seeds)} |")
    return "\n".join(rows)


def _interval(values: Sequence[float], *, exp: bool = False) -> str:
    """Return a mean and its interval as text; with ``exp`` those of values that are logarithms."""
    found = [math.exp(v) if exp else v for v in mean_interval(values)]
    digits = 2 if exp else 1 if found[0] < 1000 else 0
    mean, low, high = (f"{v:,.{digits}f}" for v in found)
    return mean if len(values) < 2 else f"{mean} [{low}, {high}]"


def _ratio_table(task: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the table of our arms over TRL's arms, or "" if one side has no runs."""
    peers, ours = _present(results, ours=False), _present(results, ours=True)
    if not peers or not ours:
        return ""
    rows = [
        f"**{task}: ours over TRL's** (tokens/s; time to the reward; per seed, then median)",
        "",
        "| | " + " | ".join(f"over {peer}" for peer in peers) + " |",
        "|---" * (len(peers) + 1) + "|",
    ]
    for arm in ours:
        cells = []
        for peer in peers:
            speed = ratio(_by_seed(results, arm, "tokens"), _by_seed(results, peer, "tokens"))
            time_ = ratio(_by_seed(results, peer, "level"), _by_seed(results, arm, "level"))
            cells.append(f"{spread(speed)}; {spread(time_)}")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


ENOUGH_SEEDS = 5
"""Seeds of which the time to a reward is a headline."""


def headlines(results: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the ratios of each of our arms over the fastest of TRL's arms: trained tokens/s, and speed to the level.

    The second one needs `ENOUGH_SEEDS`, because first successes decide it.
    """
    rows = []
    for task in TASKS:
        of_task = [r for r in results if r["task"] == task]
        speeds = {peer: _by_seed(of_task, peer, "tokens") for peer in _present(of_task, ours=False)}
        if not speeds:
            continue
        fastest = max(speeds, key=lambda peer: statistics.median(s for s in speeds[peer] if s is not None))
        for arm in _present(of_task, ours=True):
            over = spread(ratio(_by_seed(of_task, arm, "tokens"), speeds[fastest]))
            peer = f"TRL, arm `{fastest}`"
            rows.append((f"trained tokens/s, task `{task}`, arm `{arm}`", peer, over))
            times = ratio(_by_seed(of_task, fastest, "level"), _by_seed(of_task, arm, "level"))
            if len(times) >= ENOUGH_SEEDS:
                told = (
                    f"speed to reward {TASKS[task].level:g}, task `{task}`, arm `{arm}`, {len(times)} seeds"
                )
                rows.append((told, peer, _interval([math.log(t) for t in times], exp=True)))
    return rows


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the reward over wall time, with one panel per task, one colour per arm and one line per seed."""
    plt = pyplot()
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


ROOT = Path(__file__).parents[2]
GRACE_S = 300.0
"""Seconds that a run may take in addition to its steps, for example to start up."""
STOP_S = 30.0


def fingerprint(config: RunConfig, arm: str, steps: int, seconds: float) -> str:
    """Return a hash of all settings that a result depends on."""
    parts = [
        p.model_dump_json()
        for p in (config.model, config.env, config.generator, config.actor, config.learner)
    ]
    text = "".join([*parts, repr(ARMS[arm]), str(steps), str(seconds)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(task: str, arm: str, config: RunConfig, steps: int, seconds: float, cores: str) -> dict[str, Any]:
    """Make one run in its own process. Return its result.

    Raises:
        RuntimeError: the run failed. The message has the end of its log.
    """
    from launch.model import prepare

    model = str(prepare(config).resolve())
    with tempfile.TemporaryDirectory() as folder:
        spec, out, log = (Path(folder) / name for name in ("spec.json", "out.json", "log"))
        threads = ARMS[arm].threads
        limits = TASKS[task]
        level = limits.level if limits.ends_at_level else None
        made = Spec(
            arm, config.model_dump(mode="json"), model, folder, steps, seconds, threads, level, limits.window
        )
        made.write(spec)
        side = "ours" if ARMS[arm].ours else "peer"
        command = [sys.executable, "-m", f"benchmarks.versus_trl.{side}", str(spec), str(out)]
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
    """If a run has not ended, ask it to stop its processes (SIGTERM), then kill it."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def environment(threads: int) -> dict[str, str]:
    """Return environment variables that fix the number of threads, forbid downloads, and silence warnings."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    pinned = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return os.environ | quiet | pinned | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the runs that have no result yet, unless ``--table`` is given. Return all requested results."""
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
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="run nothing, print what there is")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
    results = run_all(args)
    sys.stdout.write(tables(results) + "\n")
    if args.json is not None:
        save_results(args.json, {"tasks": tables(results)}, results, headlines(results))
    if args.plot:
        plot(results, args.plot)
