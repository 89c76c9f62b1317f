"""Compare the trained tokens per second of a learner step with a bare PyTorch loop with the same passes.

    python -m benchmarks.learner [--sizes 1M 10M 50M 135M] [--lengths uniform ...] [--rounds 9] [--json FILE]

A step is `TrainingEngine.update`: credit assignment, batching, a proximal pass where needed, objective,
DeepSpeed, metrics. `benchmarks.learner.arms.BareLoop` describes the bare loop. Both sides use one thread on
one core. They take turns, the side that begins alternates, and the first round is a warm-up. The bare loop
computes each trajectory in a row of its own. In the arms "one prompt" and "three turns" the members of a group
begin with the same tokens, which the learner computes once.

Each round gives a ratio of wall times and a ratio of CPU times. The table has their medians, with minimum and
maximum in brackets. Its last column is the ratio of the lowest CPU times of both sides, which other work on
the machine disturbs least. `--profile FOLDER` instead writes profiles that show where the learner's time
goes.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.learner.arms import LEARNING_RATE, SHARED, SIZES, BareLoop, make_model, make_trajectories
from benchmarks.report import save_results
from learner.advantages import assign_credit
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory
from learner.update.batch import Batch, make_batch
from learner.update.engine import TrainingEngine
from learner.update.micro_batches import MicroBatch, make_micro_batches
from learner.update.rows import deal_mini_batches

LENGTHS = ("uniform", "long-tailed")
"""Lengths of the arms that run unless `--lengths` says otherwise; nothing is shared in them."""
SEED = 0


class Time(NamedTuple):
    """Wall and CPU seconds of one update."""

    wall: float
    cpu: float


def timed(update: Callable[[], object]) -> Time:
    """Run an update once and return its time."""
    wall, cpu = time.perf_counter(), time.process_time()
    update()
    return Time(time.perf_counter() - wall, time.process_time() - cpu)


def plan(batch: Batch, config: LearnerConfig) -> list[list[MicroBatch]]:
    """Return the micro-batches of the learner's first update, grouped by optimizer step."""
    return [
        make_micro_batches(
            batch,
            members,
            aggregation=config.algorithm.aggregation,
            budget=config.micro_batch_tokens,
        )
        for members in deal_mini_batches(len(batch.lengths), config.algorithm.updates_per_batch, [SEED, 0, 0])
    ]


def learner_config(updates: int, zero_stage: int | str = "auto") -> LearnerConfig:
    """Return settings under which the learner takes the steps of `BareLoop`."""
    return LearnerConfig.model_validate(
        {
            "zero_stage": zero_stage,
            "algorithm": {"updates_per_batch": updates},
            "optimizer": {"lr": LEARNING_RATE},
        }
    )


class Arm:
    """Both sides of one row of the table."""

    def __init__(self, folder: Path, size: str, lengths: str, updates: int, zero_stage: int | str) -> None:
        self.parameters = make_model(folder, SIZES[size])
        self.config = learner_config(updates, zero_stage)
        self.trajectories: list[Trajectory] = make_trajectories(lengths, SIZES[size])
        self.engine = TrainingEngine(self.config, model=str(folder), total_steps=1000, seed=SEED)
        credit = assign_credit(self.config.algorithm, self.trajectories)
        self.batch = make_batch(self.trajectories, credit, current_version=0, max_policy_lag=0)
        self.mini_batches = plan(self.batch, self.config)
        self.bare = BareLoop(folder, self.mini_batches)

    def ours(self) -> None:
        """Run one step of the learner."""
        report = self.engine.update(self.trajectories, current_version=0)
        assert report.applied

    def rounds(self, count: int) -> list[tuple[Time, Time]]:
        """Run both sides in turns. Return the times (ours, bare) of each round."""
        found = []
        for i in range(count + 1):
            if i % 2:
                theirs, mine = timed(self.bare.update), timed(self.ours)
            else:
                mine, theirs = timed(self.ours), timed(self.bare.update)
            found.append((mine, theirs))
        # The first round is a warm-up.
        return found[1:]


def measure(size: str, lengths: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one row of the table."""
    with tempfile.TemporaryDirectory() as name:
        arm = Arm(Path(name), size, lengths, arguments.updates, arguments.zero_stage)
        found = arm.rounds(arguments.rounds)
        arm.engine.close()
    micro_batches = [m for part in arm.mini_batches for m in part]
    trained = int(arm.batch.trained.sum())
    filled, computed = sum(m.filled for m in micro_batches), sum(m.token_ids.size for m in micro_batches)
    return {
        "size": size,
        "lengths": lengths,
        "parameters": arm.parameters,
        "zero_stage": arguments.zero_stage,
        "optimizer_steps": arguments.updates,
        "trajectories": len(arm.trajectories),
        "trained_tokens": trained,
        "computed_tokens": computed,
        "padded_tokens": computed - filled,
        "padding_fraction": round(1 - filled / computed, 4),
        "micro_batches": len(micro_batches),
        "tokens_per_second": spread([trained / mine.wall for mine, _ in found]),
        "bare_tokens_per_second": spread([trained / bare.wall for _, bare in found]),
        "ratio_wall": spread([bare.wall / mine.wall for mine, bare in found]),
        "ratio_cpu": spread([bare.cpu / mine.cpu for mine, bare in found]),
        "ratio_best_cpu": round(min(bare.cpu for _, bare in found) / min(mine.cpu for mine, _ in found), 4),
        "rounds": [{"ours": mine._asdict(), "bare": bare._asdict()} for mine, bare in found],
    }


def _stage(text: str) -> int | str:
    return text if text == "auto" else int(text)


def spread(values: list[float]) -> list[float]:
    """Return the median, minimum and maximum."""
    return [round(float(f(values)), 4) for f in (statistics.median, min, max)]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| parameters | lengths | trained | computed | of it padding | trained tokens/s, ours | bare "
        "| speed over bare, wall | CPU | CPU, best of each |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        wall, cpu = (
            f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in (row["ratio_wall"], row["ratio_cpu"])
        )
        steps = f", {row['optimizer_steps']} optimizer steps" if row["optimizer_steps"] > 1 else ""
        lines.append(
            f"| {row['parameters'] / 1e6:.1f} M | {row['lengths']}{steps} | {row['trained_tokens']:,} "
            f"| {row['computed_tokens']:,} | {row['padded_tokens']:,} ({row['padding_fraction']:.1%}) "
            f"| {row['tokens_per_second'][0]:,.0f} | {row['bare_tokens_per_second'][0]:,.0f} | {wall} | {cpu} "
            f"| {row['ratio_best_cpu']:.2f} |"
        )
    return "\n".join(lines)


def headline(rows: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return the range of the arms' median ratios, for the README."""
    ratios = [row["ratio_wall"][0] for row in rows]
    sizes = [row["parameters"] / 1e6 for row in rows]
    span = " to ".join(dict.fromkeys(f"{size:.0f}" for size in (min(sizes), max(sizes))))
    shared = ", rows that share tokens" if all(row["lengths"] in SHARED for row in rows) else ""
    what = f"trained tokens/s of a learner step, {span} M parameters{shared}"
    return what, "a bare PyTorch loop", f"{min(ratios):.2f} to {max(ratios):.2f}"


def pin() -> None:
    """Limit this process to one thread on one core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M", "50M"])
    parser.add_argument("--lengths", nargs="+", choices=[*LENGTHS, *SHARED], default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps on a batch")
    parser.add_argument("--zero-stage", type=_stage, default="auto", help="auto (as it is), 0, 1, 2 or 3")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="write a flame graph and tables there")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    pin()
    if arguments.profile is not None:
        profile(arguments)
        return
    rows = []
    for size in arguments.sizes:
        for lengths in arguments.lengths:
            rows.append(measure(size, lengths, arguments))
            logging.info("%s", {name: value for name, value in rows[-1].items() if name != "rounds"})
    if arguments.json is not None:
        found = {"torch": torch.__version__, "rows": rows}
        save_results(arguments.json, {"arms": table(rows)}, found, [headline(rows)])
    sys.stdout.write(table(rows) + "\n")


def profile(arguments: argparse.Namespace) -> None:
    """Write, for each row of the table, profiles of the learner's step."""
    from benchmarks.learner.profile import write_profile

    for size in arguments.sizes:
        for lengths in arguments.lengths:
            with tempfile.TemporaryDirectory() as name:
                arm = Arm(Path(name), size, lengths, arguments.updates, arguments.zero_stage)
                arm.ours()
                write_profile(arm.ours, arguments.rounds, arguments.profile / f"{size}-{lengths}")
                arm.engine.close()
