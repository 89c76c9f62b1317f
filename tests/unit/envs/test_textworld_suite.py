"""Games of TextWorld are episodes. Tests that play one need the package."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from envs.errors import EnvError, ServiceFailed
from envs.gym import textworld
from envs.registry import beside, files_of, make_suite

SEEDS = (1, 2, 3)
# jericho, which runs a game, says so of each that TextWorld made; TextWorld counts the score itself.
pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")


class FakeLibrary:
    """Stands in for TextWorld with one game, in which the command "wait" ends when `free` is set."""

    def __init__(self, game):
        self.game, self.inside, self.free = game, threading.Event(), threading.Event()
        self._state = SimpleNamespace(
            feedback="A room.", admissible_commands=[], max_score=1, won=False, lost=False, policy_commands=[]
        )

    def EnvInfos(self, **_):
        return None

    def start(self, path, wanted):
        return self

    def reset(self):
        return self._state

    def step(self, command):
        if command == "wait":
            self.inside.set()
            assert self.free.wait(60.0)
        return self._state, 0, False

    def close(self):
        pass


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """Make a game of three commands for each seed."""
    textworld = pytest.importorskip("textworld", reason="textworld is not installed")
    folder = tmp_path_factory.mktemp("games")
    for seed in SEEDS:
        options = textworld.GameOptions()
        options.seeds = seed
        options.nb_rooms, options.quest_length = 2, 3
        options.path = str(folder / f"game{seed}.z8")
        textworld.make(options)
    return str(folder)


def test_a_game_is_played_by_the_commands_of_its_demonstration(games):
    suite = make_suite("textworld", {"games": games, "heldout": 0.0, "instruction": "Play."})
    system, first, *rest = suite.demonstration(0, "train")
    assert system == {"role": "system", "content": "Play."}
    assert "$$" not in first["content"]
    assert first["content"].endswith("Write one command on a line of its own.")
    commands = [message["content"] for message in rest if message["role"] == "assistant"]
    env = suite.episode()
    try:
        assert env.reset({"index": 0, "split": "train"}) == [system, first]
        wrong = env.step("<think>hm</think>fly to the moon")
        *_, last = [env.step(f"I do it.\n> {command}") for command in commands]
    finally:
        env.close()
    assert (wrong.done, wrong.rewards, wrong.messages()[0]["role"]) == (False, {"reward": 0.0}, "tool")
    assert (last.done, last.correct, last.rewards, last.messages()) == (True, True, {"reward": 1.0}, [])
    assert last.info["score"] == last.info["best_score"]


def test_each_game_is_a_task(games):
    suite = make_suite("textworld", {"games": games, "heldout": f"{games}/game2.z8"})
    assert suite.facts().heldout_tasks == 1
    assert suite.game_of(0, "heldout").name == "game2.z8"
    assert {suite.game_of(index, "train").name for index in range(2)} == {"game1.z8", "game3.z8"}
    with pytest.raises(EnvError, match="there are 1 held-out games"):
        suite.game_of(1, "heldout")


def test_two_games_are_played_at_a_time(games):
    suite = make_suite("textworld", {"games": games, "heldout": 0.0, "prompt": "{commands}"})
    one, two = suite.episode(), suite.episode()
    first, second = (env.reset({"index": i, "split": "train"}) for i, env in enumerate((one, two)))
    assert "look" in first[0]["content"]
    again = suite.episode()
    one.step("inventory")
    assert again.reset({"index": 1, "split": "train"}) == second
    for env in (one, two, again):
        env.close()


def test_a_game_that_never_answers_does_not_hold_up_others(tmp_path, monkeypatch):
    """Those who wait are not at fault, whatever suite they are of, and the library is free once it is left."""
    monkeypatch.setattr(textworld._ALONE, "_clock", lambda: 0.0)  # so that nobody is in it for too long
    (tmp_path / "game.z8").touch()
    library = FakeLibrary(str(tmp_path / "game.z8"))
    with patch.dict(sys.modules, {"textworld": library}):
        suites = [
            make_suite("textworld", {"games": library.game, "heldout": 0.0, "wait_s": 0.05}) for _ in "ab"
        ]
    task = {"index": 0, "split": "train"}
    stuck, other, last = suites[0].episode(), suites[0].episode(), suites[1].episode()
    for env in (stuck, other):
        env.reset(task)
    turn = threading.Thread(target=stuck.step, args=("wait",), daemon=True)
    turn.start()
    assert library.inside.wait(20.0)
    for call in (
        lambda: other.step("look"),
        lambda: last.reset(task),
        lambda: suites[1].demonstration(0, "train"),
    ):
        with pytest.raises(ServiceFailed, match=r"waited 0.05 s for TextWorld, .*: game.z8 is in it"):
            call()
    library.free.set()
    turn.join(20.0)
    assert other.step("look").messages()[0]["content"] == "A room."


WRONG = {
    "no game": ({"games": "nowhere.z8"}, "params.games: 'nowhere.z8' is no game"),
    "no games": ({"games": []}, "params.games"),
    "role": ({"games": "a.z8", "role": "judge"}, "params.role"),
    "wait": ({"games": "a.z8", "wait_s": 0}, "params.wait_s"),
}


@pytest.mark.parametrize(("params", "why"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(params, why):
    pytest.importorskip("textworld", reason="textworld is not installed")
    with pytest.raises(EnvError, match=why):
        make_suite("textworld", params)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(EnvError, match=r"pip install '\.\[textworld\]'"):
        make_suite("textworld", {"games": "a.z8"})


def test_games_beside_the_run_file_are_found(tmp_path):
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "a.z8").touch()
    name, params = beside("textworld", {"games": ["games"], "heldout": 0.0}, tmp_path)
    assert params["games"] == [str(tmp_path / "games")]
    assert files_of(name, params) == [str(tmp_path / "games" / "a.z8")]


def test_jericho_is_never_imported_with_offbeat():
    code = "import sys, envs.registry, envs.gym.textworld; sys.exit('jericho' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
