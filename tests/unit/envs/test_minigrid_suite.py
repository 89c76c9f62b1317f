"""Rooms of MiniGrid are played in words. Tests that make one need the package."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.errors import EnvError
from envs.gym import minigrid as rooms_module
from envs.registry import make_suite
from launch.cli import main
from launch.model import make_tokenizer, save_tokenizer
from launch.run_file.load import load
from tests.unit.envs.playing import played

PAGE = Path(__file__).parents[3] / "docs" / "run" / "gymnasium.md"

DOORS = {"id": "MiniGrid-DoorKey-5x5-v0", "actions": ["left", "right", "forward", "pickup", "toggle"]}
SMALL = {**DOORS, "form": "letters", "kwargs": {"max_steps": 24}}
FIRST = """\
#####
#.#.#
#kL.#
#<#G#
#####
There is: locked yellow door at 2,2; green goal at 3,3; yellow key at 1,2.
You are at 1,3, look left and carry nothing.
Task: use the key to open the door and then get to the goal.

Actions: left, right, forward, pickup, toggle. Answer with one of them."""
WAY = ["right", "pickup", "forward", "right", "toggle", "forward", "forward", "right", "forward"]
"""The way through the room of `FIRST`."""


def minigrid():
    return pytest.importorskip("minigrid", reason="the extra minigrid is not installed")


def demonstrated(suite, index=0, split="train"):
    talk = suite.demonstration(index, split)
    return [message["content"] for message in talk if message["role"] == "assistant"]


def test_a_door_is_opened_with_its_key_and_the_goal_pays():
    minigrid()
    suite = make_suite("minigrid", DOORS)
    texts, results = played(suite, WAY)
    assert texts[0] == FIRST
    assert "at 2,2; green goal at 3,3.\nYou are at 1,3, look up and carry a yellow key." in texts[2]
    assert texts[5].startswith("#####\n#.#.#\n#>/.#\n#.#G#\n#####\nThere is: open yellow door at 2,2;")
    assert [result.done for result in results] == [False] * 8 + [True]
    # MiniGrid's own reward: 1 - 0.9 * steps / limit, where this room's limit is 250 steps.
    assert [result.rewards["reward"] for result in results] == [0.0] * 8 + [pytest.approx(1 - 0.9 * 9 / 250)]
    assert results[-1].correct is True


def test_a_locked_door_stays_shut_without_the_key_and_time_ends_unpaid():
    minigrid()
    texts, results = played(make_suite("minigrid", SMALL), list("rrft" * 6))
    assert texts[0] == "g<-LeGikd"
    assert {text[3:5] for text in texts} == {"Le"}
    assert (results[-1].done, results[-1].correct, results[-1].info["end"]) == (True, False, "truncated")
    assert sum(result.rewards["reward"] for result in results) == 0.0


def test_letters_tell_all_that_changes():
    minigrid()
    texts, results = played(make_suite("minigrid", SMALL), [action[0] for action in WAY])
    assert texts == [
        "g<-LeGikd", "g^-LeGikd", "g^kLeGi", "d^kLeGi", "d>kLeGi", "d>k/eGi", "e>k/eGi", "f>k/eGi", "fvk/eGi",
    ]  # fmt: skip
    # The mark of a turn is the state that it acted in.
    assert [result.marks["anchor"] for result in results] == texts
    assert results[-1].correct is True


def test_members_of_a_group_meet_one_state_and_a_step_count_is_no_part_of_it():
    minigrid()
    suite = make_suite("minigrid", SMALL)
    for split in ("train", "heldout"):
        first, second = (played(suite, actions, 3, split)[1] for actions in ("llrr", "rl"))
        assert first[0].marks == second[0].marks
        marks = [result.marks["anchor"] for result in first]
        assert marks[1] == marks[3]
    assert suite.facts().mark_names == ("anchor",)


def test_an_index_is_a_seed_and_equal_seeds_are_equal_rooms():
    minigrid()
    large = {**DOORS, "id": "MiniGrid-DoorKey-8x8-v0"}
    suite, again = make_suite("minigrid", large), make_suite("minigrid", large)
    tasks = [(index, split) for index in range(4) for split in ("train", "heldout")]
    shown = [played(suite, [], *task)[0][0] for task in tasks]
    assert shown == [played(again, [], *task)[0][0] for task in tasks]
    assert len(set(shown)) == 8
    other = make_suite("minigrid", {**large, "seed": 1})
    assert played(other, [], 0)[0][0] != shown[0]


@pytest.mark.parametrize(
    "id",
    [
        "MiniGrid-DoorKey-5x5-v0",
        "MiniGrid-LavaGapS5-v0",
        "MiniGrid-Unlock-v0",
        "MiniGrid-Empty-Random-5x5-v0",
    ],
)
def test_every_room_is_solved_by_its_demonstration(id):
    minigrid()
    suite = make_suite("minigrid", {**DOORS, "id": id})
    for index in range(2):
        _, results = played(suite, demonstrated(suite, index), index)
        assert results[-1].correct is True
        assert not any(result.done for result in results[:-1])


def test_the_demonstrated_way_is_a_shortest_one_and_slips_leave_it():
    minigrid()
    assert demonstrated(make_suite("minigrid", SMALL)) == [action[0] for action in WAY]
    some, all_slips = (make_suite("minigrid", {**SMALL, "slips": slips}) for slips in (0.5, 1.0))
    talks = [some.demonstration(index, "train") for index in range(40)]
    arrived = sum(len(some._walk(np.random.default_rng(i), 0)[1]) < 24 for i in range(40))
    assert 5 < arrived < 40, "whoever slips half the time often arrives, and not always"
    assert talks[5] == some.demonstration(5, "train")
    assert len({str(talk) for talk in talks}) == 40
    assert {action for i in range(4) for action in demonstrated(all_slips, i)} == set("lrfpt")


def test_trying_out_a_room_leaves_it_as_it_is():
    minigrid()
    suite = make_suite("minigrid", SMALL)
    env = suite.make()
    before, _ = env.reset(seed=suite.seed_of(0, "train"))
    # The agent turns around and back, so it has taken four steps.
    for _ in range(4):
        text = env.step(0)[0]
    best = env.ways()
    assert (text, env.state() in best) == (before, True)
    # Neither the state nor the steps that were taken are lost: 24 - 4 more steps end the episode.
    ends = [env.step(0)[3] for _ in range(20)]
    assert ends == [False] * 19 + [True]


def test_a_room_without_a_way_and_one_with_too_many_states_have_no_demonstration(monkeypatch):
    minigrid()
    with pytest.raises(LookupError, match="no way leads"):
        make_suite("minigrid", {**DOORS, "actions": ["left", "right", "forward"]}).demonstration(0, "train")
    monkeypatch.setattr(rooms_module, "MOST_STATES", 10)
    with pytest.raises(LookupError, match="more than 10 states"):
        make_suite("minigrid", DOORS).demonstration(0, "train")


WRONG = {
    "no such room": ({"id": "MiniGrid-Doors-v0"}, "cannot be made: .*MiniGrid-Doors"),
    "another environment": ({"id": "CartPole-v1"}, 'no room of MiniGrid; env.name = "gymnasium"'),
    "a form": ({**DOORS, "form": "image"}, "params.form = 'image': write one of drawing, letters"),
    "an action": ({**DOORS, "actions": ["left", "jump"]}, "no action 'jump'; there are left, right"),
    "one letter": ({**SMALL, "actions": ["drop", "done"]}, "leave drop or done out"),
    "slips": ({**DOORS, "slips": 1.5}, "params.slips = 1.5: write a share, 0 to 1"),
    "too many cells": (
        {"id": "MiniGrid-FourRooms-v0", "form": "letters"},
        "a room of 17 by 17 cells has more than 62",
    ),
}


@pytest.mark.parametrize(("params", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_named(params, why):
    minigrid()
    with pytest.raises(EnvError, match=why):
        make_suite("minigrid", params)


def test_a_large_room_is_drawn_and_has_no_letters():
    minigrid()
    texts, _ = played(make_suite("minigrid", {"id": "MiniGrid-FourRooms-v0"}), ["forward"])
    assert len(texts[0].splitlines()[0]) == 19


@pytest.fixture
def job(tmp_path):
    """Return the run file of the page, with a tokenizer in place of its model's."""
    block = PAGE.read_text().partition("## MiniGrid as text")[2].partition("```toml\n")[2].partition("```")[0]
    save_tokenizer(make_tokenizer([FIRST]), tmp_path / "model", max_length=8192)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    (tmp_path / "doors.toml").write_text(block.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model")))
    return str(tmp_path / "doors.toml")


def test_the_run_file_of_the_page_is_ok_and_its_texts_are_real(job, capsys):
    minigrid()
    assert main(["check", job]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("doors.toml: ok (run run, mode async)")
    texts, _ = played(make_suite("minigrid", load(Path(job)).env.params), WAY[:2])
    assert texts[0] == FIRST
    page = PAGE.read_text()
    assert all(f"```\n{text}\n```" in page for text in (texts[0], texts[2]))


def test_a_check_names_what_to_install(job, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    assert main(["check", job]) == 1
    assert "env.name = 'minigrid' needs the package minigrid" in (said := capsys.readouterr().err)
    assert "pip install '.[minigrid]'" in said


def test_without_the_package_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(EnvError, match=r"needs the package minigrid.*pip install '.\[minigrid\]'"):
        make_suite("minigrid", DOORS)


def test_the_package_is_imported_by_whom_it_serves_and_says_nothing():
    code = "import sys, envs.registry, envs.gym.minigrid; sys.exit('minigrid' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    minigrid()
    code = f"from envs.registry import make_suite; make_suite('minigrid', {DOORS!r})"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == ""
