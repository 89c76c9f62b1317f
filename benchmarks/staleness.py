"""Measure the cost of staleness for each method: reward after equally many updates at an exact, forced lag.

    python -m benchmarks.staleness [--recipes grpo bapo ...] [--lags 0 1 ...] [--seeds 0 1 2] [--steps N]
                                   [--out FILE.jsonl] [--plot FILE.png] [--curves FOLDER] [--smoke]

The real system runs in lockstep: vLLM samples, DeepSpeed trains, and version s - lag samples the whole batch
of step s (`learner.forced_lag`). One broker, generator and actor serve all learners. The learners run one
after the other, each from the same first weights. Model, task, learning rate and number of updates are the
same for all of them. A recipe contributes only `[learner.algorithm]` and `[learner.replay]`. A recipe with a
critic trains on whole groups here too, because finished trajectories or windows that are trained as they come
cannot be held back by an exact number of versions.

Each finished run is one line of FILE.jsonl. The benchmark does not repeat it unless the recipe or the
benchmark's settings have changed since. Recipes are read once, before anything starts.
"""

import argparse
import hashlib
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.real_system import running, train
from benchmarks.report import pyplot, save_results
from launch.run_file.load import check, load
from launch.run_file.sections import RunConfig
from launch.supervise.summary import apart


def cells(results: Sequence[dict[str, Any]], recipe: str, lag: int) -> dict[int, float]:
    """Return the score of each seed."""
    return {r["seed"]: r["score"] for r in results if r["recipe"] == recipe and r["lag"] == lag}


PLAIN = "grpo"
"""The plain recipe, with which the others are compared."""
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red")
"""Colours of the named recipes beside `PLAIN`: the best ones first."""
LABEL_GAP = 0.045
"""Least distance of two names at the right edge, as a share of the axis."""


def named(results: Sequence[dict[str, Any]], recipes: Sequence[str], lag: int) -> list[str]:
    """Return the recipes that the picture names: the two best and the two worst at this lag, best first.

    Example:
        >>> rows = [{"recipe": r, "lag": 8, "seed": 0, "score": s} for r, s in zip("abcdef", (3, 1, 6, 2, 5, 4))]
        >>> named(rows, "abcdef", 8)
        ['c', 'e', 'd', 'b']
    """
    scores = {r: list(cells(results, r, lag).values()) for r in recipes if r != PLAIN}
    ranked = sorted((r for r in scores if scores[r]), key=lambda r: -statistics.median(scores[r]))
    return ranked if len(ranked) <= len(COLOURS) else [*ranked[:2], *ranked[-2:]]


def plot(results: Sequence[dict[str, Any]], recipes: Sequence[str], lags: Sequence[int], path: Path) -> None:
    """Plot the reward over the lag. Five lines have a name at their end; the other recipes are grey.

    The bands of the named lines reach from the least to the greatest reward over the seeds.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    colours = dict(zip(named(results, recipes, max(lags)), COLOURS, strict=False)) | {PLAIN: "black"}
    ends: list[tuple[float, str]] = []
    for recipe in recipes:
        points = [(lag, sorted(cells(results, recipe, lag).values())) for lag in lags]
        points = [(lag, values) for lag, values in points if values]
        if not points:
            continue
        x, y = [lag for lag, _ in points], [statistics.median(values) for _, values in points]
        if recipe not in colours:
            axes.plot(x, y, color="0.8", linewidth=1, zorder=1)
            continue
        axes.plot(x, y, color=colours[recipe], marker="o", markersize=4, linewidth=2, zorder=3)
        low, high = [values[0] for _, values in points], [values[-1] for _, values in points]
        axes.fill_between(x, low, high, color=colours[recipe], alpha=0.12, linewidth=0, zorder=2)
        ends.append((y[-1], recipe))
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(lags, [str(lag) for lag in lags])
    axes.set(xlabel="forced policy lag, versions", ylabel="reward after equally many updates", ylim=(0, 1.02))
    for (_, recipe), height in zip(ends, apart([end for end, _ in ends], LABEL_GAP), strict=True):
        label = f"{recipe} (plain)" if recipe == PLAIN else recipe
        axes.annotate(
            label,
            (1.015, height / 1.02),
            xycoords="axes fraction",
            color=colours[recipe],
            va="center",
            fontsize=9,
        )
    grey = sum(recipe not in colours for recipe in recipes)
    if grey:
        axes.set_title(f"in grey: the {grey} other recipes", fontsize=9, color="0.5", loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def curves(
    results: Sequence[dict[str, Any]], recipes: Sequence[str], lags: Sequence[int], folder: Path
) -> None:
    """Plot for each recipe the mean return of each version's batch: a line per lag, the median over seeds."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    colours = plt.get_cmap("viridis")
    for recipe in recipes:
        figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
        for i, lag in enumerate(lags):
            runs = [r["curve"] for r in results if r["recipe"] == recipe and r["lag"] == lag]
            if runs:
                median = [statistics.median(values) for values in zip(*runs, strict=True)]
                colour = colours(0.9 * i / max(1, len(lags) - 1))
                axes.plot(range(len(median)), median, color=colour, label=f"lag {lag}", linewidth=1.3)
        axes.set(xlabel="version that sampled the batch", ylabel="mean return", ylim=(0, 1.02))
        axes.set_title(recipe, fontsize=10)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        figure.savefig(folder / f"{recipe}.png", dpi=100)
        plt.close(figure)


LAGS = (0, 1, 2, 4, 8, 16, 32)
RECIPES = (
    "uncorrected", "grpo", "ppo", "rloo", "cispo", "gspo", "decoupled-ppo", "minirl", "hispo", "bapo", "hapo", "tppo",
    "remix", "r2vpo", "gbpo", "lag-clip", "icepop", "ipa", "mdpo", "remax",
)  # fmt: skip
BASE: dict[str, Any] = {
    "run": {"name": "staleness", "dir": "build/staleness", "mode": "sync", "max_minutes": 600.0},
    "model": {
        "tiny": {
            "hidden_size": 64,
            "intermediate_size": 192,
            "layers": 2,
            "heads": 2,
            "head_dim": 32,
            "tie_embeddings": True,
            "warm_start": {"steps": 30, "demonstrations": 64, "batch": 16, "lr": 1e-3},
        },
        "cache": "build/models",
    },
    "env": {"name": "benchmarks/envs/letters.py:LetterSuite", "params": {"length": 32}},
    "generator": {"max_model_len": 64, "max_num_seqs": 64, "kv_cache_mb": 64, "stream_interval": 64},
    "actor": {"concurrent_episodes": 64, "segment_tokens": 64},
    "learner": {
        "steps": 80,
        "group_size": 8,
        "batch_trajectories": 32,
        "max_policy_lag": 0,
        "evaluation_tasks": 64,
        "filter_uniform_groups": False,
        "sampling": {"max_turn_tokens": 32, "max_trajectory_tokens": 48},
        "optimizer": {"lr": 1e-3, "max_grad_norm": 1.0},
    },
}


def base(steps: int, lr: float) -> RunConfig:
    """Return the settings that all runs share."""
    learner = BASE["learner"] | {"steps": steps, "optimizer": BASE["learner"]["optimizer"] | {"lr": lr}}
    return check(BASE | {"learner": learner}, "benchmarks/staleness.py")


def with_recipe(config: RunConfig, recipe: str, lag: int) -> RunConfig:
    """Return the settings with the recipe's objective and replay, and with the lag forced."""
    theirs = load(Path(recipe)).learner
    replay = theirs.replay
    # Replayed tokens are older by the forced lag.
    if replay is not None:
        replay = replay.model_copy(update={"max_policy_lag": replay.max_policy_lag + lag})
    changes = {"algorithm": theirs.algorithm, "replay": replay, "forced_lag": lag, "train_on": "groups"}
    return config.model_copy(update={"learner": config.learner.model_copy(update=changes)})


def fingerprint(config: RunConfig) -> str:
    """Return a hash of all settings that a result depends on. Results in one table have equal hashes."""
    parts = (config.model, config.env, config.generator, config.learner)
    text = "".join(part.model_dump_json() for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the runs that have no result yet. Return all requested results."""
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    config = base(args.steps, args.lr)
    chosen = {(r, lag): with_recipe(config, r, lag) for r in args.recipes for lag in args.lags}
    prints = {cell: fingerprint(settings) for cell, settings in chosen.items()}
    wanted = [(s, lag, r) for s in args.seeds for lag in args.lags for r in args.recipes]

    def asked(result: dict[str, Any]) -> bool:
        print_ = prints.get((result["recipe"], result["lag"]))
        return result["seed"] in args.seeds and print_ is not None and result.get("settings") == print_

    done = {(r["seed"], r["lag"], r["recipe"]) for r in known if asked(r)}
    missing = [cell for cell in wanted if cell not in done]
    if missing:
        with running(config) as system:
            for i, (seed, lag, recipe) in enumerate(missing):
                outcome = train(system, chosen[recipe, lag], seed)
                cell = {"recipe": recipe, "lag": lag, "seed": seed, "steps": args.steps, "lr": args.lr}
                result = cell | {"settings": prints[recipe, lag]} | asdict(outcome)
                with open(out, "a") as lines:
                    lines.write(json.dumps(result) + "\n")
                known.append(result)
                sys.stderr.write(
                    f"{time.strftime('%H:%M:%S')} {i + 1}/{len(missing)} {recipe} lag {lag} seed {seed}: "
                    f"{outcome.start:.3f} -> {outcome.score:.3f} in {outcome.seconds:.0f} s, exact {outcome.exact}\n"
                )
    return [result for result in known if asked(result)]


def shares(results: Sequence[dict[str, Any]], recipe: str, lag: int) -> list[float]:
    """Return the scores over the score at lag 0 with the same seed."""
    fresh = cells(results, recipe, 0)
    return [s / fresh[seed] for seed, s in cells(results, recipe, lag).items() if fresh.get(seed)]


def tables(results: Sequence[dict[str, Any]], recipes: Sequence[str], lags: Sequence[int]) -> str:
    """Return two Markdown tables, share of the lag-0 reward and reward, with median and spread over seeds."""
    rule = "|---" * (len(lags) + 1) + "|"
    head = "| recipe | " + " | ".join(f"lag {lag}" for lag in lags) + " |"
    blocks = []
    for title, values in (
        ("share of the reward at lag 0", shares),
        ("reward", lambda *key: list(cells(*key).values())),
    ):
        rows = []
        for recipe in recipes:
            row = [_cell(values(results, recipe, lag)) for lag in lags]
            if any(cell != "-" for cell in row):
                rows.append(f"| {recipe} | " + " | ".join(row) + " |")
        blocks.append(
            "\n".join([f"**{title}** (median, in brackets least and most over seeds)", "", head, rule, *rows])
        )
    return "\n\n".join(blocks)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" [{min(values):.2f}, {max(values):.2f}]" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--lags", type=int, nargs="+", default=list(LAGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=BASE["learner"]["steps"])
    parser.add_argument("--lr", type=float, default=BASE["learner"]["optimizer"]["lr"])
    parser.add_argument("--out", type=Path, default=Path("build/staleness.jsonl"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--curves", type=Path, help="folder for a picture of each recipe's learning curves")
    parser.add_argument("--smoke", action="store_true", help="two recipes, lags 0 and 2, six steps")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.recipes, args.lags, args.seeds, args.steps = ["grpo", "decoupled-ppo"], [0, 2], [0], 6
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(level=logging.WARNING)
    results = run_all(args)
    sys.stdout.write(tables(results, args.recipes, args.lags) + "\n")
    if args.json is not None:
        save_results(args.json, {"lags": tables(results, args.recipes, args.lags)}, results)
    if args.plot:
        plot(results, args.recipes, args.lags, args.plot)
    if args.curves:
        curves(results, args.recipes, args.lags, args.curves)
    if wrong := [r for r in results if not r["exact"]]:
        sys.exit(f"{len(wrong)} runs in which tokens did not lag as forced")


if __name__ == "__main__":
    main()
