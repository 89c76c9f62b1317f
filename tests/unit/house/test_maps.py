"""The docstring of a folder's `__init__.py` is its map: it names every module and every folder in it."""

import ast
import re
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
