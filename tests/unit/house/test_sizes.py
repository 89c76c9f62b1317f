"""A file of the product has at most 300 lines, and a function at most 40 beside its docstring."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path
    for top in ("protocol", "broker", "actors", "envs", "learner", "launch", "benchmarks")
    for path in (ROOT / top).rglob("*.py")
)


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    whole = function.end_lineno - function.lineno + 1
    return whole if ast.get_docstring(function) is None else whole - (first.end_lineno - first.lineno + 1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_and_its_functions_can_be_read_in_one_go(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300, "find the second subject in it, and give that a file"
    functions = [
        f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f.name: lines_of(f) for f in functions if lines_of(f) > 40}
    assert not long, "name the steps of these functions"


def test_a_docstring_does_not_count():
    first, second = ast.parse(
        'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n\n\ndef g():\n    return 1\n'
    ).body
    assert (lines_of(first), lines_of(second)) == (2, 2)
