"""Report long files and long functions: `make report`.

The report is no verdict, and its exit status is 0. A long file may be one subject, and a long function one table of
cases. Look at what it names when you work there anyway.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("protocol", "broker", "actors", "envs", "learner", "launch", "benchmarks")
LONGEST_FILE = 700
LONGEST_FUNCTION = 80


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function, without its docstring.

    Example:
        >>> lines_of(ast.parse("def f():\\n    '''Two\\n    lines.'''\\n    return 1").body[0])
        2
    """
    first = function.body[0]
    whole = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return whole
    return whole - ((first.end_lineno or first.lineno) - first.lineno + 1)


def findings(path: Path) -> Iterator[str]:
    """Yield a line for a file that is too long, and one for each of its functions that is too long."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    if (count := len(text.splitlines())) > LONGEST_FILE:
        yield f"{name}: {count} lines; over {LONGEST_FILE} it may hold two subjects"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > LONGEST_FUNCTION:
            yield f"{name}:{node.lineno}: {node.name} has {lines_of(node)} lines"


def main() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [line for path in files for line in findings(path)]
    print("\n".join(found), end="\n" if found else "")
    limits = f"files over {LONGEST_FILE} lines and functions over {LONGEST_FUNCTION}"
    print(f"{len(files)} files: {len(found)} notes on {limits}")


if __name__ == "__main__":
    main()
