"""Run a job for a few steps in every way that Offbeat has, and check what each run leaves behind.

    python -m benchmarks.every_way [RUN_FILE] [--cases NAME ...] [--steps N] [--set section.field=value ...]
                                   [--out FILE.jsonl] [--json FILE.json] [--only-finished]

The ways are all shipped methods, a second model as critic, ZeRO 0 to 3 with one and two ranks, bfloat16, adapters,
lockstep, kill -9 of each role, a resumption, and the written model in transformers and vLLM. Each is a run of the real
system. A case holds if the command ends with 0, each step was done once, tokens were trained with finite gradients,
not all of them zero, the last version was published, no episode failed, and nothing was restarted but what was killed.

Each finished case is one line of FILE.jsonl; it is not run again. With --only-finished nothing is run, and the table
says which cases were not measured. The exit status is 1 if a case does not hold.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.every_way.cases import Case, chosen
from benchmarks.every_way.running import run_case
from benchmarks.report import save_results

ROLES = ("learner", "generator", "actor", "broker")


def table(outcomes: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> str:
    """Return a Markdown table with one line per case.

    Args:
        outcomes: what was measured.
        names: all cases; those without an outcome stand at the end, as not measured.

    Example:
        >>> print(table([{"name": "bapo", "faults": ["exit 3"], "seconds": 9.0, "steps": 0, "trained_tokens": 0,
        ...     "gradient_norm": None, "lag_max": None, "restarts": 0, "memory_gib": {}}]).splitlines()[2])
        | bapo | **no: exit 3** | - | - | - | - | - / - / - / - | 9 |
    """
    lines = [
        "| case | holds | steps | tokens trained | gradient norm | restarts | GiB: "
        + " / ".join(ROLES)
        + " | seconds |",
        "|---" * 8 + "|",
    ]
    for o in outcomes:
        bad = bool(o["faults"])
        norm = "-" if o["gradient_norm"] is None else f"{o['gradient_norm']:.3g}"
        memory = " / ".join(f"{o['memory_gib'][r]:.1f}" if r in o["memory_gib"] else "-" for r in ROLES)
        holds = f"**no: {'; '.join(o['faults'])}**".replace("|", "/") if bad else "yes"
        steps, tokens, restarts = (
            "-" if bad and not o["steps"] else f"{o[key]:,}"
            for key in ("steps", "trained_tokens", "restarts")
        )
        lines.append(
            f"| {o['name']} | {holds} | {steps} | {tokens} | {norm} | {restarts} | {memory} | {o['seconds']:.0f} |"
        )
    done = {o["name"] for o in outcomes}
    lines += [f"| {name} | not measured" + " | -" * 6 + " |" for name in names if name not in done]
    return "\n".join(lines)


def run_all(cases: dict[str, Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases that have no line in ``--out`` yet. Return all of them that have one now."""
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {o["name"]: o for o in known}
    for name, case in cases.items():
        if name not in done and not args.only_finished:
            with tempfile.TemporaryDirectory(dir=out.parent) as folder:
                case = replace(case, overrides=(*case.overrides, *args.set))
                run_file = case.run_file or args.run_file
                outcome = run_case(name, case, run_file, args.steps, Path(folder), args.limit_s)
            done[name] = outcome.as_dict()
            with open(out, "a") as lines:
                lines.write(json.dumps(done[name]) + "\n")
            sys.stderr.write(table([done[name]]).splitlines()[2] + "\n")
    return [done[name] for name in cases if name in done]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_file", nargs="?", default="smollm2")
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--set", nargs="+", default=[], metavar="section.field=value")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of a case, at most")
    parser.add_argument("--out", type=Path, default=Path("build/every_way.jsonl"))
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only-finished", action="store_true", help="show what FILE.jsonl holds, run nothing"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    cases = chosen(args.cases)
    outcomes = run_all(cases, args)
    shown = table(outcomes, list(cases))
    sys.stdout.write(shown + "\n")
    if args.json is not None:
        save_results(args.json, {"every_way": shown}, outcomes)
    sys.exit(any(o["faults"] for o in outcomes))
