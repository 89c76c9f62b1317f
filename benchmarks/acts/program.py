"""Keep recorded episodes of the shipped jobs, and measure on them whether the named parts of recipes act.

    python -m benchmarks.acts record NAME RUN --steps 10 35 60
    python -m benchmarks.acts measure [RECIPE ...]
    python -m benchmarks.acts page

`record` takes steps of a run of a job from its journal. The run has `learner.filter_uniform_groups = false`, so that
groups without a signal are there, too. A file that is named after a recipe serves this recipe alone. `measure` prints a
line for each part, and `page` writes the table of docs/recipes/README.md.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.acts.episodes import FOLDER, RecordedJob, job_of, record, save_job
from benchmarks.acts.measure import Acted, measure, wrong_called_right
from benchmarks.acts.parts import METHODS
from launch.run_file.load import load, run_files

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "README.md"
BEGIN, END = "<!-- acts: written by python -m benchmarks.acts page -->", "<!-- acts: end -->"


def measured(recipe: str) -> list[Acted]:
    """Return how each part of a recipe acts on the recorded episodes of its job."""
    config = load(run_files()[recipe])
    return measure(recipe, config.learner, job_of(recipe, config))


def verdict(parts: Sequence[Acted]) -> str:
    """Return whether all parts of a recipe act, some of them or none: "yes", "part" or "no"."""
    acting = sum(part.acts for part in parts)
    return "yes" if acting == len(parts) else "part" if acting else "no"


def table(found: Mapping[str, Sequence[Acted]]) -> str:
    """Return the table of the page, and the sum of its verdicts."""
    lines = ["| recipe | part | moves the step by | touches | acts |", "|---|---|---|---|---|"]
    for recipe, parts in found.items():
        for i, part in enumerate(parts):
            touched = "" if part.touched is None else "{} of {}".format(*part.touched)
            first = (f"`{recipe}`", verdict(parts)) if i == 0 else ("", "")
            lines.append(f"| {first[0]} | {part.part} | {percent(part.share)} | {touched} | {first[1]} |")
    verdicts = [verdict(parts) for parts in found.values()]
    sums = ", ".join(f"{verdicts.count(word)} {word}" for word in ("yes", "part", "no"))
    return "\n".join([*lines, "", f"Sum of {len(verdicts)} recipes: {sums}."])


def percent(share: float) -> str:
    """Return a share in words.

    Example:
        >>> percent(0.1234), percent(0.0012), percent(2.0)
        ('12 %', '0.1 %', '100 % or more')
    """
    if share >= 1:
        return "100 % or more"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def written(page: str, content: str) -> str:
    """Return the page with the generated part replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="keep steps of a run")
    recording.add_argument("name")
    recording.add_argument("run", type=Path)
    recording.add_argument("--steps", type=int, nargs="+", required=True)
    measuring = verbs.add_parser("measure", help="print how parts act")
    measuring.add_argument("recipes", nargs="*", default=[])
    verbs.add_parser("page", help="write the table of the page")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    match args.verb:
        case "record":
            with tempfile.TemporaryDirectory() as scratch:
                job: RecordedJob = record(args.run, args.steps, Path(scratch) / "out")
            nbytes = save_job(FOLDER / f"{args.name}.job", job)
            sys.stdout.write(f"{args.name}: {nbytes} bytes\n")
        case "measure":
            for name in args.recipes or METHODS:
                for acted in measured(name):
                    sys.stdout.write(
                        f"{name:20} {acted.part:34} {acted.share:.4f} {acted.touched or ''} {acted.rate:.2f}\n"
                    )
                if (wrong := wrong_called_right(name)) is not None:
                    sys.stdout.write(f"{name:20} wrong answers called right: {wrong[0]} of {wrong[1]}\n")
        case _:
            found = {name: measured(name) for name in METHODS}
            PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table(found)), encoding="utf-8")
