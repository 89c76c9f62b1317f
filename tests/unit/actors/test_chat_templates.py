"""Chat templates of model families: what may follow an answer, and that nothing sampled is rendered again.

The originals are in tests/chat_templates; its README says where they come from.
"""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.errors import PrefixBroken, TemplateUnusable
from actors.render import Renderer
from launch.errors import ConfigError
from launch.preflight.environment import check_follow_ups

TEMPLATES = Path(__file__).parents[2] / "chat_templates"
OK = ""
LEFT_OUT = "leaves out a 'tool' message"
ALTERNATE = "roles must alternate"
# Family: end tokens, whether it knows tools, and what a user message and a tool result behind an answer meet.
FAMILIES = {
    "qwen2_5": (["<|im_end|>"], True, OK, OK),
    "qwen3": (["<|im_end|>"], True, OK, OK),
    "qwen3_instruct_2507": (["<|im_end|>"], True, OK, OK),
    "qwen3_5_think": (["<|im_end|>"], True, OK, OK),
    "qwen3_5_nothink": (["<|im_end|>"], True, OK, OK),
    "qwen3_6": (["<|im_end|>"], True, OK, OK),
    "llama3_1": (["<|eot_id|>", "<|eom_id|>"], True, OK, OK),
    "lfm2": (["<|im_end|>"], True, OK, OK),
    "glm4moe": (["<|user|>", "<|observation|>"], True, OK, OK),
    "nemotron_3_nano": (["<|im_end|>"], True, OK, OK),
    "gptoss": (["<|return|>", "<|call|>"], True, OK, OK),
    "phi3": (["<|end|>"], False, OK, LEFT_OUT),
    "deepseekv3": (["<｜end▁of▁sentence｜>"], False, OK, OK),
    "gemma": (["<end_of_turn>"], False, OK, ALTERNATE),
    "llama3": (["<|eot_id|>"], False, OK, OK),
    "cohere": (["<|END_OF_TURN_TOKEN|>"], False, OK, ALTERNATE),
    "cohere2": (["<|END_OF_TURN_TOKEN|>"], False, OK, LEFT_OUT),
}  # fmt: skip
QUESTION = {"role": "user", "content": "What is 12 + 7?"}
AND_NOW = {"role": "user", "content": "And minus 2?"}
RESULT = {"role": "tool", "content": "19", "name": "add", "tool_call_id": "call00000"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "first"}},
                "required": ["a"],
            },
        },
    }
]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 12}}}


@pytest.fixture
def load(tmp_path):
    """Return a function that makes the renderer of a family, with a byte-level tokenizer."""

    def make(name, **template_args):
        ends = FAMILIES[name][0]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(end, special=True) for end in ends])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        ids = [tokenizer.token_to_id(end) for end in ends]
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<bos>", "eos_token": ends[0]})
        )
        (tmp_path / "chat_template.jinja").write_text(
            (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        )
        return Renderer(tmp_path, template_args)

    return make


def in_text(renderer, ids):
    return renderer.decode(ids, keep_special=True)


def tools_of(name):
    return TOOLS if FAMILIES[name][1] else []


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_prompt_has_the_tools_if_the_family_knows_them(load, name):
    prompt = in_text(load(name), load(name).prompt([QUESTION], TOOLS))
    assert QUESTION["content"] in prompt
    assert ("Add two numbers." in prompt) == FAMILIES[name][1]


@pytest.mark.parametrize(
    "messages", [[AND_NOW], [RESULT], [RESULT, RESULT]], ids=["user", "tool", "two tools"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_may_follow_an_answer(load, name, messages):
    renderer, tools = load(name), tools_of(name)
    expected = FAMILIES[name][2 if messages == [AND_NOW] else 3]
    if expected:
        with pytest.raises((PrefixBroken, TemplateUnusable), match=expected):
            renderer.check_follow_up(messages, tools)
        with pytest.raises(
            ConfigError, match=f"the second turn of an episode: chat template of .*{expected}"
        ):
            check_follow_ups(renderer, messages, [])
        return
    renderer.check_follow_up(messages, tools)
    answer = renderer.encode("It is 19.")
    # The turn was cut: the observation closes it, as the template does.
    added = in_text(renderer, renderer.observation(messages, answer, tools))
    calls = {} if messages == [AND_NOW] else {"tool_calls": [CALL] * len(messages)}
    whole = whole_text(renderer, messages, tools, calls)
    assert whole.endswith(added)
    assert all(message["content"] in added for message in messages)
    assert "It is 19." not in added
    # The policy sampled the end itself: the observation leaves it out.
    for end in renderer.eos_ids:
        ended = in_text(renderer, renderer.observation(messages, [*answer, end], tools))
        text = renderer._tokenizer.id_to_token(end)
        assert added == ended or added.partition(text)[2] == ended


def whole_text(renderer, messages, tools, calls):
    """Render a whole conversation, whatever form of the answer the template takes."""
    forms = [{"content": "", **calls}, {"content": "It is 19."}]
    as_text = {**CALL, "function": {"name": "add", "arguments": json.dumps({"a": 12})}}
    forms.insert(1, {"content": "", "tool_calls": [as_text] * len(messages)})
    for form in forms if calls else forms[2:]:
        try:
            talk = [QUESTION, {"role": "assistant", **form}, *messages]
            return renderer.text(talk, tools, add_generation_prompt=True)
        except TemplateUnusable:
            continue
    raise AssertionError("no form of the answer is taken")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "qwen3_6"])
def test_a_thought_that_the_template_would_drop_stays_and_check_says_so(load, name):
    (remark,) = check_follow_ups(load(name), [AND_NOW], [])
    assert "leaves out the thought of an earlier answer once 'user' messages follow" in remark


def test_qwen3_puts_all_results_of_a_turn_into_one_block(load):
    renderer = load("qwen3")
    end = renderer.eos_ids[0]
    added = in_text(renderer, renderer.observation([RESULT, {**RESULT, "content": "20"}], [1, end], TOOLS))
    assert added == (
        "\n<|im_start|>user\n<tool_response>\n19\n</tool_response>\n<tool_response>\n20\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_qwen3_takes_template_arguments(load):
    renderer = load("qwen3", enable_thinking=False)
    assert in_text(renderer, renderer.prompt([QUESTION])).endswith("assistant\n<think>\n\n</think>\n\n")
    added = in_text(renderer, renderer.observation([AND_NOW], [1, *renderer.eos_ids]))
    assert added.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_gpt_oss_names_the_tool_that_answers(load):
    renderer = load("gptoss")
    call = renderer._tokenizer.token_to_id("<|call|>")
    added = in_text(renderer, renderer.observation([RESULT], [1, call], TOOLS))
    assert added.startswith("<|start|>functions.add to=assistant<|channel|>commentary<|message|>")
    assert added.endswith("<|end|><|start|>assistant")


def test_a_template_without_tools_gets_a_remark(load):
    (remark,) = check_follow_ups(load("deepseekv3"), [], TOOLS)
    assert remark.startswith(
        "the chat template leaves out the tools, for example 'add'; describe them in the prompt"
    )


def test_gemma_refuses_a_system_message(load):
    with pytest.raises(TemplateUnusable, match=r"roles \['system', 'user'\]"):
        load("gemma").prompt([{"role": "system", "content": "Be short."}, QUESTION])
