"""Arguments of calls are held to the schema of the tool, and the model reads what does not fit."""

import pytest

from envs.calls import Call
from envs.tools.toolbox import Tool, answer, misfit

OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}
TREE = {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}


@pytest.mark.parametrize(
    ("value", "schema", "why"),
    [
        ("1", {"type": "integer"}, "not of type integer"),
        (True, {"type": "integer"}, "not of type integer"),
        (1.5, {"type": "integer"}, "not of type integer"),
        (1.0, {"type": "integer"}, ""),
        (True, {"type": "number"}, "not of type number"),
        (None, {"type": "string"}, "not of type string"),
        (None, {"type": ["string", "null"]}, ""),
        (None, OPTIONAL, ""),
        ("x", OPTIONAL, "not of type integer or "),
        ("north", {"enum": ["left", "right"]}, "none of 'left', 'right'"),
        (1, {"enum": [True]}, "none of True"),
        (2, {"const": 1}, "not 1"),
        ({"a": 1}, {"additionalProperties": False, "properties": {"b": {}}}, "'a' is unknown; the names are b"),
        ({"a": {"b": ["x", 1]}}, {"properties": {"a": {"properties": {"b": {"items": {"type": "string"}}}}}},
         "'a'['b'][1] is 1, and not of type string"),
        ({}, {"required": ["a"]}, "missing a required argument: 'a'"),
        (-1, {"minimum": 0}, "outside of its bound 0"),
        (1, {"exclusiveMaximum": 1}, "outside of its bound 1"),
        ("abc", {"maxLength": 2}, "outside of its bound 2"),
        ([], {"minItems": 1}, "outside of its bound 1"),
        ({"next": {"next": {"n": "x"}}}, TREE, "'next'['next']['n'] is 'x'"),
        ({"next": {"next": {"n": 1}}}, TREE, ""),
        (1, {"$ref": "#"}, ""),
        (1, {"$ref": "http://elsewhere"}, ""),
        (1, {"type": "a word of another draft"}, ""),
        (1, True, ""),
        (1, False, "must not be given"),
        ("x", {"allOf": [{"type": "string"}, {"minLength": 2}]}, "outside of its bound 2"),
    ],
)  # fmt: skip
def test_a_value_fits_its_schema_or_the_place_is_named(value, schema, why):
    said = misfit(value, schema)
    assert bool(said) == bool(why)
    assert why in said


def test_a_call_that_does_not_fit_never_reaches_the_tool():
    ran = []
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = Tool({"type": "function", "function": {"name": "add", "parameters": schema}}, ran.append)
    assert answer(Call("add", {"n": "7"}), {"add": tool}).text == "Error: 'n' is '7', and not of type integer"
    assert answer(Call("add", {"n": "7"}), {"add": tool}).failed
    assert ran == []
    answer(Call("add", {"n": 7}), {"add": tool})
    assert ran == [{"n": 7}]
