"""Measure the staleness frontier: reward of each row over exact policy lag, in one process.

    python -m benchmarks.frontier measure [--tasks T ...] [--rows R ...] [--lags L ...] [--stage S]
    python -m benchmarks.frontier cell TASK ROW --lag L [--seed S] [--rate R]
    python -m benchmarks.frontier results [--json FILE] [--plot FILE]
    python -m benchmarks.frontier agree

`measure` runs the cells that neither the published results nor the file OUT have yet, and adds a line of JSON for each
to OUT, until its deadline. A cell is measured again if its settings have changed since. `cell` runs one cell again and
prints it beside the published one. `results` writes the tables and the figure, and `agree` runs cells through the roles
of a real run, for comparison.
"""

import argparse
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec

from benchmarks.frontier import cells, tables
from benchmarks.frontier.cells import TASKS, Cell, Found, config_of, rows, settings_of
from benchmarks.report import commit

OUT = Path("build/frontier.jsonl")
JSON = Path("benchmarks/results/frontier.json")


def measure(cell: Cell, *, probes: bool = True) -> Found:
    """Run one cell. A run that diverges is a result, too."""
    from benchmarks.frontier.loop import run_cell
    from envs.registry import make_suite
    from launch.model import prepare
    from learner.errors import Diverged

    started = time.monotonic()
    config = config_of(cell)
    about = {
        **{name: getattr(cell, name) for name in ("task", "row", "lag", "seed", "rate", "steps", "again")},
        "settings": settings_of(cell),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    model = prepare(config)
    suite = make_suite(config.env.name, config.env.params)
    own = cells.OWN.get(cell.row)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = run_cell(
                config.learner,
                suite,
                model,
                seed=cell.seed,
                again=cell.again,
                folder=Path(folder),
                probes=probes,
                also_after=cell.checked_at,
                rate_by_lag=0.0 if own is None else own.rate_by_lag,
                fresh_groups=0 if own is None else own.fresh_groups,
            )
        except Diverged as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            return Found(**about, score=None, error=why, seconds=time.monotonic() - started)
    return Found(
        **about,
        **{name: getattr(result, name) for name in result.__dataclass_fields__},
        seconds=round(time.monotonic() - started, 1),
    )


def known(path: Path) -> list[Found]:
    """Return the results in a file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=Found, strict=False) for line in lines]


def finished(args: argparse.Namespace) -> list[Found]:
    """Return the published results, and those of the file of this measurement behind them."""
    return [*tables.published(args.json).cells, *known(args.out)]


def missing(
    plan: Callable[[Sequence[Found]], Iterator[Cell]],
    found: Sequence[Found],
    prints: dict[Cell, str],
    *,
    along: bool = False,
) -> Cell | None:
    """Return the first cell of a plan that has no result with its present settings; None: all have one.

    Args:
        prints: hashes of settings that are known, which this adds to.
        along: whether a result counts only if its batches were looked at along the run. Early results were not.
    """
    done = {(f.cell, f.settings) for f in found if not along or f.course or f.error}
    for cell in plan(found):
        if cell not in prints:
            prints[cell] = settings_of(cell)
        if (cell, prints[cell]) not in done and (along or not begun_by(cell, found)):
            return cell
    return None


def begun_by(cell: Cell, found: Sequence[Found]) -> bool:
    """Return whether a longer run has begun with this one, and was scored after as many steps."""
    return any(
        cell.steps in f.scores
        and replace(f.cell, steps=cell.steps) == cell
        and f.settings == settings_of(f.cell)
        for f in found
    )


def plan_of(args: argparse.Namespace) -> Callable[[Sequence[Found]], Iterator[Cell]]:
    """Return the function that yields the wanted cells, in the order in which they are run."""

    def plan(found: Sequence[Found]) -> Iterator[Cell]:
        yield from (cell for cell in staged(found) if not args.lags or cell.lag in args.lags)

    def staged(found: Sequence[Found]) -> Iterator[Cell]:
        match args.stage:
            case "first":
                for task in args.tasks:
                    yield from cells.first_stage(found, task, args.rows or rows())
            case "second":
                for task in args.tasks:
                    yield from cells.second_stage(found, task, args.rows or cells.best_rows(found, task))
            case "rates":
                for task in args.tasks:
                    yield from cells.equal_rates(task, args.rows or cells.best_rows(found, task))
            case "why":
                tasks = [task for task in cells.WHY_TASKS if task in args.tasks]
                yield from cells.why(tasks, args.rows or cells.WHY_ROWS)
            case _:
                yield from chain.from_iterable(cells.repeated(found, task) for task in args.tasks)

    return plan


def measure_all(args: argparse.Namespace) -> None:
    """Run what is missing, until the deadline."""
    deadline = time.monotonic() + 60 * args.minutes
    found, prints = finished(args), dict[Cell, str]()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # What is loaded stays loaded: an engine's release collects garbage, and need not look at modules.
    gc.freeze()
    while time.monotonic() < deadline:
        cell = missing(plan_of(args), found, prints, along=args.stage == "why")
        if cell is None:
            sys.stderr.write("nothing is missing\n")
            return
        # The sweep only has to choose a rate.
        result = measure(cell, probes=cell.seed != cells.SWEEP_SEED)
        with open(args.out, "ab") as lines:
            lines.write(msgspec.json.encode(result) + b"\n")
        found.append(result)
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {shown(result)}\n")
    sys.stderr.write("the deadline has passed; call again to go on\n")


def shown(f: Found) -> str:
    """Return a result in one line."""
    what = f"{f.task} {f.row} lag {f.lag} seed {f.seed} rate {f.rate:g} steps {f.steps}{' again' if f.again else ''}"
    if f.score is None:
        return f"{what}: {f.error}"
    return f"{what}: {f.start:.3f} -> {f.score:.3f} in {f.seconds:.0f} s, exact lag {f.exact}"


def run_one(args: argparse.Namespace) -> None:
    """Run one cell, and print it beside the published one."""
    published = tables.published(args.json).cells
    rate = args.rate
    if rate is None:
        rate = cells.chosen_rate(published, args.task, args.row)
    steps = args.steps or max(cells.LEAST_STEPS, 4 * args.lag)
    cell = Cell(args.task, args.row, args.lag, args.seed, 1.0 if rate is None else rate, steps)
    sys.stdout.write(f"{shown(measure(cell, probes=False))}\n")
    same = [f for f in published if f.cell == cell]
    sys.stdout.write(f"published: {shown(same[-1]) if same else 'no such cell'}\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="run the cells that are missing")
    measuring.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    measuring.add_argument("--rows", nargs="+", help="absent: all; in the second stage the best ones")
    measuring.add_argument("--stage", choices=("first", "second", "rates", "why", "floor"), default="first")
    measuring.add_argument("--lags", nargs="+", type=int, help="absent: all of the stage")
    measuring.add_argument("--minutes", type=float, default=60.0)
    measuring.add_argument("--out", type=Path, default=OUT)
    measuring.add_argument(
        "--json", type=Path, default=JSON, help="published results, which are not run again"
    )
    one = verbs.add_parser("cell", help="run one cell again")
    one.add_argument("task", choices=list(TASKS))
    one.add_argument("row")
    one.add_argument("--lag", type=int, required=True)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--rate", type=float, help="absent: the rate that the published sweep has chosen")
    one.add_argument("--steps", type=int, help="absent: those of the published cell")
    one.add_argument("--json", type=Path, default=JSON)
    results = verbs.add_parser("results", help="write tables and figure")
    results.add_argument("--out", type=Path, default=OUT)
    results.add_argument("--agreement", type=Path, default=OUT.with_name("frontier-agreement.jsonl"))
    results.add_argument("--json", type=Path, default=JSON)
    results.add_argument("--plot", type=Path)
    agreeing = verbs.add_parser("agree", help="run cells through the roles of a real run")
    agreeing.add_argument("--out", type=Path, default=OUT.with_name("frontier-agreement.jsonl"))
    agreeing.add_argument("--minutes", type=float, default=20.0)
    agreeing.add_argument("--cells", type=int, help="only so many cells")
    agreeing.add_argument("--steps", type=int, help="absent: those of the frontier")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(level=logging.ERROR)
    match args.verb:
        case "measure":
            measure_all(args)
        case "cell":
            run_one(args)
        case "results":
            tables.write(finished(args), args)
        case _:
            from benchmarks.frontier.agreement import agree

            agree(args)
