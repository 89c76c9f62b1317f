"""Arguments of `offbeat envs`, apart from its code, so that the command line starts without it."""

import argparse
from pathlib import Path

LISTEN = "127.0.0.1:5760"


def add_envs(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", run_file: str, overrides: str
) -> None:
    """Add the arguments of `offbeat envs`.

    Args:
        run_file, overrides: help of these arguments.
    """
    text = 'serve the environment of a run file over HTTP, for run files with env.name = "remote"'
    command = commands.add_parser("envs", help=text, description=text)
    command.add_argument("run_file", type=Path, help=run_file)
    command.add_argument("overrides", nargs="*", metavar="section.field=value", help=overrides)
    command.add_argument(
        "--listen",
        default=LISTEN,
        metavar="HOST:PORT",
        help=f"default: {LISTEN}; port 0 takes a free one; other hosts than loopback need --keys",
    )
    command.add_argument("--keys", type=Path, metavar="FOLDER", help="keys folder with certificate and token")
