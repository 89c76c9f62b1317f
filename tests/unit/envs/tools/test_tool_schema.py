"""Schemas of tools come from type hints and docstrings, as `transformers` makes them."""

import re
from typing import Any, Literal

import pytest

from envs.errors import EnvError
from envs.tools.toolbox import schema_of


def search(query: str, limit: int = 5, kinds: list[str] | None = None, order: Literal["new", "old"] = "new"):
    """Search the archive.

    Looks at titles only.

    Args:
        query: words to look for,
            separated by spaces.
        limit: most results
        kinds: kinds of documents
        order: which come first

    Returns:
        The titles.
    """


def weigh(grams: float, exact: bool, table: dict[str, int], either: int | str, rows: list[list[float]]):
    """Weigh something.

    Args:
        grams: the weight
        exact: whether to round
        table: names
        either: one or the other
        rows: numbers
    """


@pytest.mark.parametrize("function", [search, weigh])
def test_a_schema_equals_what_transformers_makes(function):
    from transformers.utils import get_json_schema

    theirs = get_json_schema(function)["function"]
    theirs.pop("return", None)
    ours = schema_of(function, "here")["function"]
    for schema in (ours, theirs):
        for argument in schema["parameters"]["properties"].values():
            argument["description"] = re.sub(r"\s+", " ", argument["description"])
            argument.pop("default", None)
            argument.pop("additionalProperties", None)
            if isinstance(argument["type"], list):
                argument["type"].sort()
    assert ours == theirs


def test_an_argument_without_a_hint_is_refused():
    def bad(x):
        """Do something."""

    with pytest.raises(EnvError, match=r"^m\.py:bad: argument 'x' needs a type hint, for example x: str$"):
        schema_of(bad, "m.py:bad")


def test_a_type_that_json_does_not_have_is_refused():
    def bad(x: set):
        """Do something."""

    with pytest.raises(EnvError, match=r"argument 'x' has the type set; a model writes JSON, so use str"):
        schema_of(bad, "m.py:bad")


def test_a_tool_without_a_docstring_is_refused():
    def bad(x: int):
        pass

    with pytest.raises(EnvError, match="needs a docstring that tells the model what it does"):
        schema_of(bad, "m.py:bad")


def test_arguments_that_have_no_name_are_refused():
    def bad(*x: int):
        """Do something."""

    with pytest.raises(EnvError, match="argument 'x' has to be a named one"):
        schema_of(bad, "m.py:bad")


def test_any_value_has_an_empty_schema():
    def store(value: Any):
        """Store a value."""

    assert schema_of(store, "here")["function"]["parameters"]["properties"] == {"value": {}}
