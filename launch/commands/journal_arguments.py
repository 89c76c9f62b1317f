"""The arguments of `offbeat journal`, in their own module because the command loads slow libraries."""

import argparse
from pathlib import Path

KINDS = ("snapshot", "event", "segment", "dead")
FORMATS = ("jsonl", "safetensors")
TEXT = "look into the journal of a run: its files, records, damage; take trajectories out of it"


def add_journal(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of `offbeat journal`."""
    actions = commands.add_parser("journal", help=TEXT, description=TEXT).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    texts = {
        "ls": "list the files: bytes, records by kind, first and last record, whether it is needed",
        "show": "print records, one per line, oldest first",
        "verify": "check every byte; exit code 1 if something is damaged or missing",
        "export": "write trajectories to a file",
        "accept-loss": "let the broker start again although something is damaged or missing, and go on without it",
    }
    parsers = {name: actions.add_parser(name, help=text, description=text) for name, text in texts.items()}
    for parser in parsers.values():
        parser.add_argument("run", type=Path, help="run folder")
    show, take = parsers["show"], parsers["export"]
    show.add_argument("--trajectory", help="only what concerns this one, its task or its group, by id")
    show.add_argument("--kind", choices=KINDS, help="only these records")
    show.add_argument("--limit", type=int, help="only the newest so many of them")
    show.add_argument(
        "--dead", action="store_true", help="messages that could not be accepted, with their frames"
    )
    take.add_argument(
        "--trajectory", action="append", help="only this one, by id; may be given several times"
    )
    take.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=f"default: {FORMATS[0]}")
    take.add_argument("--out", type=Path, required=True, help="file to write; whole or not at all")
