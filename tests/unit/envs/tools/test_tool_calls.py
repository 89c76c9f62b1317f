"""Calls are found in the forms that models write, and a call that cannot be read says why."""

import pytest

from envs.calls import Call, find_calls

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}}
        },
    },
}
TOOLS = {"add": ADD}
SUM = Call("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    "answer",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        'I add.\n<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        '<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add '
        '<|constrain|>json<|message|>{"a": 1, "b": 2}',
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
)  # fmt: skip
def test_a_call_is_found_in_each_form(answer):
    assert find_calls(answer, TOOLS) == [SUM]


def test_several_calls_keep_their_order():
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    two = '<tool_call>\n{"name": "stop"}\n</tool_call>'
    assert find_calls(f"{one}\n{two}", TOOLS) == [SUM, Call("stop")]


def test_text_stays_text_where_the_schema_says_so():
    xml = "<function=add>\n<parameter=note>\n12\n</parameter>\n<parameter=a>\n12\n</parameter>\n</function>"
    xml = f"<tool_call>\n{xml}\n</tool_call>"
    assert find_calls(xml, TOOLS) == [Call("add", {"note": "12", "a": 12})]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>', "the call is not JSON"),
        ('<tool_call>\n{"name": "add"', "the call has no </tool_call>"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', 'the call has no "name"'),
        ('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', '"arguments" is not a JSON object'),
        ("<tool_call>[1]</tool_call>", "the call is not a JSON object"),
        ("[TOOL_CALLS] nonsense", "the calls are not JSON"),
        ('<|channel|>commentary to=functions.add<|message|>{"a": ', "the call is not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(answer, error):
    (call,) = find_calls(answer, TOOLS)
    assert call.error.startswith(error)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "The answer is 3.",
        '{"name": "Ada", "age": 36}',
        '<think>I could use <tool_call>{"name": "add"}</tool_call></think>3',
        '<think>I could use <tool_call>{"name": "add"}</tool_call>',
        "<|channel|>final<|message|>3",
    ],
)
def test_an_answer_is_not_a_call(answer):
    assert find_calls(answer, TOOLS) == []
