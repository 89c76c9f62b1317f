"""The list of pages has every command and no other, and README.md is one screen."""

import argparse
import re
from pathlib import Path

from launch.arguments import parser

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "docs" / "README.md").read_text()


def test_every_command_is_listed_and_no_other():
    (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    rows = [line.split("|")[1] for line in PAGES.splitlines() if line.startswith("| `offbeat ")]
    listed = {word for row in rows for word in re.findall(r"`(?:offbeat )?([a-z]+)", row)}
    assert listed == set(commands.choices)


def test_readme_is_one_screen():
    """A reader decides here; a table or a caveat more belongs to a page of docs/."""
    assert len((ROOT / "README.md").read_text().split()) <= 1000
