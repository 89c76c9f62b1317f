"""Test cases of a row: what a program reads and prints, what its functions return, and assertions about them."""

import ast
import builtins
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from envs.errors import EnvError

FORMS = (
    'texts such as "assert f(2) == 4", tables {input, output} or {call, args, expected}, one table '
    "{inputs, outputs} with fn_name if the inputs are arguments, or Python text with assertions"
)
INPUTS, OUTPUTS = ("input", "stdin"), ("output", "stdout", "expected_output")
CALLS, ARGUMENTS = ("call", "fn_name", "func_name"), ("args", "input")
EXPECTED = ("expected", "output", "expected_output")
MODULES = frozenset(
    {
        "cmath",
        "collections",
        "copy",
        "functools",
        "itertools",
        "math",
        "operator",
        "random",
        "re",
        "statistics",
    }
)
"""Modules that tests use without an import, such as ``math.isclose``, because the right program has imported them."""
MOST_BYTES = 16 << 20
"""Most bytes of the tests of one row, as JSON."""


@dataclass(frozen=True)
class Cases:
    """The tests of a row, as a `program_worker` takes them.

    Attributes:
        kind: "run": the program reads its input and prints; "call": its functions are called.
        tests: for "run": tables of input and expected; for "call": tables of call, args, expected and or, or of code
            and names.
        before: text that stands before the program.
        imports: import statements and whole functions of ``before``, which stand before each test.
    """

    kind: Literal["run", "call"]
    tests: list[dict[str, Any]]
    before: str = ""
    imports: str = ""


def read_cases(value: Any, entry_point: str = "", before: str = "", most: int = 0) -> Cases:
    """Return the tests in a column.

    Args:
        value: the column; see `FORMS`. A text may be JSON of the other forms.
        entry_point: function that is handed to ``check``, if the text defines it as HumanEval's do.
        before: text that stands before each program, such as imports and classes.
        most: most tests that are kept; 0: all.

    Raises:
        EnvError: the value has none of these forms, or there is no test.

    Example:
        >>> read_cases([{"input": "2", "output": "4"}]).tests
        [{'input': '2', 'expected': '4'}]
        >>> read_cases(["assert f(2) == g"]).tests
        [{'code': 'assert f(2) == g', 'names': ['f', 'g']}]
        >>> read_cases({"fn_name": "f", "inputs": [[2]], "outputs": [4]}).tests
        [{'call': 'f', 'args': [2], 'expected': 4, 'or': []}]
    """
    imports = _of_tests(before, entry_point)
    tests = _read(_from_json(value), entry_point, imports)
    kinds = {"input" if "input" in test else "call" for test in tests}
    if not tests:
        raise EnvError(f"there is no test; write {FORMS}")
    if len(kinds) > 1:
        raise EnvError("some tests have an input, and others call functions; a row has one kind")
    kept = tests[:most] if most else tests
    if (size := len(json.dumps(kept))) > MOST_BYTES:
        raise EnvError(f"the tests have {size} bytes, at most {MOST_BYTES}; keep fewer, or set max_tests")
    return Cases("run" if kinds == {"input"} else "call", kept, before, imports)


def _from_json(value: Any) -> Any:
    """Return the value of a text that is JSON; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            # It may be Python that begins with a list.
            return value
    return value


def _read(value: Any, entry_point: str, imports: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [_code_test(code, imports) for code in _assertions(value, entry_point)]
    if isinstance(value, Mapping):
        return _table(value) if "inputs" in value else [_case(value)]
    if isinstance(value, list | tuple):
        tests = []
        for one in value:
            if isinstance(one, str):
                _parsed(one)
                tests.append(_code_test(one, imports))
            elif isinstance(one, Mapping):
                tests.append(_case(one))
            else:
                raise EnvError(f"a test is {one!r:.80}; write {FORMS}")
        return tests
    raise EnvError(f"the tests are {value!r:.80}; write {FORMS}")


def _table(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tests of the form of APPS and TACO: two lists, and the name of a function."""
    inputs, outputs = table["inputs"], table.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise EnvError("inputs and outputs are not two lists of one length")
    pairs = zip(inputs, outputs, strict=True)
    if name := table.get("fn_name"):
        return [_call(name, given, expected, wrapped=True) for given, expected in pairs]
    return [{"input": _text(given), "expected": _text(expected)} for given, expected in pairs]


def _case(case: Mapping[str, Any]) -> dict[str, Any]:
    name = _first(case, CALLS)
    expected = _first(case, EXPECTED)
    if name:
        given = _first(case, ARGUMENTS)
        if expected is None and not any(key in case for key in EXPECTED):
            raise EnvError(f"a test of {name!r:.40} has no expected value; write {FORMS}")
        return _call(name, [] if given is None else given, expected, wrapped="call" not in case)
    given, expected = _first(case, INPUTS), _first(case, OUTPUTS)
    if given is None or expected is None:
        raise EnvError(f"a test has the keys {', '.join(map(str, case))}; write {FORMS}")
    return {"input": _text(given), "expected": _text(expected)}


def _call(name: Any, given: Any, expected: Any, *, wrapped: bool) -> dict[str, Any]:
    """Return a test of a call.

    Args:
        wrapped: whether the expected value may stand in a list of one, as in data sets that others made.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise EnvError(f"{name!r:.40} is no name of a function")
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
        except (ValueError, RecursionError):
            raise EnvError(f"the arguments of {name} are {given!r:.80}; write a list") from None
    if not isinstance(given, list):
        raise EnvError(f"the arguments of {name} are {given!r:.80}; write a list")
    others = [expected[0]] if wrapped and isinstance(expected, list) and len(expected) == 1 else []
    return {"call": name, "args": given, "expected": expected, "or": others}


def _first(case: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((case[key] for key in keys if case.get(key) is not None), None)


def _text(value: Any) -> str:
    """Return what a program reads or prints; a list is one of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EnvError(
            f"a test is {code!r:.80}, which is no Python ({type(error).__name__}); write {FORMS}"
        ) from None


def _assertions(text: str, entry_point: str) -> list[str]:
    """Return a text with assertions as one test for each, with what stands before it."""
    tree = _parsed(text)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in defined and entry_point:
        return [f"{text}\ncheck({entry_point})"]
    before: list[str] = []
    tests: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assert):
            tests.append("\n".join([*before, ast.unparse(node)]))
        else:
            before.append(ast.unparse(node))
    if not tests and text.strip():
        raise EnvError(
            "the text of the tests has no assertion outside of functions; add assertions, or a function check and "
            "a column entry_point"
        )
    return tests


def _code_test(code: str, imports: str) -> dict[str, Any]:
    """Return a test of Python text, and the names in it that the program may define.

    None of them is built in, imported, or bound by the test: the program could replace what decides the test. A module
    of `MODULES` that the test uses and nobody imports is imported for it, for the same reason.
    """
    tree = ast.parse(code)
    loaded, bound = _names(tree)
    bound |= _names(ast.parse(imports))[1]
    used = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    # Nothing may stand before an import of __future__.
    missing = sorted((used & MODULES) - bound) if "__future__" not in code else []
    if missing:
        code = f"import {', '.join(missing)}\n{code}"
    return {"code": code, "names": sorted(loaded - bound - set(missing) - set(dir(builtins)))}


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a text reads, and those that it binds anywhere."""
    loaded, bound = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                loaded.add(name)
            case ast.Name(id=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.arg(arg=name):
                bound.add(name)
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {(one.asname or one.name).partition(".")[0] for one in names}
    return loaded, bound


def _of_tests(before: str, entry_point: str) -> str:
    """Return what tests have of the text before a program: its imports, and its functions but for the one wanted.

    HumanEval's tests call a function that stands before the program. Were it the program's, it could be written anew.
    A function without a body is one that the program is to write.
    """
    nodes = [
        node
        for node in _parsed(before).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.FunctionDef) and node.name != entry_point and not _is_stub(node))
    ]
    return "\n".join(map(ast.unparse, nodes))


def _is_stub(function: ast.FunctionDef) -> bool:
    return all(
        isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )
