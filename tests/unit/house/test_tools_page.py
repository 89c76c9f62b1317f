"""The job on the page docs/run/tools.md passes `offbeat check`, word for word, and its tools do what it says."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import launch.preflight.engine_trial
from envs.registry import make_suite
from launch.cli import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "run" / "tools.md").read_text()


def block(language, nth=0):
    """Return the n-th block of code of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[nth]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Write the files of the page, and a model folder with the template of Qwen3."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    # The model has no weights here; tests/integration/launch/test_engine_trial.py has the trial.
    monkeypatch.setattr(launch.preflight.engine_trial, "try_engine", lambda config, folder: [])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    model = tmp_path / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    template(model, "qwen3")
    (tmp_path / "train.jsonl").write_text(block("json"))
    (tmp_path / "counter.py").write_text(block("python"))
    (tmp_path / "counter.toml").write_text(block("toml"))
    return ["check", "counter.toml", f"model.path={model}", "generator.max_model_len=4096"]


def template(model, name):
    (model / "chat_template.jinja").write_text((ROOT / "tests/chat_templates" / f"{name}.jinja").read_text())


def test_the_whole_job_passes_check(job, capsys):
    assert main(job) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "counter.toml: ok (run run, mode async)"
    assert err == ""


def test_check_refuses_a_template_that_does_not_take_tools(job, tmp_path, capsys):
    template(tmp_path / "model", "phi3")
    assert main(job) == 1
    assert "the chat template leaves out the tools, for example 'add'" in capsys.readouterr().err


def test_check_refuses_a_template_that_does_not_take_tool_results(job, tmp_path, capsys):
    path = tmp_path / "model" / "chat_template.jinja"
    path.write_text(path.read_text().replace('message.role == "tool"', 'message.role == "nobody"'))
    assert main(job) == 1
    said = capsys.readouterr().err
    assert "env: the second turn of an episode: chat template of " in said
    assert (
        "leaves out a 'tool' message that follows an answer; use a template that takes such messages" in said
    )


def test_the_job_rewards_what_it_says(job, tmp_path):
    (tmp_path / "counter.py").write_text(block("python") + block("python", 1))
    suite = make_suite(
        "tools", {"train": "train.jsonl", "tools": "counter.py:Counter", "reward": "counter.py:at_goal"}
    )
    episode = suite.episode()
    (message,) = episode.reset({"index": 0, "split": "train"})
    goal, start = map(int, re.findall(r"\d+", message["content"]))
    call = json.dumps({"name": "add", "arguments": {"number": goal - start}})
    (result,) = episode.step(f"<tool_call>{call}</tool_call>").messages()
    assert result["content"] == str(goal)
    assert episode.step("Done.").rewards == {"reward": 1.0, "at_goal": 1.0}
    asyncio.run(suite.close())
