"""The arguments of `offbeat plan`, in their own module because the command loads slow libraries."""

import argparse
from pathlib import Path

TEXT = (
    "predict throughput, policy lag and idle shares for numbers of generators and actors, from measured rates, on a "
    "virtual clock; see docs/run/capacity.md"
)


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat plan`."""
    plan = commands.add_parser("plan", help=TEXT.partition(", from")[0], description=TEXT)
    plan.add_argument("run_file", type=Path)
    plan.add_argument("overrides", nargs="*", metavar="section.field=value", help="of the run file")
    _add_rates(plan)
    plan.add_argument("--generators", nargs="+", type=int, metavar="N", help="default: generator.count")
    plan.add_argument("--actors", nargs="+", type=int, metavar="N", help="default: actor.count")
    plan.add_argument(
        "--episodes", nargs="+", type=int, metavar="N", help="per actor; default: actor.concurrent_episodes"
    )
    plan.add_argument("--steps", type=int, default=60, help="learner steps to simulate; default: 60")
    plan.add_argument(
        "--own-cores",
        action="store_true",
        help="every process has cores, or a GPU, of its own: none slows another down",
    )
    plan.add_argument(
        "--join-every",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="generators and actors join one after the other, so far apart",
    )
    plan.add_argument("--json", action="store_true", help="for programs")


def _add_rates(plan: argparse.ArgumentParser) -> None:
    """Add the arguments that say from where the rates come."""
    plan.add_argument(
        "--calibrate",
        type=float,
        metavar="SECONDS",
        help="first run the real system for so long, and write its rates; 30 is a good start",
    )
    plan.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="rates to read, or to write with --calibrate; default: NAME-rates.toml in the folder of run folders",
    )
    plan.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="section.field=value",
        help="in place of the file's, for example learner.seconds_per_token=1e-5; may be given several times",
    )
