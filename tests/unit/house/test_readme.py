"""README.md lists every command and no other."""

import argparse
import re
from pathlib import Path

from launch.arguments import parser

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()


def test_every_command_is_listed_and_no_other():
    (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    rows = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `offbeat ")]
    listed = {word for row in rows for word in re.findall(r"`(?:offbeat )?([a-z]+)", row)}
    assert listed == set(commands.choices)
