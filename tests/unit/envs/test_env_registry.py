"""Test how the name in the run file becomes a suite, and the error for a wrong name."""

import sys
import textwrap

import pytest

from envs.errors import EnvError, RefusedFamily, UnknownEnv
from envs.reasoning_gym_suite import blend, task_of
from envs.registry import find_factory, make_suite
from envs.scorer import ACCEPTS_JUNK, RUNS_ANSWERS, choose_sandbox
from envs.scorer_process import Family


@pytest.fixture
def own_env(tmp_path):
    file = tmp_path / "maze.py"
    file.write_text(
        textwrap.dedent("""
            class Maze:
                def __init__(self, size: int = 3):
                    self.size = size
            NUMBER = 3
        """)
    )
    return file


def test_a_file_of_the_user(own_env):
    assert make_suite(f"{own_env}:Maze", {"size": 5}).size == 5


def test_a_module_of_the_user(own_env, monkeypatch):
    monkeypatch.syspath_prepend(str(own_env.parent))
    assert make_suite("maze:Maze", {}).size == 3
    del sys.modules["maze"]


def test_a_miss_names_the_nearest(own_env):
    with pytest.raises(UnknownEnv, match="did you mean 'reasoning_gym'"):
        make_suite("reasoning-gym", {})
    with pytest.raises(UnknownEnv, match="no callable 'Maize'; did you mean 'Maze'"):
        make_suite(f"{own_env}:Maize", {})
    with pytest.raises(UnknownEnv, match="no callable 'NUMBER'"):
        make_suite(f"{own_env}:NUMBER", {})
    with pytest.raises(UnknownEnv, match=r"maz\.py does not exist; did you mean 'maze\.py'"):
        make_suite(f"{own_env.parent}/maz.py:Maze", {})
    with pytest.raises(UnknownEnv, match="no module 'mazes'"):
        make_suite("mazes:Maze", {})


def test_wrong_params_are_named(own_env):
    with pytest.raises(EnvError, match=r"does not take params \{'colour': 1\}"):
        make_suite(f"{own_env}:Maze", {"colour": 1})


def test_an_import_error_inside_a_module_of_the_user_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_env.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        find_factory("broken_env:Suite")


@pytest.mark.parametrize("family", sorted(ACCEPTS_JUNK))
def test_families_that_accept_junk_are_refused(family):
    for sandbox in ("auto", "bwrap", "process"):
        with pytest.raises(RefusedFamily, match="junk"):
            choose_sandbox(family, sandbox)


def test_a_sandbox_that_does_not_exist_is_refused():
    with pytest.raises(EnvError, match="sandbox = 'bwarp': use one of auto, bwrap, process"):
        choose_sandbox("spell_backward", "bwarp")


@pytest.mark.parametrize(("share", "said"), [(0.0, "evaluate on"), (1.0, "train on"), (-0.5, "evaluate on")])
def test_a_share_that_holds_out_all_or_nothing_is_refused(share, said):
    with pytest.raises(EnvError, match=said):
        Family("spell_backward", heldout_share=share)


@pytest.mark.parametrize("family", sorted(RUNS_ANSWERS))
def test_families_that_run_answers_need_bubblewrap(family, monkeypatch):
    with pytest.raises(RefusedFamily, match="runs the answer as Python"):
        choose_sandbox(family, "process")
    monkeypatch.setattr("shutil.which", lambda name: None)
    for sandbox in ("auto", "bwrap"):
        with pytest.raises(RefusedFamily, match="bubblewrap"):
            choose_sandbox(family, sandbox)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap")
    assert choose_sandbox(family, "auto") == "bwrap"


def test_the_bonus_moves_weight_to_exact_answers():
    assert blend(0.8, 0.0) == 0.8
    assert blend(0.8, 1.0) == 0.0
    assert blend(1.0, 0.3) == 1.0


@pytest.mark.parametrize(
    "data", [{}, {"index": -1}, {"index": "1"}, {"index": True}, {"index": 1, "split": "dev"}]
)
def test_wrong_task_data_is_shown(data):
    with pytest.raises(EnvError, match="task data"):
        task_of(data)
