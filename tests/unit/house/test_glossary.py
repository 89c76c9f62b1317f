"""docs/glossary.md names classes, fields, functions and settings that exist in the product."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("protocol", "broker", "actors", "envs", "learner", "launch")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def rows():
    """Yield the cells of each row of the tables: word, words of the field, meaning, names in the code."""
    for line in GLOSSARY.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] != "word" and set(cells[0]) != {"-"}:
            yield cells


def product():
    """Return the names of classes and type aliases, and all identifiers, of the product."""
    classes, identifiers = set(), set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            assigned = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
            classes |= {target.id for target in assigned if isinstance(target, ast.Name)}
            for node in ast.walk(tree):
                identifiers |= names_in(node)
                if isinstance(node, ast.ClassDef):
                    classes.add(node.name)
    return classes, identifiers


def names_in(node):
    """Return the identifiers that one node contains."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return {name}
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case _:
            return set()


def test_names_in_the_last_column_exist_in_the_code():
    assert len(list(rows())) > 50
    classes, identifiers = product()
    names = {name for row in rows() for name in re.findall(r"`(\w+)`", row[-1])}
    capitalised = {name for name in names if name[0].isupper()}
    assert capitalised - classes == set()
    assert names - capitalised - identifiers == set()


def test_no_word_has_two_rows():
    words = [word for cell, *_ in rows() for word in cell.split(", ")]
    assert sorted(words) == sorted(set(words))
