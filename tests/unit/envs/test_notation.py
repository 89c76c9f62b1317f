"""Test that no answer is run as code, and that answers in the library's own notation still score."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from envs.scoring.confinement import score_apart
from envs.scoring.questions import FORMULAS_IN, LITERALS_IN, RUNS_ANSWERS, check_formula, refuse_code

LIMIT_S = 120.0

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "two",
        "-2.5e3",
        "6*(98 - 54) - 34 - 66",
        "-exp(x)*sin(x) + exp(x)*cos(x) + C",
        " x**2/3 ",
        "log(Abs(x))",
    ],
)
def test_formulas_are_taken(text):
    check_formula(text)


REFUSED = [
    *(
        "__import__('os')",
        "().__class__",
        "x.real",
        "eval('1')",
        "[1]",
        "'a'",
        "(lambda: 1)()",
        "x[0]",
        "f'{x}'",
    ),
    *(
        "[x for x in (1,)]",
        "x if x else x",
        "sin(*(1, 2))",
        "sin(x=1)",
        "sin",
        "sympify(x)",
        "True",
        "1j",
        "_x",
    ),
    *(
        "x := 1",
        "x and y",
        "x < y",
        "",
        "5!",
        "two words",
        "1" * 5_000,
        "\uff53in(x)",
        "sin(x)(x)",
        "exp(sin)",
    ),
    *("x; y", "print(1)", "Integral(x, x)"),
]


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused(text):
    with pytest.raises((ValueError, SyntaxError)):
        check_formula(text)


def in_worker(check):
    """Return what ``check`` returns in a process whose library refuses code."""

    def score():
        refuse_code()
        return float(check())

    return score_apart(score, LIMIT_S)


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("family", sorted(RUNS_ANSWERS))
def test_the_librarys_solutions_stay_right(library, family):
    dataset = library.create_dataset(family, seed=3, size=1_000)

    def check():
        entries = [dataset[i] for i in range(12)]
        readable = [entry for entry in entries if "Integral(" not in entry["answer"]]
        return len(readable) >= 9 and all(dataset.score_answer(e["answer"], e) == 1.0 for e in readable)

    assert in_worker(check) == 1.0


@pytest.mark.parametrize("family", sorted(RUNS_ANSWERS))
def test_no_answer_runs(library, family, tmp_path):
    dataset = library.create_dataset(family, seed=3, size=1_000)
    mark = tmp_path / "ran"
    codes = [
        f"__import__('os').mkdir({str(mark)!r})",
        f"[__import__('os').mkdir({str(mark)!r})]",
        f'exec("import os; os.mkdir({str(mark)!r})")',
        f"(lambda: __import__('os').mkdir({str(mark)!r}))()",
        f"__import__('os').mkdir({str(mark)!r})!",
    ]

    def check():
        scores = [dataset.score_answer(code, dataset[0]) for code in codes]
        return max(scores)

    assert in_worker(check) < 0.1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("family", "solution", "score"),
    [
        ("n_queens", lambda text: repr([row.split() for row in text.splitlines()]), 0.5),
        ("binary_matrix", lambda text: repr([row.split() for row in text.splitlines()]), 0.1),
        ("spiral_matrix", lambda text: repr([int(x) for x in text.split()]), 0.1),
        ("string_insertion", lambda text: repr(list(text)), 0.1),
    ],
)
def test_lists_keep_the_librarys_score(library, family, solution, score):
    dataset = library.create_dataset(family, seed=3, size=1_000)
    assert in_worker(lambda: dataset.score_answer(solution(dataset[0]["answer"]), dataset[0])) == score


def test_no_other_scorer_of_the_library_runs_answers(library):
    """A new version of the library may bring more of them. Then `family` and `notation` need a change."""
    root = Path(library.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                names = {ast.unparse(call.func).rpartition(".")[2] for call in calls(function)}
                if names & {"eval", "exec", "parse_expr", "sympify", "compile", "S"}:
                    found.add(path.stem)
    # Its own answer, not the model's.
    assert found - {"number_sorting"} == RUNS_ANSWERS


def test_the_modules_are_those_that_score(library):
    for name in (*LITERALS_IN, *FORMULAS_IN):
        importlib.import_module(name)
        source = Path(sys.modules[name].__file__)
        assert name == "sympy" or source.stem in RUNS_ANSWERS


def calls(function):
    return [node for node in ast.walk(function) if isinstance(node, ast.Call)]
