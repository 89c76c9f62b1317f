"""Environments of gymnasium are played in words. Tests that make one need the package."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from envs.errors import EnvError
from envs.gym.suite import action_names, finder, plain, refuse_large, written
from envs.registry import beside, files_of, make_suite
from launch.cli import main
from launch.model import make_tokenizer, save_tokenizer
from tests.unit.envs.playing import played

LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False, "render_mode": "ansi"},
    "actions": ["left", "down", "right", "up"],
}
WAY = ["I go down.", "down", "Right", "right", "Not left: down", "right"]
"""The shortest way over the lake that the package draws."""

OWN = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Guess(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (8, 8, 3), np.uint8)
    action_space = spaces.MultiDiscrete([3, 3])

    def __init__(self, low=0):
        self.low = low

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.np_random.integers(self.low, 3, 2)
        return np.zeros((8, 8, 3), np.uint8), {"hint": int(self.goal[0])}

    def step(self, action):
        right = float((action == self.goal).all())
        return np.zeros((8, 8, 3), np.uint8), right, bool(right), False, {"hint": int(self.goal[1])}


def see(observation, info):
    return f"hint {info['hint']}, mean {observation.mean():.1f}"


def pair(text):
    words = text.split()
    return np.array([int(word) for word in words]) if len(words) == 2 else None
"""


def gymnasium():
    return pytest.importorskip("gymnasium", reason="the extra gym is not installed")


def test_the_way_over_the_lake_is_a_solved_episode():
    gymnasium()
    suite = make_suite("gymnasium", LAKE)
    texts, results = played(suite, WAY)
    assert texts[0].startswith("[S]FFF\nFHFH\nFFFH\nHFFG\n\nActions: left, down, right, up.")
    assert texts[1].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [result.done for result in results] == [False] * 5 + [True]
    assert [result.rewards["reward"] for result in results] == [0.0] * 5 + [1.0]
    last = results[-1]
    assert (last.correct, last.observation) == (True, None)
    assert last.info == {"end": "terminated", "return": 1.0, "steps": 6, "unknown_actions": 0}


def test_a_hole_ends_the_episode_unsolved_and_a_text_without_an_action_does_not_move():
    gymnasium()
    suite = make_suite("gymnasium", LAKE)
    texts, results = played(suite, ["", "up or leftwards?", "down", "right"])
    assert texts[1] == "This names no action. Actions: left, down, right, up."
    assert suite.gauges() == {"actions_unknown_total": 1.0}
    assert (results[-1].done, results[-1].correct) == (True, False)
    assert results[-1].info["unknown_actions"] == 1


def test_a_limit_of_time_ends_the_episode_too():
    gymnasium()
    suite = make_suite(
        "gymnasium", {**LAKE, "kwargs": {**LAKE["kwargs"], "max_episode_steps": 2}, "solved_at": 0.0}
    )
    _, results = played(suite, ["left", "left"])
    assert [result.info["end"] for result in results] == ["open", "truncated"]
    assert results[-1].done
    assert results[-1].correct is True


def test_an_index_is_a_seed_and_held_out_tasks_have_others():
    gymnasium()
    suite = make_suite(
        "gymnasium", {"id": "CartPole-v1", "prompt": "{observation} {actions}", "role": "user"}
    )

    def first(index, split="train"):
        return played(suite, ["1"], index, split)

    assert first(0)[0] == first(0)[0]
    assert len({first(index, split)[0][0] for index in range(4) for split in ("train", "heldout")}) == 8
    text = first(0)[0][0]
    assert text.startswith(("[0.0", "[-0.0"))
    assert text.endswith("] 0, 1")
    assert first(0)[1][0].messages()[0]["role"] == "user"
    assert {suite.seed_of(index, "train") % 2 for index in range(50)} == {0}
    assert {suite.seed_of(index, "heldout") % 2 for index in range(50)} == {1}


def test_code_of_the_user_makes_sees_and_acts(tmp_path):
    gymnasium()
    (tmp_path / "guess.py").write_text(OWN)
    params = {"id": "guess.py:Guess", "observe": "guess.py:see", "parse": "guess.py:pair"}
    name, found = beside("gymnasium", {**params, "kwargs": {"low": 2}}, tmp_path)
    assert files_of(name, found) == [str(tmp_path / "guess.py")] * 3
    suite = make_suite(name, found)
    texts, results = played(suite, ["2", "1 1", "2 2"])
    assert texts == ["hint 2, mean 0.0", "This is no action.", "hint 2, mean 0.0"]
    assert results[-1].done
    assert results[-1].correct is None, "nothing says from which return on it is solved"
    assert "solved_at" in suite.facts().remarks[0]


WRONG = {
    "no such environment": ({"id": "FrozenPond-v1"}, "cannot be made: .*FrozenPond"),
    "a wrong argument": ({"id": "FrozenLake-v1", "kwargs": {"slippery": 1}}, "cannot be made: .*slippery"),
    "too few names": ({**LAKE, "actions": ["left"]}, "has 4 actions"),
    "equal names": ({**LAKE, "actions": ["a", "b", "c", "A"]}, "a name of its own"),
    "a field": ({**LAKE, "observation": "{state}"}, r"params.observation = '\{state\}': 'state'"),
    "a role": ({**LAKE, "role": "system"}, "tool, user"),
    "actions of real numbers": ({"id": "Pendulum-v1"}, "params.parse: .* actions of Box"),
    "names of real numbers": ({"id": "Pendulum-v1", "actions": ["a"]}, "of a Box space have no names"),
}


@pytest.mark.parametrize(("params", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_named(params, why):
    gymnasium()
    with pytest.raises(EnvError, match=why):
        make_suite("gymnasium", params)


def test_the_run_file_of_the_page_is_ok(tmp_path, capsys):
    gymnasium()
    page = Path(__file__).parents[3] / "docs" / "run" / "gymnasium.md"
    block = page.read_text().partition("```toml\n")[2].partition("```")[0]
    save_tokenizer(make_tokenizer(["[S]FFF"]), tmp_path / "model", max_length=2048)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (tmp_path / "lake.toml").write_text(block.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model")))
    assert main(["check", str(tmp_path / "lake.toml")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("lake.toml: ok (run run, mode async)")


def test_without_the_package_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(EnvError, match=r"needs the package gymnasium.*pip install '.\[gym\]'"):
        make_suite("gymnasium", {"id": "FrozenLake-v1"})


def box(*shape):
    return type("Box", (), {"shape": shape})()


def test_images_need_a_function():
    refuse_large(box(8, 8))
    refuse_large(SimpleNamespace(spaces={"at": box(2), "goal": box()}))
    for space in (box(8, 9), SimpleNamespace(spaces=(box(2), box(210, 160, 3))), type("Graph", (), {})()):
        with pytest.raises(EnvError, match=r"params.observe: .*file.py:function"):
            refuse_large(space)


def test_texts():
    """Numbers are short, and marks of terminals become brackets."""
    assert written([0.123456, -1e-9, True]) == "[0.1235, -1e-09, True]"
    assert plain("\x1b[43mA\x1b[0m\x1b[1mB\x1b[22mC") == "[A]BC"
    names = action_names(SimpleNamespace(n=12, start=0), [])
    assert finder(names)("first 1, then 11.") == 11
    assert finder({"a.c": 0, "abc": 1})("abc") == 1


def test_every_turn_is_marked_with_the_state_it_acted_in():
    gymnasium()
    suite = make_suite("gymnasium", LAKE | {"kwargs": {"is_slippery": False}})
    texts, results = played(suite, ["down", "no idea", "up", "down"])
    seen = [result.marks["anchor"] for result in results]
    # A turn without an action leaves the state as it was; a state that is met again has the mark it had before.
    assert seen == ["0", "4", "4", "0"]
    assert texts[0].startswith("0\n")
    assert suite.facts().mark_names == ("anchor",)


def test_a_long_state_is_marked_with_a_hash():
    gymnasium()
    small = make_suite("gymnasium", LAKE)
    large = make_suite("gymnasium", LAKE | {"kwargs": {"render_mode": "ansi", "map_name": "8x8"}})
    wide = {"kwargs": {"render_mode": "ansi", "desc": ["S" + "F" * 150, "F" * 150 + "G"]}}
    (first,), (second,), (third,) = (
        played(suite, ["left"])[1] for suite in (small, large, make_suite("gymnasium", LAKE | wide))
    )
    assert first.marks["anchor"].startswith("[S]FFF")
    assert second.marks["anchor"].startswith("[S]FFFFFFF")
    assert len(third.marks["anchor"]) == 32
