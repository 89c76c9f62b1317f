"""A tiny model is made once, loads with from_pretrained, and its examples are what an actor would build."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.render import Renderer
from launch.conversations import demonstrations, example
from launch.errors import ConfigError
from launch.logs import libraries_to_stderr
from launch.model import prepare
from launch.run_file.load import check
from learner.warmstart import share_solved


def run_file(cache, **tiny):
    warm = {"steps": 10, "batch": 8, "demonstrations": 60, **tiny.pop("warm_start", {})}
    return check(
        {
            "model": {
                "cache": str(cache),
                "tiny": {"hidden_size": 32, "layers": 1, "warm_start": warm, **tiny},
            },
            "env": {"name": "calculator"},
            "learner": {"sampling": {"max_turn_tokens": 12, "max_trajectory_tokens": 96}},
        },
        "test",
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    return prepare(run_file(cache)), cache


def test_it_loads_the_ordinary_way(made):
    folder, _ = made
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_it_is_made_once_and_again_only_for_other_settings(made):
    folder, cache = made
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare(run_file(cache)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert prepare(run_file(cache, seed=1)) != folder


def test_our_rendering_equals_transformers(made):
    folder, _ = made
    talk = [{"role": "user", "content": "4 + 3 ="}, {"role": "assistant", "content": "4+3"}]
    talk += [{"role": "tool", "content": "7"}, {"role": "assistant", "content": "=7"}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
    ids, learnt = example(Renderer(folder), talk)
    assert ids == theirs
    chosen = [i for i, mask in zip(ids, learnt, strict=True) if mask]
    assert tokenizer.decode(chosen) == "4+3<eos>=7<eos>"


def test_what_a_warm_start_solves_is_what_greedy_decoding_solves(made):
    """The one-pass measure equals decoding token by token along the true observations."""
    import torch

    folder, _ = made
    model = AutoModelForCausalLM.from_pretrained(folder)
    renderer = Renderer(folder)
    talks = [
        [{"role": "user", "content": "4 + 3 ="}, {"role": "assistant", "content": c}] for c in ("", "7", "12")
    ]
    examples = [example(renderer, talk) for talk in talks]
    slow = 0
    for ids, learnt in examples:
        start = learnt.index(True)
        written = ids[:start]
        for _ in ids[start:]:
            with torch.no_grad():
                written.append(int(model(torch.tensor([written])).logits[0, -1].argmax()))
        slow += written == ids
    assert share_solved(model, examples) == slow / len(examples)


def test_a_question_is_its_messages_before_the_first_answer():
    class Tools:
        """Questions behind one system message, which one result of a tool answers."""

        def demonstration(self, index, split):
            return [
                {"role": "system", "content": "Use the tool."},
                {"role": "user", "content": f"question {min(index, 1)}"},
                {"role": "assistant", "content": "call"},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "42"},
            ]

    talks = list(demonstrations(Tools(), 3).values())
    assert [talk[1]["content"] for talk in talks] == ["question 0", "question 1"]


def test_two_answers_to_one_question_are_two_demonstrations():
    """Random walks begin alike. A model that saw one walk of each lake would know no other action."""

    class Walks:
        def demonstration(self, index, split):
            answer = {"role": "assistant", "content": "lr"[index % 2]}
            return [{"role": "user", "content": "A"}, answer, {"role": "user", "content": "B"}, answer]

    assert [talk[1]["content"] for talk in demonstrations(Walks(), 4).values()] == ["l", "r"]


def test_a_suite_without_solutions_and_an_unknown_model_are_refused():
    class Silent:
        def demonstration(self, index, split):
            raise LookupError("no solution")

    with pytest.raises(ConfigError, match=r"set model\.path"):
        demonstrations(Silent(), 3)
    with pytest.raises(ConfigError, match="neither a folder nor a model"):
        prepare(check({"model": {"path": "no/such-model"}, "env": {"name": "calculator"}}, "test"))


def test_the_configuration_names_the_tokens(made):
    folder, _ = made
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<eos>"
    assert "chat_template" in config


def test_a_model_that_is_named_takes_the_place_of_a_tiny_one(made):
    folder, cache = made
    config = run_file(cache)
    named = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    assert prepare(named) == folder


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "run" / "security.md"


def test_the_first_command_of_the_page_on_two_hosts_works_on_an_empty_cache(tmp_path):
    """Its output is for ``$(...)``: one line, whatever DeepSpeed prints while it is imported."""
    (command,) = re.findall(r'cp -r "\$\(offbeat model \w+\)" model', PAGE.read_text())
    programs = tmp_path / "bin"
    programs.mkdir()
    offbeat = programs / "offbeat"
    small = "model.tiny.warm_start.steps=2 model.tiny.warm_start.demonstrations=16 model.tiny.layers=1"
    seen = f'| tee "{tmp_path}/seen"'
    offbeat.write_text(f'#!/bin/sh\n"{sys.executable}" -m launch.cli "$@" {small} {seen}\n')
    offbeat.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    # With it, as the tests have it, DeepSpeed does not warn.
    env.pop("DS_ACCELERATOR", None)
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (tmp_path / "seen").read_text().splitlines()
    assert (tmp_path / line).is_dir()
    assert (tmp_path / "model" / "model.safetensors").is_file()
    # Nothing is written in the fashion of a terminal, and what libraries say is not lost.
    assert "model" in done.stderr


def test_what_libraries_print_is_no_answer(capfd):
    with libraries_to_stderr():
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run(["echo", "from a process"], check=True)
        handler = logging.StreamHandler(sys.stdout)
    sys.stdout.write("the answer\n")
    handler.stream.write("from a handler that stays\n")
    out, err = capfd.readouterr()
    assert out == "the answer\n"
    assert set(err.splitlines()) == {"from Python", "from C", "from a process", "from a handler that stays"}
