"""The table of forms: what each family of models writes is read as the family means it, or is a call with an error.

Each chat template that writes calls gives the text of one, two and three calls. Prose, lost and quoted marks and cuts
change it. Whatever is done to a text, what is read from it was written, and what looks like a call is never an answer.
"""

import json
import re
from typing import Any, cast

import pytest

from actors.calls import NAME, CallReading, WrittenCall, _text_behind_prompt
from actors.chat_template import ChatTemplate
from actors.errors import TemplateUnusable
from envs.agent.chat import make_reply, parse_request
from envs.base import ChatMessage, TurnFacts
from envs.calls import read_answer
from envs.rows.reading import DataRow
from envs.tools.episode import CallCounts, ToolsEpisode
from envs.tools.toolbox import Tool
from tests.unit.actors.test_chat_templates import FAMILIES, TEMPLATES

WRITE_CALLS = (
    "deepseekv3", "glm4moe", "gptoss", "llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_nothink",
    "qwen3_5_think", "qwen3_6", "qwen3_instruct_2507",
)  # fmt: skip
ONE_CALL = {"gptoss", "llama3_1"}
"""Templates that write one call of a message, or refuse several."""
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "count": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}}
TOOLS = {"look_up": TOOL}
MARKS = re.compile(r"<[^<>\n]+>|\[[A-Z_]{4,}\]|```json|```")
QUOTED = "a </tool_call> </think> <tool_call> </function> [TOOL_CALLS] <|call|> <｜tool▁call▁end｜> b"
EVERY = [(name, number) for name in WRITE_CALLS for number in ((1,) if name in ONE_CALL else (1, 2, 3))]


def arguments(number: int, word: str = "two words") -> dict[str, Any]:
    return {"word": f"{word} {number}", "count": number}


def text_of(family: str, calls: list[dict[str, Any]], *, name: str = "look_up", content: str = "") -> str:
    """Return the answer with these calls as the template of a family writes it."""
    template = ChatTemplate(
        (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"),
        {"bos_token": "<s>"},
        ends=FAMILIES[family][0],
    )
    for as_text in (False, True):
        listed = [
            {"id": f"call{n:05d}", "type": "function",
             "function": {"name": name, "arguments": json.dumps(a, ensure_ascii=False) if as_text else a}}
            for n, a in enumerate(calls)
        ]  # fmt: skip
        question: ChatMessage = {"role": "user", "content": "Question"}
        answer = cast(ChatMessage, {"role": "assistant", "content": content, "tool_calls": listed})
        tools = [{**TOOL, "function": {**TOOL["function"], "name": name}}]
        try:
            whole = template.text([question, answer], tools)
            prompt = template.text([question], tools, add_generation_prompt=True)
        except TemplateUnusable:
            continue
        text = _text_behind_prompt(whole, prompt)
        last = max(text.rfind(str(calls[-1]["count"])), text.rfind(calls[-1]["word"]), 0)
        ends = [at for end in template.ends if (at := text.find(end, last)) >= 0]
        return text[: min(ends, default=len(text))]
    raise AssertionError(f"{family} writes no calls")


def readable(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in read_answer(text, TOOLS).calls if not call.error]


def reply(text: str):
    """Return what an agent gets, at the other door."""
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
    return make_reply(text, parse_request(json.dumps(body).encode()), 0, TurnFacts(9, 9, cut=False))


class Shelf:
    """The side of the suite `tools` that its episodes use, with one tool that keeps what it is called with."""

    max_turns = 8

    def __init__(self):
        self.counts, self.ran, self.scored = CallCounts(), [], []

    def begin(self, data):
        return DataRow("t:1", {}), "?", [{"role": "user", "content": "?"}]

    def user(self):
        return None, {"look_up": Tool(TOOL, self.ran.append)}

    def score(self, user, answer, row, prompt):
        self.scored.append(answer)
        return {"exact": 1.0}, True


def step(text: str) -> tuple[Shelf, Any]:
    """Return what becomes of an answer in an episode of the suite `tools`."""
    shelf = Shelf()
    episode = ToolsEpisode(shelf)
    episode.reset({})
    return shelf, episode.step(text)


@pytest.mark.parametrize(("family", "number"), EVERY)
def test_a_text_that_lost_a_mark_is_scored_at_neither_door(family, number):
    text = text_of(family, [arguments(n) for n in range(number)])
    for mark in (mark for mark in MARKS.finditer(text) if "think" not in mark[0]):
        torn = text[: mark.start()] + text[mark.end() :]
        shelf, result = step(torn)
        assert not result.done, torn
        assert shelf.scored == []
        assert result.observation, "the model reads what became of each call"
        assert shelf.counts.calls == len(result.observation)
        given = reply(torn)
        assert given.told or given.message["tool_calls"], torn
        assert bool(given.told) == bool(shelf.counts.unreadable), "both doors say the same"


@pytest.mark.parametrize(("family", "number"), EVERY)
@pytest.mark.parametrize("content", ["", "I look it up."])
def test_what_a_template_writes_is_read_at_both_doors(family, number, content):
    calls = [arguments(n) for n in range(number)]
    text = text_of(family, calls, content=content)
    assert readable(text) == [("look_up", call) for call in calls], text
    given = reply(text).message["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in given] == calls
    assert reply(text).unreadable == 0


@pytest.mark.parametrize(("family", "number"), EVERY)
def test_a_name_that_no_tool_has_is_a_call_all_the_same(family, number):
    text = text_of(family, [arguments(n) for n in range(number)], name="lookup_word")
    assert readable(text) == [("lookup_word", arguments(n)) for n in range(number)], text


@pytest.mark.parametrize("family", WRITE_CALLS)
def test_prose_behind_a_call_makes_no_answer_of_it(family):
    text = text_of(family, [arguments(0)]) + "\nIt is on its way: 7."
    found = read_answer(text, TOOLS).calls
    assert found
    assert readable(text) in ([], [("look_up", arguments(0))])


@pytest.mark.parametrize(("family", "number"), EVERY)
def test_marks_that_an_argument_quotes_end_nothing(family, number):
    calls = [arguments(n, QUOTED) for n in range(number)]
    text = text_of(family, calls)
    assert readable(text) == [("look_up", call) for call in calls], text


@pytest.mark.parametrize(("family", "number"), EVERY)
def test_a_text_that_lost_a_mark_has_no_call_that_nobody_wrote(family, number):
    calls = [("look_up", arguments(n)) for n in range(number)]
    text = text_of(family, [arguments(n) for n in range(number)])
    # Without the end of a thought, all is thought.
    for mark in (mark for mark in MARKS.finditer(text) if "think" not in mark[0]):
        torn = text[: mark.start()] + text[mark.end() :]
        assert all(call in calls or call[0] not in TOOLS for call in readable(torn)), torn
        assert len(readable(torn)) <= number
        assert read_answer(torn, TOOLS).calls, f"an answer was made of {torn!r}"


@pytest.mark.parametrize(("family", "number"), EVERY)
def test_a_text_that_is_cut_anywhere_has_no_call_that_nobody_wrote(family, number):
    calls = [("look_up", arguments(n, "a </b> c")) for n in range(number)]
    text = text_of(family, [arguments(n, "a </b> c") for n in range(number)])
    for end in range(len(text)):
        got = readable(text[:end])
        assert got == calls[: len(got)], text[:end]


@pytest.mark.parametrize(("family", "number"), EVERY)
def test_what_is_not_closed_is_never_the_default_of_a_tool(family, number):
    """A cut inside the last call's arguments leaves no call of this place that can be read."""
    text = text_of(family, [arguments(n) for n in range(number)])
    inside = text.rindex("two words")
    for end in range(inside, inside + len("two words")):
        assert len(readable(text[:end])) == number - 1, text[:end]
        assert any(call.error for call in read_answer(text[:end], TOOLS).calls), text[:end]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("<tool_call>\n<function=look_up>\n<parameter=count>\n1\n</parameter>\n</function>\n"
                     "<function=other>\n<parameter=word>\nx\n</parameter>\n</function>\n</tool_call>",
                     [("look_up", {"count": 1}), ("other", {"word": "x"})], id="two functions of one block"),
        pytest.param('<tool_call>{"name": "look_up", "arguments": {"count": 1}}\n'
                     '{"name": "other", "arguments": {"count": 2}}</tool_call>', [],
                     id="two objects of one block"),
        pytest.param("<tool_call>look_up\n<arg_key>count</arg_key><arg_value>1</arg_value>\nother\n<arg_key>word"
                     "</arg_key><arg_value>x</arg_value></tool_call>", [],
                     id="two names of one block"),
        pytest.param("<function=look_up>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>",
                     [("look_up", {"count": 1})], id="functions without the opening mark"),
        pytest.param('{"name": "look_up", "arguments": {"count": 1}}\n</tool_call>',
                     [("look_up", {"count": 1})], id="JSON without it"),
        pytest.param("look_up\n<arg_key>count</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [],
                     id="pairs without it"),
        pytest.param("<tool_call>\n<function=look_up>\n<parameter=count>\n1\n</function>\n</tool_call>", [],
                     id="open value"),
        pytest.param("<tool_call>\n<function=look_up>\n<parameter=word>\n1\n<parameter=count>\n2\n</parameter>\n</function>"
                     "\n</tool_call>", [],
                     id="open value before another"),
        pytest.param("<tool_call>look_up<arg_key>word</arg_key><arg_value>1<arg_key>count</arg_key><arg_value>2"
                     "</arg_value></tool_call>", [],
                     id="open pair"),
        pytest.param("<tool_call>\n<function=look_up>\n<parameter=count>\n1\n</parameter>\n<parameter=count>\n2\n"
                     "</parameter>\n</function>\n</tool_call>", [],
                     id="a value twice"),
        pytest.param('<tool_call>{"name": "look_up", "arguments": {"count": 1, "count": 2}}</tool_call>', [],
                     id="a key twice"),
        pytest.param('<tool_call>{"name": "look_up", "args": {"count": 1}}</tool_call>', [],
                     id="arguments by another name"),
        pytest.param('<|channel|>commentary to=functions.look_up<|message|>', [],
                     id="cut before the arguments"),
        pytest.param('{"name": "look_up", "parameters": {"count": 1}}; {"name": "look_up", "parameters": {"count": 2}}',
                     [("look_up", {"count": 1}), ("look_up", {"count": 2})], id="two of Llama"),
        pytest.param('Sure.\n```json\n{"name": "look_up", "parameters": {"count": 1}}\n```',
                     [("look_up", {"count": 1})], id="Llama behind prose, in a fence"),
        pytest.param('I called {"name": "look_up", "parameters": {"count": 1}} and got 7.', [],
                     id="Llama between prose"),
        pytest.param('{"name": "look_up", "parameters": {"count": 1', [],
                     id="Llama, cut"),
        pytest.param('[TOOL_CALLS][{"name": "look_up", "arguments": {"count": 1}}, {"name": "other", "arguments": {}}]',
                     [("look_up", {"count": 1}), ("other", {})], id="list of Mistral"),
        pytest.param('Hm. [TOOL_CALLS]look_up[ARGS]{"count": 1}[TOOL_CALLS]other[CALL_ID]a1b2[ARGS]{}',
                     [("look_up", {"count": 1}), ("other", {})], id="names of Mistral"),
        pytest.param('<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"count": 1}<｜tool▁call▁end｜>',
                     [("look_up", {"count": 1})], id="DeepSeek V3.1"),
        pytest.param('<function=look_up>{"count": 1}</function>', [("look_up", {"count": 1})], id="Llama's own form"),
        pytest.param('<tool_call>{"name": "look_up", "arguments": {"count": NaN}}</tool_call>', [],
                     id="NaN"),
        pytest.param('<tool_call>{"name": "look_up", "arguments": {"count": 1e999}}</tool_call>', [],
                     id="1e999"),
        pytest.param('<tool_call>{"name": "look_up", "arguments": {"count": 1' + "0" * 400 + "}}</tool_call>", [],
                     id="10^400"),
        pytest.param('<tool_call>{"name": "look_up", "arguments": {"word": "\\ud83d"}}</tool_call>', [],
                     id="half a character"),
        pytest.param('<tool_call>{"name": "look_up", "arguments": {"word": ' + "[" * 90 + "]" * 90 + "}}</tool_call>",
                     [], id="depth"),
    ],
)  # fmt: skip
def test_forms_that_models_write_and_templates_do_not(text, names):
    found = read_answer(text, TOOLS).calls
    assert found, "an answer was made of it"
    assert readable(text) == names
    assert [call for call in found if call.error] or names
    shelf, result = step(text)
    assert not result.done
    assert len(result.observation) == len(found)
    assert shelf.counts.unreadable == len([call for call in found if call.error])
    given = reply(text)
    assert given.unreadable == len([call for call in found if call.error])
    assert [call["function"]["name"] for call in given.message.get("tool_calls", ())] == [
        name for name, _ in names
    ]


@pytest.mark.parametrize(
    ("text", "calls", "said"),
    [
        ('<tool_call>{"name": "look_up", "arguments": {"word": "a </think> b"}}</tool_call>', 1, ""),
        ('<think>a <tool_call>{"x": 1}</think>Well.<tool_call>{"name": "look_up"}</tool_call>', 1, "Well."),
        ('I could write <tool_call>{"name": ...} here.</think>7', 0, "7"),
        ('One <tool_call>{"name": "look_up"}</tool_call> in a thought</think>7', 0, "7"),
        ("<think>open <tool_call>", 0, ""),
        ('I could write {"name": "add", "arguments": {"a: 1}} here.</think>7', 0, "7"),
        ('I could write {"name": "add ... </think>7', 0, "7"),
        (
            '<think>a</think><tool_call>{"name": "look_up"}</tool_call> I wrote </think> once.',
            1,
            " I wrote </think> once.".strip(),
        ),
        ('{"name": "look_up", "parameters": {"word": "a </think> b"}}', 1, ""),
        ("a<think>b</think>c", 0, "c"),
    ],
)
def test_a_thought_ends_where_no_argument_quotes_its_end(text, calls, said):
    read = read_answer(text, TOOLS)
    assert (len(read.calls), read.text.strip()) == (calls, said)


@pytest.mark.parametrize(
    "answer", ['{"name": "Ada", "age": 36}', '{"tool": 1}', "{not JSON", "f(x) = {x}", "a <b> c"]
)
def test_an_answer_with_braces_is_an_answer(answer):
    assert read_answer(answer, TOOLS).calls == []
    assert read_answer(answer, TOOLS).text == answer


@pytest.mark.parametrize(
    "text", ['<function=look_up>{"word": "a"}', '<function=look_up>{"word": "a"} and more', "[TOOL_CALLS][]"]
)
def test_what_is_not_closed_or_empty_is_one_call_with_an_error_and_none_to_carry_out(text):
    (call,) = read_answer(text, TOOLS).calls
    assert call.error


@pytest.mark.parametrize("quoted", ["<function=look_up></function>", "[TOOL_CALLS]look_up{}"])
def test_a_call_that_an_unclosed_call_quotes_is_not_carried_out(quoted):
    written = '<tool_call>{"name": "look_up", "arguments": {"word": "' + quoted + '"}}'
    for text in (written, written[:-1], written[:-3]):
        (call,) = read_answer(text, TOOLS).calls
        assert call.error, text


@pytest.mark.parametrize("quoted", ["<function=look_up></function>", "[TOOL_CALLS]look_up{}"])
def test_a_call_that_a_call_in_a_strange_form_quotes_is_not_carried_out(quoted):
    reading = CallReading([WrittenCall(f"<|call|>{NAME}(word='two words', count=7)<|end_call|>")], list)
    (call,) = read_answer(reading.with_known_calls(f"<|call|>look_up(word='{quoted}')"), TOOLS).calls
    assert call.error
