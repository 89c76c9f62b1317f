"""Test how tests of a row are read, how programs are found in answers, and how outputs are compared."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.errors import EnvError
from envs.programs import program_in
from envs.scoring.program_process import Remote, equal, packed, unpacked
from envs.scoring.program_tests import read_cases
from envs.scoring.program_worker import equal_output

CALL = {"call": "f", "args": [1], "expected": [2], "or": []}


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ([{"stdin": "1\n", "expected_output": "2\n"}], [{"input": "1\n", "expected": "2\n"}]),
        ({"inputs": ["1", ["2", "3"]], "outputs": ["4", 5]}, [
            {"input": "1", "expected": "4"}, {"input": "2\n3", "expected": "5"}
        ]),
        ([{"call": "f", "args": [1], "expected": [2]}], [CALL]),
        ([{"fn_name": "f", "input": [1], "output": [2]}], [{**CALL, "or": [2]}]),
        ({"fn_name": "f", "inputs": ["1\n[2]"], "outputs": [None]}, [{**CALL, "args": [1, [2]], "expected": None}]),
        (["import math\nassert f(math.pi) == x"], [
            {"code": "import math\nassert f(math.pi) == x", "names": ["f", "x"]}
        ]),
        ("x = 1\nassert f(x) == 1\nassert abs(g(x)) == 2", [
            {"code": "x = 1\nassert f(x) == 1", "names": ["f"]},
            {"code": "x = 1\nassert abs(g(x)) == 2", "names": ["g"]},
        ]),
    ],
)  # fmt: skip
def test_forms_of_tests(value, tests):
    assert read_cases(value).tests == tests
    if not isinstance(value, str):
        assert read_cases(json.dumps(value)).tests == tests


def test_a_check_function_gets_the_entry_point():
    text = "def check(candidate):\n    assert candidate(1) == 2"
    (test,) = read_cases(text, entry_point="f").tests
    assert test["code"].endswith("check(f)")
    assert test["names"] == ["f"]
    with pytest.raises(
        EnvError, match="no assertion outside of functions; add assertions, or a function check"
    ):
        read_cases(text)


@pytest.mark.parametrize(
    ("code", "before", "kept", "names"),
    [
        ("assert math.isclose(f(2), 4.0)", "", "import math\nassert math.isclose(f(2), 4.0)", ["f"]),
        ("assert math.isclose(f(2), 4.0)", "import math", "assert math.isclose(f(2), 4.0)", ["f"]),
        ("math = 3\nassert f(2) == math.real", "", "math = 3\nassert f(2) == math.real", ["f"]),
        # The program may call a function so.
        ("assert copy(2) == 2", "", "assert copy(2) == 2", ["copy"]),
        ("from __future__ import division\nassert math.pi < f(2)", "", None, ["f", "math"]),
    ],
)
def test_a_module_that_decides_a_test_is_the_real_one(code, before, kept, names):
    (test,) = read_cases([code], before=before).tests
    assert test == {"code": kept or code, "names": names}


def test_a_whole_function_before_the_program_is_the_tests_too():
    """HumanEval's row 38 hands out encode_cyclic and asks for decode_cyclic; both could be the identity."""
    before = "def encode(s):\n    return s[1:] + s[:1]\n\ndef decode(s):\n    'Take it back.'\n"
    test = "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'\n"
    for entry_point in ("decode", "encode"):
        cases = read_cases(test, entry_point, before)
        assert ("def encode" in cases.imports) == (entry_point == "decode")
        assert "def decode" not in cases.imports
        assert ("encode" in cases.tests[0]["names"]) == (entry_point == "encode")


def test_names_that_are_imported_before_the_program_are_not_the_programs():
    cases = read_cases(
        ["assert isclose(f(1), Node(1).x)"], before="from math import isclose\nclass Node: x = 1"
    )
    assert cases.tests[0]["names"] == ["Node", "f"]
    assert cases.imports == "from math import isclose"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "there is no test"),
        ("", "there is no test"),
        (3, r"the tests are 3; write texts such as"),
        ([3], "a test is 3; write"),
        (["assert f("], r"which is no Python \(SyntaxError\)"),
        ([{"input": "1"}], "a test has the keys input; write"),
        ([{"call": "f", "args": [1]}], "a test of 'f' has no expected value"),
        ([{"call": "f()", "args": [1], "expected": 1}], "'f\\(\\)' is no name of a function"),
        ([{"call": "f", "args": "x", "expected": 1}], "the arguments of f are 'x'; write a list"),
        ({"inputs": ["1"], "outputs": []}, "not two lists of one length"),
        ([{"input": "1", "output": "2"}, "assert f(1)"], "a row has one kind"),
        ([{"input": "1", "output": "x" * (17 << 20)}], "keep fewer, or set max_tests"),
        ("[" * 100_000, "is no Python|there is no test"),
    ],
)
def test_what_is_no_test_is_refused(value, words):
    with pytest.raises(EnvError, match=words):
        read_cases(value)


def test_only_the_first_tests_are_used():
    assert len(read_cases(["assert f(1)"] * 9, most=2).tests) == 2


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("<think>```python\nprint(0)\n```</think>print(1)", "print(1)"),
        ("```py\nprint(1)\n```\n```cpp\nint x;\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\n```python\nprint(2", "print(1)\n"),
        ("```python\nprint(2", ""),
        ("``` Python \nprint(1)\n  ```", "print(1)\n"),
        ("", ""),
    ],
)
def test_the_last_closed_block_is_the_program(answer, program):
    assert program_in(answer) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1 2", True),
        ("1.0", "1", False),
        ("1", "1.0", True),
        ("0.33333334", "0.33333333", True),
        ("0.334", "0.333", False),
        ("nan", "0.5", False),
        ("x" * 100 + ".5", "0.5", False),
        ("yes", "Yes", False),
        ("", "", True),
        ("1e999", "1.5", False),
    ],
)
def test_outputs_are_compared_by_words_and_decimal_numbers_nearly(printed, expected, same):
    assert equal_output(printed, expected) is same


class Cheat:
    """Equals everything."""

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


@pytest.mark.parametrize("expected", [1, 1.5, "a", None, [1], {"a": 1}, True])
def test_an_object_that_equals_everything_equals_nothing(expected):
    for value in (Cheat(), Remote(None, 0)):
        assert not equal(value, expected)
        assert not equal([value], [expected])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value):
    found = unpacked(json.loads(json.dumps(packed(value))), None)
    assert found == value
    assert type(found) is type(value)


def test_what_is_no_plain_data_is_not_packed():
    nested = []
    for _ in range(200):
        nested = [nested]
    for value in (Cheat(), nested):
        with pytest.raises(TypeError):
            packed(value)
    assert unpacked(packed(10**5_000), None) == 10**5_000
