"""Environments of skyrl-gym are episodes. Tests that play one need the package."""

import json
import sys

import pytest

from envs.errors import EnvError
from envs.registry import beside, files_of, make_suite


def row(question, answer, **more):
    message = {"role": "user", "content": question}
    return {"prompt": [message], "reward_spec": {"ground_truth": answer}, **more}


@pytest.fixture
def train(tmp_path):
    def write(*rows):
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "train.jsonl")

    return write


def suite_of(train, **params):
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    return make_suite("skyrl_gym", {"train": train, "heldout": 0.0, **params})


def played(suite, *actions):
    env = suite.episode()
    try:
        messages = env.reset({"index": 0, "split": "train"})
        return messages, [env.step(action) for action in actions]
    finally:
        env.close()


def test_a_row_names_its_environment(train):
    suite = suite_of(train(row("2 + 2?", "4", env_class="gsm8k")))
    messages, [right] = played(suite, "It is 4.\n#### 4")
    assert messages == [{"role": "user", "content": "2 + 2?"}]
    assert (right.rewards, right.done, right.correct) == ({"reward": 1.0}, True, True)
    assert right.info["row"].endswith("train.jsonl:1")
    _, [wrong] = played(suite, "#### 5")
    assert (wrong.rewards, wrong.correct) == ({"reward": 0.0}, False)


def test_an_environment_of_several_turns_observes(train):
    suite = suite_of(train(row("2 + 2?", "4")), env_class="gsm8k_multi_turn", max_turns=3)
    _, [first, last] = played(suite, "#### 5", "#### 4")
    assert not first.done
    assert [message["role"] for message in first.messages()] == ["user"]
    assert first.correct is None
    assert (last.rewards["reward"], last.done, last.correct, last.messages()) == (1.0, True, True, [])


def test_what_is_missing_is_named(train):
    rows = train(row("2 + 2?", "4"))
    with pytest.raises(EnvError, match="the rows have no column 'env_class'"):
        suite_of(rows)
    with pytest.raises(EnvError, match=r"train.jsonl:1: environment 'gsm9k': "):
        played(suite_of(rows, env_class="gsm9k"))
    with pytest.raises(EnvError, match="reward_spec"):
        played(suite_of(train({"prompt": "2 + 2?"}), env_class="gsm8k"))


def test_the_rows_are_found_beside_the_run_file(train, tmp_path):
    train(row("2 + 2?", "4"))
    _, params = beside("skyrl_gym", {"train": "train.jsonl"}, tmp_path)
    assert files_of("skyrl_gym", params) == [str(tmp_path / "train.jsonl")]


def test_without_the_package_the_cure_is_named(monkeypatch, train):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(EnvError, match=r"needs the package skyrl-gym.*pip install skyrl-gym"):
        make_suite("skyrl_gym", {"train": train(row("2 + 2?", "4"))})
