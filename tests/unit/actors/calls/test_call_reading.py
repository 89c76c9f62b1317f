"""Each template's calls are read by whoever reads the call of the probe, and what nobody reads is counted."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.calls import (
    ARGUMENTS,
    NAME,
    PACKAGE,
    TOOL,
    CallReading,
    WrittenCall,
    opens_thought,
    written_calls,
)
from actors.chat_template import ChatTemplate
from actors.render import Renderer
from envs.agent.chat import make_reply, parse_request
from envs.base import TurnFacts
from envs.calls import Call, find_calls
from launch.preflight.environment import check_follow_ups
from tests.unit.actors.test_chat_templates import FAMILIES, TEMPLATES, TOOLS

WRITES_NO_CALLS = {"phi3", "gemma", "llama3", "cohere", "cohere2", "lfm2"}
MARKS = [
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
]  # fmt: skip
TURNS = ["<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[EOS]", "[BOS]"]
# The form of Kimi K2, which has the name in the id.
SECTIONS = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif -%}
{% for m in messages -%}
<|im_{{ 'system' if m.role == 'tool' else m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>
{%- set given = c.function.arguments %}{{ given if given is string else given | tojson -}}
<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""


def section(*calls):
    """Return an answer with calls, each a name and the text of its arguments."""
    written = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        for i, (name, text) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


@pytest.fixture
def sections(tmp_path):
    """Return a function that makes the renderer of a model that writes calls in the form of `SECTIONS`."""

    def make():
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in [*TURNS, *MARKS]])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        (tmp_path / "chat_template.jinja").write_text(SECTIONS)
        return Renderer(tmp_path)

    return make


@pytest.fixture
def without_library(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)


@pytest.fixture(params=["stand-in", "renderers"])
def library(request, monkeypatch):
    """The package if it is installed, and a stand-in with its interface, whose parser knows the form of `SECTIONS`."""
    if request.param == "renderers":
        return pytest.importorskip(PACKAGE, reason="renderers is not installed")
    package = ModuleType(PACKAGE)

    def parse_response(ids, tokenizer):
        text = tokenizer.decode(ids)
        content, _, rest = text.partition(MARKS[0])
        calls = []
        for part in rest.split("<|tool_call_begin|>")[1:]:
            name, _, arguments = part.partition("<|tool_call_argument_begin|>")
            name, arguments = name.split(".")[1].split(":")[0], arguments.partition("<|tool_call_end|>")[0]
            try:
                found, status = json.loads(arguments), "ok"
            except ValueError:
                found, status = arguments, "invalid_json"
            calls.append(SimpleNamespace(name=name, arguments=found, status=status, raw=part))
        return SimpleNamespace(content=content, tool_calls=calls)

    def create_renderer(tokenizer, config):
        assert config != "other", "the tokens of another family"
        assert tokenizer.convert_tokens_to_ids(MARKS[0]) is not None
        return SimpleNamespace(parse_response=lambda ids: parse_response(ids, tokenizer))

    package.create_renderer = create_renderer
    package.KimiK2RendererConfig, package.AaaRendererConfig = (lambda: "sections"), (lambda: "other")
    package.AutoRendererConfig = lambda: pytest.fail("it would ask the hub")
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    return package


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_each_family_that_writes_some_are_read_without_a_library(name):
    from actors.calls import CallReading

    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(text, {"bos_token": "<s>"}, ends=FAMILIES[name][0])
    reading = CallReading(written_calls(template), lambda: pytest.fail("no library is needed"))
    assert reading.reader == ("none written" if name in WRITES_NO_CALLS else "environments")
    assert reading.with_known_calls("<tool_call>5</tool_call>") == "<tool_call>5</tool_call>"


@pytest.mark.parametrize(
    ("name", "mark"),
    [("deepseekv3", "<｜tool▁calls▁begin｜>"), ("nemotron_3_nano", "<tool_call>"), ("gptoss", "")],
)
def test_the_mark_of_a_call_is_found_behind_an_opening_that_the_template_changes(name, mark):
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    first, *_ = written_calls(ChatTemplate(text, {}, ends=FAMILIES[name][0]))
    assert first.mark == mark


def test_a_form_that_nobody_reads_is_told_before_the_start_and_counted(sections, without_library):
    renderer = sections()
    assert renderer.calls.reader == "nobody"
    (remark,) = check_follow_ups(renderer, [], TOOLS)
    assert remark.startswith("nobody reads the tool calls that the chat template writes, which begin with")
    assert MARKS[0] in remark
    answer = "Hm.</think>I look." + section((NAME, "{}"))
    known = renderer.with_known_calls(answer)
    assert known.startswith("Hm.</think>I look.\n<tool_call>\n<|tool_calls_section_begin|>")
    assert reply_to(known).unreadable == 1
    for plain in (
        "I look.",
        f"<think>{section((NAME, '{}'))}</think>It is 7.",
        f"<think>{section((NAME, '{}'))}",
    ):
        assert renderer.with_known_calls(plain) == plain, (
            "what is no call, or only thought of, stays as it is"
        )


def test_a_form_that_a_library_reads_becomes_one_that_environments_read(sections, library):
    renderer = sections()
    assert renderer.calls.reader == "library"
    assert check_follow_ups(renderer, [], TOOLS) == []
    arguments = json.dumps({**ARGUMENTS, "word": 'ä "</tool_call'}, ensure_ascii=False)
    answer = "<think>Hm.</think>I look." + section((NAME, arguments), ("stop", "{}"))
    known = renderer.with_known_calls(answer)
    assert known.startswith("<think>Hm.</think>I look.\n<tool_call>")
    assert find_calls(known, {}) == [Call(NAME, json.loads(arguments)), Call("stop")]
    reply = reply_to(known)
    assert [call["function"]["name"] for call in reply.message["tool_calls"]] == [NAME, "stop"]
    assert (reply.message["content"], reply.message["reasoning_content"], reply.unreadable) == (
        "I look.",
        "Hm.",
        0,
    )
    assert renderer.with_known_calls("It is 7.") == "It is 7."


def test_a_call_that_the_library_cannot_read_is_counted_beside_those_that_it_can(sections, library):
    known = sections().with_known_calls(section((NAME, '{"word": '), ("stop", "{}")))
    reply = reply_to(known)
    assert (len(reply.message["tool_calls"]), reply.unreadable) == (1, 1)


def test_a_reader_of_one_call_that_mixes_two_is_no_reader(sections, library, monkeypatch):
    """A reader is tried by two calls, too: one that gives the first name the second arguments reads nobody's calls."""
    from actors.calls import LibraryReader

    read = LibraryReader.read

    def mixed(self, answer):
        content, calls = read(self, answer)
        return content, [Call(calls[0].name, calls[-1].arguments)] if calls else []

    monkeypatch.setattr(LibraryReader, "read", mixed)
    assert sections().calls.reader == "nobody"


def test_markup_without_its_beginning_is_a_call_that_nobody_can_read(sections, without_library):
    renderer = sections()
    answer = section((NAME, "{}")).removeprefix(MARKS[0]).removeprefix("<|tool_call_begin|>")
    assert reply_to(renderer.with_known_calls(f"I look. {answer}")).unreadable == 1


def test_a_library_that_fails_costs_no_episode(sections, library, monkeypatch):
    renderer = sections()

    def fail(ids):
        raise IndexError("no such token")

    monkeypatch.setattr(renderer.calls._chosen._parser, "parse_response", fail)
    assert reply_to(renderer.with_known_calls(section((NAME, "{}")))).unreadable == 1


def reply_to(text):
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS}
    return make_reply(text, parse_request(json.dumps(body).encode()), 0, TurnFacts(1, 1, cut=False))


def test_the_environment_of_an_episode_gets_the_known_form(sections, library):
    from actors.episode import EpisodeClock, TurnSampler
    from protocol.messages.episodes import Sampling, Task

    renderer = sections()
    task = Task(
        task_id="t", env="e", group_id="g", group_size=1, data={}, deadline_s=9.0, sampling=Sampling()
    )
    sampler = TurnSampler(None, renderer, task, "t.0", EpisodeClock())
    sampled = [*renderer.encode(section((NAME, "{}"))), *renderer.eos_ids]
    assert find_calls(sampler.text_of(sampled, keep_special=True), {}) == [Call(NAME)]
    assert "tool_call" not in sampler.text_of(sampled, keep_special=False)


def test_arguments_that_hold_the_marks_of_a_call_arrive_whole():
    text = "a</tool_call>b</tool_</tool_call>call>"

    class Library:
        family = "toy"

        def read(self, answer):
            return "", [Call(NAME, dict(ARGUMENTS))] if answer == "probe" else [Call("write", {"text": text})]

    reading = CallReading([WrittenCall("probe")], lambda: [Library()])
    assert reading.reader == "library"
    (call,) = find_calls(reading.with_known_calls("whatever"), {"write": TOOL})
    assert (call.name, call.arguments, call.error) == ("write", {"text": text}, "")


@pytest.mark.parametrize("thinks", [True, False])
def test_a_thought_ends_at_its_first_end_and_only_if_one_was_opened(thinks):
    reading = CallReading([WrittenCall(f"<|call|>{NAME}(")], list, thinks=thinks)
    cut = "I would write <|call|>x in my thought"
    call = '<|call|>f(text="</think>")'
    if thinks:
        assert reading.with_known_calls(cut) == cut
        assert reading.with_known_calls(f"hm</think>{call}").startswith("hm</think>\n<tool_call>\n<|call|>f(")
    else:
        assert "<tool_call>" in reading.with_known_calls(cut)
        assert f"<tool_call>\n{call}" in reading.with_known_calls(call)


@pytest.mark.parametrize(
    ("prompt", "opened"), [("<think>\n", True), ("<think>\n\n</think>", False), ("", False)]
)
def test_a_prompt_may_open_a_thought(prompt, opened):
    class Template:
        def text(self, messages, tools, add_generation_prompt):
            return "Question" + prompt

    assert opens_thought(Template()) is opened
