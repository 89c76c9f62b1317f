"""Each class and type alias of the product has a unique name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("protocol", "broker", "actors", "envs", "learner", "launch")
SHARED = {"Unit"}
"""Names for the broker's and the learner's view of one thing."""


def names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name


def test_no_name_is_given_twice():
    places = defaultdict(set)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in names(ast.parse(path.read_text())):
                places[name].add(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SHARED} == {}
