"""A folder has at most twenty files, and the docstring of its `__init__.py` names every module and folder in it."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = sorted(
    path.parent
    for top in ("protocol", "broker", "actors", "envs", "learner", "launch")
    for path in (ROOT / top).rglob("__init__.py")
)
UNNAMED = {"__init__", "__main__", "__pycache__", "conftest"}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT).as_posix())
def test_a_map_names_all_that_is_in_the_folder(room):
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    named = {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", text)}
    inside = {path.stem for path in room.iterdir() if path.suffix == ".py"}
    inside |= {path.parent.name for path in room.glob("*/__init__.py")}
    assert inside - UNNAMED <= named, f"add it to the docstring of {room.name}/__init__.py"


def test_no_folder_shows_more_than_twenty_files():
    tops = [*{room.relative_to(ROOT).parts[0] for room in ROOMS}, "recipes", "docs", "benchmarks", "tests"]
    files = [path for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc")
    assert {folder: count for folder, count in counts.items() if count > 20} == {}
