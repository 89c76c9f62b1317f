"""Twins are two doors to one thing. What one of them has, the other has, and a test goes through both.

CONTRIBUTING.md lists the pairs. Whoever mends one door looks here for the other.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("## Twins")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| `(tests/[\w/]+\.py)::(\w+)` \|$", SECTION, re.MULTILINE)


def test_there_are_twins_and_each_row_of_the_table_has_one_test():
    assert len(ROWS) >= 18
    assert len(ROWS) == len([line for line in SECTION.splitlines() if line.startswith("| ")]) - 1


@pytest.mark.parametrize(("one", "other", "path", "name"), ROWS, ids=[row[3] for row in ROWS])
def test_the_test_of_a_pair_is_there(one, other, path, name):
    assert one != other
    functions = [
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if hasattr(node, "args") and hasattr(node, "name")
    ]
    assert name in functions
