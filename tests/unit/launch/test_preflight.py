"""`offbeat check` opens model and environment, and refuses what could not work, with the cure."""

import contextlib
import importlib.util
import json
import sys
import textwrap

import pytest

from launch import cli
from launch.cli import main
from launch.errors import ConfigError
from launch.model import make_tokenizer, save_tokenizer
from launch.preflight.environment import unread_notes
from launch.preflight.examine import preflight
from launch.preflight.memory import Gpu
from launch.run_file.load import check


@pytest.fixture
def path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.fixture
def model(tmp_path):
    """Folder of a model of 2,048 tokens, without weights."""
    folder = tmp_path / "model"
    save_tokenizer(make_tokenizer(["What is 1 + 1?", "What is 2 + 3?"]), folder, max_length=2048)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return folder


@pytest.fixture
def run(tmp_path, model, path):
    """Return a function that makes a run with an environment of its own file."""

    def make(
        prompt="'What is 1 + 1?'", step="return StepResult(rewards={'score': 0.0}, done=True)", **sections
    ):
        (tmp_path / "my_task.py").write_text(
            textwrap.dedent(
                f"""
                from envs.base import StepResult

                class Env:
                    async def reset(self, data):
                        assert data["split"] in ("train", "heldout")
                        return [{{"role": "user", "content": {prompt}}}]

                    async def step(self, action):
                        {step}

                    async def close(self):
                        pass

                class Suite:
                    def episode(self):
                        return Env()

                    async def close(self):
                        pass
                """
            )
        )
        settings = {
            "model": {"path": str(model)},
            "env": {"name": f"{tmp_path / 'my_task.py'}:Suite"},
            **sections,
        }
        return check(settings, "run.toml")

    return make


def test_a_reward_that_the_tried_answers_do_not_get_is_told_before_the_run(run):
    weighed = {"reward": {"weights": {"scor": 2.0, "score": 1.0}}}
    assert preflight(run(learner=weighed)) == [
        "learner.reward.weights.scor: the tried answers got no reward of this name; did you mean 'score'? (rewards: "
        "score); if it is right, list it in SuiteFacts.reward_names"
    ]
    assert preflight(run(step="return StepResult(done=True)", learner=weighed)) == [], (
        "nothing is known of its names"
    )


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        preflight(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_that_fits_passes_without_a_remark(run):
    assert preflight(run()) == []


def test_a_model_without_a_chat_template_is_refused(run, model):
    config = run()
    for file in model.glob("chat_template*"):
        file.unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no chat template; put one into chat_template.jinja" in refusal(config)


NUMBERED = "f'What is {data[\"index\"]} + 1?'"
RESCUE = {"replay": {"rule": "success", "max_policy_lag": 2}, "steps": 20, "batch_trajectories": 32}


def test_a_rescue_rule_on_tasks_that_do_not_come_again_is_told_with_their_share(run):
    (remark,) = preflight(run(prompt=NUMBERED, learner=RESCUE))
    assert remark.startswith(
        'learner.replay.rule is "success", which rescues a group by a success of the same prompt, but prompts come '
        "again in 0.0% of the first 80 groups within the replay's age (learner.replay.max_policy_lag = 2: 12 groups)"
    )
    assert "learner.selection" in remark


def test_a_list_of_tasks_that_comes_again_in_time_needs_no_remark(run):
    epochs = {"selection": {"kind": "epochs", "tasks": 4}}
    assert preflight(run(prompt=NUMBERED, learner=RESCUE | epochs)) == []
    assert preflight(run(learner=RESCUE)) == [], "all tasks are one"


def test_a_list_that_is_too_long_for_the_age_of_a_success_is_told(run):
    epochs = {"selection": {"kind": "epochs", "tasks": 80}}
    (remark,) = preflight(run(prompt=NUMBERED, learner=RESCUE | epochs))
    assert "of the first 80 groups" in remark


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ({"kind": "judge"}, "judgement"),
        ({"kind": "retry", "reflection": "Wrong: {attempt}", "note": "{reflection}"}, "reflection"),
    ],
)
def test_a_tiny_model_that_was_shown_no_lesson_is_told_of(run, family, what):
    config = run(learner={"family": family})
    tiny = run(model={"tiny": {}}, learner={"family": family})
    taught = run(model={"tiny": {"warm_start": {"lessons": True}}}, learner={"family": family})
    assert unread_notes(config) == unread_notes(taught) == []
    (remark,) = unread_notes(tiny)
    assert f"no {what} can be read; set model.tiny.warm_start.lessons = true" in remark


def test_a_tiny_model_that_follows_no_instruction_is_told_of(run):
    (remark,) = unread_notes(run(model={"tiny": {}}, learner={"selection": {"kind": "population"}}))
    assert "no instruction helps it; set model.tiny.warm_start.lessons = true" in remark


@pytest.mark.parametrize("path", ["nowhere", "./no/such/folder", "/no/folder"])
def test_a_path_that_is_neither_folder_nor_hub_name_is_refused(run, path):
    said = refusal(run(model={"path": path}))
    assert said.startswith(f"model.path is {path!r}: there is no such folder")


def test_a_model_folder_without_config_json_is_refused(run, model):
    (model / "config.json").unlink()
    assert "config.json" in refusal(run())


def test_a_length_beyond_the_models_own_is_refused(run):
    said = refusal(run(generator={"max_model_len": 100_000}))
    assert "generator.max_model_len is 100000, but the model's own limit is 2048" in said


def test_heads_that_cannot_be_divided_are_refused(run, model):
    described = {"max_position_embeddings": 2048, "num_attention_heads": 9}
    (model / "config.json").write_text(json.dumps(described))
    config = run()
    split = config.generator.model_copy(update={"tensor_parallel_size": 2})
    said = refusal(config.model_copy(update={"generator": split}))
    assert "tensor_parallel_size is 2, but the model has 9 attention heads" in said
    assert "use 1, 3 or 9" in said


def test_replayed_routes_need_a_mixture_of_experts(run, model):
    settings = run(learner={"algorithm": {"routes": "proximal", "updates_per_batch": 2}})
    assert f'routes is "proximal", but {model} is no mixture of experts' in refusal(settings)
    recording = run(generator={"routes": True})
    assert refusal(recording) == (
        f"generator.routes is true, but {model} is no mixture of experts, so there is no choice of experts to record; "
        "leave it out"
    )
    described = {"max_position_embeddings": 2048, "num_experts": 4}
    (model / "config.json").write_text(json.dumps(described))
    assert preflight(settings) == preflight(recording) == []


def test_experts_that_no_message_can_carry_are_refused_and_those_beyond_the_queue_are_said(run, model):
    described = {"max_position_embeddings": 2048, "num_experts": 4, "num_experts_per_tok": 8}
    settings = run(learner={"algorithm": {"routes": "behaviour"}})
    (model / "config.json").write_text(json.dumps({**described, "num_hidden_layers": 5_000}))
    assert "so a group of 8 of 1024 tokens (learner.sampling.max_trajectory_tokens) has 313 MiB" in refusal(
        settings
    )
    (model / "config.json").write_text(json.dumps({**described, "num_hidden_layers": 1_000}))
    (remark,) = preflight(settings)
    assert "broker.max_queued_bytes is 1024 MiB" in remark


def test_a_layout_of_gpus_is_shown_and_an_impossible_one_refused(run, monkeypatch):
    monkeypatch.setattr("launch.placement.torch_uses_gpus", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    config = run()
    monkeypatch.setattr("launch.preflight.hardware.try_gpus", lambda count: [Gpu()] * count)
    remarks = preflight(config)
    assert remarks[0] == "GPUs: learner 0, generator-0 1"
    assert remarks[1] == "learner: bfloat16, ZeRO stage 2"
    many = config.learner.model_copy(update={"processes": 3})
    assert "there are 2 GPUs" in refusal(config.model_copy(update={"learner": many}))


def test_a_prompt_without_room_for_an_answer_is_refused_with_all_numbers(run):
    said = refusal(run(prompt="'x' * (1500 if data['index'] == 5 else 3)"))
    assert "max_trajectory_tokens is 1024" in said
    assert "the first prompt of train task 5 has 150" in said
    assert "and generator.max_model_len (now 1024) to at least 15" in said
    assert "the model takes 2048; shorten it" in refusal(run(prompt="'x' * 2500"))
    assert "heldout task 0" in refusal(run(prompt="'x' * (1500 if data['split'] == 'heldout' else 3)"))


def test_a_prompt_that_cuts_answers_gives_a_remark_with_the_length_needed(run):
    (remark,) = preflight(run(prompt="'x' * 980"))
    assert "its answer is cut after" in remark
    assert "not after max_turn_tokens = 64" in remark


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("return {}['answer']", "my_task.py:10: KeyError: 'answer'"),
        ("return 0.5", 'step("") of train task 0 returned a float; it has to be an envs.base.StepResult'),
        ("return StepResult(rewards={'r': 'good'})", "reward 'r' is 'good', not a number"),
    ],
)
def test_an_environment_that_cannot_answer_is_refused(run, step, words):
    assert words in refusal(run(step=step))


def test_an_environment_that_does_not_answer_in_time_is_refused(run):
    step = "import asyncio; await asyncio.sleep(60)"
    said = refusal(run(step=step, actor={"env_timeout_s": 2.0}))
    assert "took longer than env_timeout_s = 2 s; it stands in" in said


def test_an_environment_that_cannot_take_an_empty_answer_gives_a_remark(run):
    remark, _ = preflight(run(step="action.split()[0]; return StepResult(rewards={'r': 1.0}, done=True)"))
    assert 'step("") of train task 0: ' in remark
    assert remark.endswith("IndexError: list index out of range; an empty answer fails its episode")


def test_a_reward_that_cannot_take_what_a_model_writes_gives_a_remark(run):
    step = "len(action) < 9 or action.split('####')[1]; return StepResult(rewards={'r': 1.0}, done=True)"
    remarks = preflight(run(step=step))
    assert len(remarks) == 2, "one for each split"
    assert "step('Let me think about this step b...') of train task 0: " in remarks[0]
    assert remarks[0].endswith("IndexError: list index out of range; such an answer fails its episode")


def test_an_environment_of_plain_functions_is_tried_too(run, tmp_path):
    config = run()
    file = tmp_path / "my_task.py"
    file.write_text(file.read_text().replace("async def", "def"))
    assert preflight(config) == []


def test_a_failing_reset_names_task_file_and_line(run):
    assert "env: reset of train task 0: " in refusal(run(prompt="data['question']"))
    assert "my_task.py:7: KeyError: 'question'" in refusal(run(prompt="data['question']"))


def test_the_default_length_of_a_trajectory_is_what_engine_and_learner_can_hold(run):
    assert run().learner.sampling.max_trajectory_tokens == 1024
    longer = run(generator={"max_model_len": 16_384}, learner={"sampling": {"max_turn_tokens": 32}})
    assert longer.learner.sampling.max_trajectory_tokens == 8192
    assert longer.learner.sampling.max_turn_tokens == 32
    for learner in (3, {"sampling": 3}, {"micro_batch_tokens": "many"}):
        with pytest.raises(ConfigError, match="learner"):
            run(learner=learner)


def test_check_says_remarks_and_passes(tmp_path, run, model, capsys, monkeypatch):
    # On a slow machine it says what it waits for.
    monkeypatch.setattr(cli, "said_if_slow", lambda *_: contextlib.nullcontext())
    run(prompt="'x' * 980")
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{model}"\n[env]\nname = "{tmp_path / "my_task.py"}:Suite"\n')
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr()
    assert "note: the first prompt" in said.out
    assert said.out.endswith(": ok (run run, mode async)\n")
    assert said.err == ""


GOES_ON = "return StepResult({'role': 'tool', 'content': '7'})"


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            {"targets": ["v_proj", "value"]},
            "learner.lora.targets has 'value', which no linear layer of the model is",
        ),
        (
            {"rank": 100},
            "learner.lora.rank is 100, but the weight of model.layers.0.self_attn.q_proj is 64 x 32",
        ),
        ({"targets": "lm_head"}, "whose weight is also model.embed_tokens.weight"),
        ({"rank": 16}, ""),
    ],
)
def test_adapters_are_tried_with_the_models_config_alone(run, model, lora, words):
    config = {
        "model_type": "qwen3",
        "max_position_embeddings": 2048,
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "architectures": ["Qwen3ForCausalLM"],
    }
    (model / "config.json").write_text(json.dumps(config))
    settings = run(learner={"lora": lora})
    assert words in refusal(settings) if words else preflight(settings) == []


def test_adapters_without_peft_are_refused_with_the_command_that_installs_it(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    said = refusal(run(learner={"lora": {}}))
    assert said.endswith("needs the package peft, which is not installed: pip install '.[learner,lora]'")


def test_adapters_that_cannot_be_tried_without_the_learner_give_a_remark(run):
    [remark] = preflight(run(learner={"lora": {}}))
    assert "could not be tried before the learner tries it: ValueError: Unrecognized model" in remark


def test_an_evaluation_needs_no_adapters(run):
    settings = run(learner={"lora": {}})
    assert (
        preflight(settings.model_copy(update={"learner": settings.learner.model_copy(update={"steps": 0})}))
        == []
    )


def test_a_template_that_leaves_out_the_messages_of_a_step_is_refused(run, model):
    template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}<eos>{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    said = refusal(run(step=GOES_ON))
    assert said.startswith("env: the second turn of an episode: chat template of ")
    assert (
        "leaves out a 'tool' message that follows an answer; use a template that takes such messages" in said
    )


def test_a_template_that_goes_on_passes_and_one_that_drops_thoughts_gets_a_remark(run, model):
    assert preflight(run(step=GOES_ON)) == []
    drops = "{% for m in messages %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}<eos>{% endfor %}"
    (model / "chat_template.jinja").write_text(drops)
    (remark,) = preflight(run(step=GOES_ON))
    assert "leaves out the thought of an earlier answer once 'tool' messages follow" in remark


def test_template_arguments_reach_the_template_and_reserved_names_are_refused(run, model):
    (model / "chat_template.jinja").write_text(
        "{{ opening }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    settings = {"path": str(model), "template_args": {"opening": "x" * 1500}}
    assert "has 15" in refusal(run(model=settings))
    settings["template_args"] = {"messages": []}
    assert "model.template_args: messages: Offbeat itself gives this to the template" in refusal(
        run(model=settings)
    )


def test_schemas_of_tools_without_a_name_are_refused(run, tmp_path):
    config = run()
    file = tmp_path / "my_task.py"
    tools = "    def tool_schemas(self):\n        return [{'name': 'add'}]\n\n    async def step"
    file.write_text(file.read_text().replace("    async def step", tools))
    said = refusal(config)
    assert said.startswith(
        "env: tool_schemas of train task 0 returned [{'name': 'add'}]; it has to be a list of "
    )


def test_a_template_that_leaves_out_tools_which_the_prompt_names_gets_a_remark(run, tmp_path):
    config = run(prompt="'Call add for 1 + 1.'", step=GOES_ON)
    file = tmp_path / "my_task.py"
    tools = (
        "    def tool_schemas(self):\n        return [{'function': {'name': 'add'}}]\n\n    async def step"
    )
    file.write_text(file.read_text().replace("    async def step", tools))
    (remark,) = preflight(config)
    assert "the chat template leaves out the tools, for example 'add'; describe them in the prompt" in remark


UNKNOWN_TOOLS = (
    "env: the chat template leaves out the tools, for example 'add', and the prompt of train task 0 does not name "
    "them, so the model cannot know them; take a model whose template writes tools, or describe them in the prompt, "
    "with the form of a call"
)


def adding_tools(tmp_path):
    """Return the environment `tools` with a tool `add`, of which the prompt says nothing."""
    (tmp_path / "adding.py").write_text(
        "def add(a: int, b: int) -> int:\n"
        '    """Add two numbers."""\n'
        "    return a + b\n\n"
        "def right(answer, row):\n"
        "    return 1.0\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1 + 1?"}\n' * 20)
    params = {
        "train": "rows.jsonl",
        "prompt": "{prompt}",
        "tools": "adding.py:add",
        "reward": "adding.py:right",
    }
    params = {
        name: f"{tmp_path}/{v}" if v.endswith(("jsonl", ":add", ":right")) else v
        for name, v in params.items()
    }
    return {"name": "tools", "params": params}


ADDING_AGENT = """
import json, urllib.error, urllib.request

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

def run(row, base_url, api_key):
    for question, tools in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "tools": tools}
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            error.close()
            break
    return 1.0
"""


def adding_agent(tmp_path, questions='[("What is 1 + 1?", [TOOL])]'):
    """Return the environment `agent` with a tool `add`, of which its requests say nothing."""
    (tmp_path / "adding_agent.py").write_text(ADDING_AGENT.replace("QUESTIONS", questions))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(20)))
    params = {"run": f"{tmp_path}/adding_agent.py:run", "train": f"{tmp_path}/rows.jsonl"}
    return {"name": "agent", "params": params}


@pytest.mark.parametrize("door", [adding_tools, adding_agent])
def test_tools_of_both_doors_that_nothing_tells_are_refused_alike(model, tmp_path, path, door):
    settings = {"model": {"path": str(model)}, "env": door(tmp_path)}
    assert refusal(check(settings, "run.toml")) == UNKNOWN_TOOLS


def test_tools_behind_an_agents_title_are_refused_too(model, tmp_path, path):
    env = adding_agent(tmp_path, '[("A title?", []), ("What is 1 + 1?", [TOOL])]')
    found = refusal(check({"model": {"path": str(model)}, "env": env}, "run.toml"))
    assert found == UNKNOWN_TOOLS.replace("train task 0", "a request of train task 0")


def test_an_agents_tools_that_its_prompt_names_get_a_remark(model, tmp_path, path):
    asked = '[("Call add for 1 + 1.", [TOOL])]'
    (tmp_path / "adding_agent.py").write_text(ADDING_AGENT.replace("QUESTIONS", asked))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(20)))
    params = {"run": f"{tmp_path}/adding_agent.py:run", "train": f"{tmp_path}/rows.jsonl"}
    settings = {"model": {"path": str(model)}, "env": {"name": "agent", "params": params}}
    remarks = preflight(check(settings, "run.toml"))
    assert [
        remark for remark in remarks if "the chat template leaves out the tools, for example 'add'" in remark
    ]


READS = """
                        mode = {"i": "instant", "a": "agentic"}.get(action[:1], "none")
                        return StepResult(rewards={"answer": 0.0}, done=True, marks={"mode": mode})
"""


def modes(**openings):
    group = {"kind": "modes", "reward": "answer", "openings": openings, "cheap": "instant", "each": 1}
    return {"reward": {"group": group}, "group_size": 3, "batch_trajectories": 12}


def test_modes_are_tried_before_the_run(run):
    preflight(run(step=READS, learner=modes(instant="i", agentic="a")))
    with pytest.raises(
        ConfigError, match=r'openings\.agentic is "b", but .* the mark \'mode\' \'none\'; it has to read'
    ):
        preflight(run(step=READS, learner=modes(instant="i", agentic="b")))
    with pytest.raises(ConfigError, match=r'openings\.instant is "i", but .* begins so no mark \'mode\''):
        preflight(run(learner=modes(instant="i", agentic="a")))


def test_an_opening_that_the_tokenizer_does_not_keep_is_refused(run):
    with pytest.raises(ConfigError, match=r"openings\.agentic is .*, which the tokenizer reads back as "):
        preflight(run(step=READS, learner=modes(instant="i", agentic="a\u2603")))


def test_an_opening_that_leaves_no_room_is_refused(run):
    sampling = {"max_trajectory_tokens": 48, "max_turn_tokens": 8}
    long = modes(instant="i" * 40, agentic="a") | {"sampling": sampling}
    with pytest.raises(ConfigError, match=r"the words of learner\.reward\.group\.openings\.instant 4\d, "):
        preflight(run(step=READS, learner=long))
