"""`offbeat plan`: predicts what a run would do with other numbers of generators and actors."""

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from launch.plan.observations import last_run, rates_data, steps_of
from launch.plan.parts import Setting
from launch.plan.rates import (
    SETTING,
    UNMEASURED_SEGMENTS,
    Measured,
    MeasuredRates,
    check_overrides,
    format_rates,
    load_rates,
    rates_from,
)
from launch.plan.simulation import Prediction, sample_of, setting_of, simulate
from launch.run_file.sections import RunConfig
from launch.run_folder import saved_settings
from learner.run_files import METRICS

COMPARED = {
    "trained_tokens_per_second": "trained tokens/s",
    "steps_per_second": "steps/s",
    "lag_mean_versions": "mean lag",
    "learner_idle_share": "learner idle",
    "generator_idle_share": "generator idle",
}
FROM_METRICS = (
    "the rates are means of an earlier run, in which all roles shared this machine; --calibrate 30 measures more "
    "exactly, and what happens with other numbers of sequences"
)
MOST_SETTINGS = 200
LEAST_SECONDS, MOST_SECONDS = 5.0, 3600.0


def plan(args: argparse.Namespace, config: RunConfig) -> int:
    """Predict all settings and print the result. Return the exit code.

    Raises:
        ConfigError: an argument, the run file or a rate is wrong; the text has place, value and cure.
    """
    if not config.learner.units_per_batch:
        raise ConfigError(
            "learner.given.share is 1, so no generator and no actor has work to plan; a step takes as long as "
            "learner/step_seconds of a run says"
        )
    settings = list(grid(args, config))
    check_overrides(args.rate)
    path = args.rates or config.run.dir / f"{config.run.name}-rates.toml"
    if args.calibrate is not None:
        calibrate_to(path, args.calibrate, config)
    found = None if args.rates or path.exists() else last_run(config.run.dir, config.run.name)
    if found is None:
        rates, notes = load_rates(path, args.rate), []
    else:
        path = found / METRICS
        rates, notes = rates_of_run(found, config, args.rate), [FROM_METRICS]
    rows = [(setting, simulate(rates, setting)) for setting in settings]
    notes += warnings(rates, settings)
    notes += crowds(rates, rows)
    checked = check(rates, settings[0]) if rates.measured else None
    if args.json:
        sys.stdout.write(json.dumps(as_json(path, rates.measured, rows, checked, notes), indent=1) + "\n")
    else:
        show(path, rows, rates.measured, checked, notes)
    return 0


def rates_of_run(folder: Path, config: RunConfig, overrides: Sequence[str]) -> MeasuredRates:
    """Return the rates that the metrics of a run show.

    Raises:
        ConfigError: an override is wrong.
    """
    generators = int(saved_settings(folder).get("generator", {}).get("count", config.generator.count))
    if not generators:
        raise ConfigError(
            f"{folder}: its generators were on other hosts (generator.count = 0), so their rates are not in its "
            "metrics; measure them with --calibrate 30 generator.count=1"
        )
    data = rates_data(
        steps_of(folder),
        generators=generators,
        members=config.learner.fresh_trajectories,
    )
    # More processes than cores slow each other down further than in that run.
    data["sharing"] = {"cores": len(os.sched_getaffinity(0))}
    return rates_from(data, overrides, str(folder / METRICS))


def calibrate_to(path: Path, seconds: float, config: RunConfig) -> None:
    """Measure rates and write them to a file.

    Raises:
        ConfigError: the seconds are out of range, the file cannot be written, or model and environment cannot
            be used; nothing was started then.
    """
    from launch.plan.calibration import calibrate
    from launch.preflight.examine import examine
    from launch.supervise.panel import Panel

    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ConfigError(
            f"--calibrate {seconds:g}: give {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds; 30 is a good start"
        )
    for field, count in (
        ("generator.count", config.generator.count),
        ("actor.count", config.actor.count),
    ):
        if not count:
            raise ConfigError(f"--calibrate: {field} is 0, and all roles are measured here; add {field}=1")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--rates {path}: cannot be written ({error.strerror}); name another file"
        ) from None
    config = examine(config).config
    # Standard output is reserved for the plan, so progress goes to standard error.
    with contextlib.redirect_stdout(sys.stderr), Panel() as panel:
        rates = calibrate(config, seconds, panel)
    heading = ["Rates for `offbeat plan`, measured by --calibrate; docs/run/capacity.md explains the fields."]
    path.write_text(format_rates(rates, heading), encoding="utf-8")


def grid(args: argparse.Namespace, config: RunConfig) -> Iterator[Setting]:
    """Yield the settings that are asked for: each combination of generators, actors and episodes.

    Raises:
        ConfigError: a number is not above 0; there are too many settings.
    """
    base = replace(
        setting_of(config),
        steps=above_0("--steps", args.steps),
        shared=not args.own_cores,
        join_every_s=args.join_every,
    )
    if not 0 <= args.join_every < math.inf:
        raise ConfigError(f"--join-every {args.join_every:g}: seconds, 0 or more")
    generators = numbers("--generators", args.generators, base.generators)
    actors = numbers("--actors", args.actors, base.actors)
    episodes = numbers("--episodes", args.episodes, base.concurrent_episodes)
    if (count := len(generators) * len(actors) * len(episodes)) > MOST_SETTINGS:
        raise ConfigError(
            f"{count} settings are asked for, at most {MOST_SETTINGS} are planned; leave some out"
        )
    for g, a, e in itertools.product(generators, actors, episodes):
        yield replace(base, generators=g, actors=a, concurrent_episodes=e)


def numbers(option: str, given: Sequence[int] | None, default: int) -> list[int]:
    """Return the numbers that an option gives, each once, or its default.

    Example:
        >>> numbers("--actors", [1, 2, 2], 3), numbers("--actors", None, 3)
        ([1, 2], [3])
    """
    return [above_0(option, n) for n in dict.fromkeys(given or [default])]


def above_0(option: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{option} {value}: give a number of at least 1")
    return value


def check(rates: MeasuredRates, planned: Setting) -> Prediction:
    """Predict the run in which the rates were measured."""
    measured = rates.measured
    assert measured is not None
    known = {name: value for name in SETTING if (value := getattr(measured, name)) is not None}
    sync = measured.mode == "sync" if measured.mode else planned.sync
    return simulate(rates, replace(planned, sync=sync, shared=True, join_every_s=0.0, **known))


def warnings(rates: MeasuredRates, settings: Sequence[Setting]) -> Iterator[str]:
    """Yield a warning wherever the prediction goes beyond what was measured."""
    most = max(point.sequences for point in rates.generator.decode)
    asked = max(min(s.max_num_seqs, -(-s.actors * s.concurrent_episodes // s.generators)) for s in settings)
    if asked > most:
        yield (
            f"up to {asked} sequences may run in one generator, measured were {most:g}: beyond that its rate is taken "
            "as constant"
        )
    mode = "sync" if settings[0].sync else "async"
    if rates.measured and rates.measured.mode not in ("", mode):
        yield (
            f"the rates were measured with run.mode = {rates.measured.mode!r}: how much learner and generators slow "
            "each other down may be another now"
        )


def crowds(rates: MeasuredRates, rows: Sequence[tuple[Setting, Prediction]]) -> Iterator[str]:
    """Yield which plans were simulated as a sample of equal generators, and where a broker is full."""
    for setting, outcome in rows:
        small = sample_of(rates, setting)
        if small is not setting:
            yield (
                f"{setting.generators:,} generators are simulated as {small.generators} that stand for "
                f"{small.stands_for:,.0f} each"
            )
        if outcome.brokers > 1:
            limit = rates.broker.segments_per_second
            known = "not measured here" if limit == UNMEASURED_SEGMENTS else "as the rates say"
            sent = f"{setting.generators:,} generators send {outcome.segments_per_second:,.0f} segments/s"
            yield (
                f"{sent}, and a broker takes {limit:,.0f} ({known}): that needs {outcome.brokers} brokers, and a run "
                "has one; longer turns make fewer segments"
            )


# --- output -------------------------------------------------------------------------------------------------


def show(
    path: Path,
    rows: Sequence[tuple[Setting, Prediction]],
    measured: Measured | None,
    checked: Prediction | None,
    notes: Sequence[str],
) -> None:
    """Print the tables on the terminal."""
    first = rows[0][0]
    lines = [f"rates: {path}; mode {'sync' if first.sync else 'async'}; cores "
             f"{'shared as in the calibration' if first.shared else 'of its own for every process'}", ""]  # fmt: skip
    lines += table([HEAD, *(row(setting, outcome) for setting, outcome in rows)])
    if measured is not None and checked is not None:
        lines += [
            "",
            f"the run that was measured ({measured.run}; {measured.seconds:.0f} s, {measured.steps} steps)",
            "",
        ]
        lines += table([("", "measured", "predicted", "predicted / measured"), *compared(measured, checked)])
    lines += ["", *(f"note: {note}" for note in notes)] if notes else []
    sys.stdout.write("\n".join(lines) + "\n")


HEAD = (
    "generators", "actors", "episodes", "trained tok/s", "sampled tok/s", "steps/s", "lag mean", "p95",
    "too stale", "learner idle", "generator idle", "sequences", "first step",
)  # fmt: skip


def row(setting: Setting, outcome: Prediction) -> tuple[str, ...]:
    """Return a line of the table."""
    return (
        str(setting.generators),
        str(setting.actors),
        str(setting.actors * setting.concurrent_episodes),
        f"{outcome.trained_tokens_per_second:,.0f}",
        f"{outcome.sampled_tokens_per_second:,.0f}",
        f"{outcome.steps_per_second:.3g}",
        f"{outcome.lag_mean_versions:.2f}",
        str(outcome.lag_p95_versions),
        f"{outcome.stale_share:.1%}",
        f"{outcome.learner_idle_share:.0%}",
        f"{outcome.generator_idle_share:.0%}",
        f"{outcome.running_mean:.0f}",
        f"{outcome.first_step_seconds:.1f} s",
    )


def compared(measured: Measured, predicted: Prediction) -> Iterator[tuple[str, ...]]:
    """Yield lines that compare measured and predicted values: shares by difference, others by ratio."""
    for name, title in COMPARED.items():
        was, would = getattr(measured, name), getattr(predicted, name)
        if name.endswith("_share"):
            yield title, f"{was:.1%}", f"{would:.1%}", f"{100 * (would - was):+.1f} points"
        else:
            yield title, f"{was:.4g}", f"{would:.4g}", f"{would / was:.2f}" if was else "-"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, its columns aligned to the right except the first.

    Example:
        >>> table([("a", "bb"), ("cc", "d")])
        ['a   bb', 'cc   d']
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    padded = [[cell.ljust(widths[0]) for cell in columns[0]]]
    padded += [
        [cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)
    ]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def as_json(
    path: Path,
    measured: Measured | None,
    rows: Sequence[tuple[Setting, Prediction]],
    checked: Prediction | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the content of the tables for programs."""
    return {
        "rates": str(path),
        "settings": [{**asdict(setting), **asdict(outcome)} for setting, outcome in rows],
        "measured_run": measured.model_dump() if measured else None,
        "measured_run_predicted": asdict(checked) if checked else None,
        "notes": list(notes),
    }
