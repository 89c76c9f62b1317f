"""Test how the name in the run file becomes a suite, and the error for a wrong name."""

import sys
import textwrap

import pytest

from envs.errors import EnvError, UnknownEnv
from envs.reasoning_gym_suite import blend, task_of
from envs.registry import BUILT_IN, code_of_solutions, find_factory, fingerprint, make_suite, solving_code


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


def test_a_wrong_param_names_the_nearest(own_env):
    with pytest.raises(EnvError, match=r"does not take params\.sise; did you mean 'size'\?"):
        make_suite(f"{own_env}:Maze", {"sise": 1})
    with pytest.raises(EnvError, match=r"does not take params\.colour; it takes size"):
        make_suite(f"{own_env}:Maze", {"colour": 1})
    with pytest.raises(EnvError, match=r"needs params\.family; add it to \[env\.params\]"):
        make_suite("reasoning_gym", {})


def suite_file(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return file


@pytest.fixture
def path(monkeypatch):
    """Give the test a search path and a table of modules that it may change."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_an_exception_of_the_constructor_is_one_line_with_place_type_and_param(tmp_path, monkeypatch, path):
    suite_file(
        tmp_path,
        "my_task.py",
        """
        class Suite:
            def __init__(self, train, pieces=1):
                self.size = 10 // pieces
                self.lines = open(train).readlines()
        """,
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvError) as caught:
        make_suite("my_task.py:Suite", {"train": "nope.jsonl"})
    assert str(caught.value) == "my_task.py:5: FileNotFoundError: no file nope.jsonl (params.train)"
    with pytest.raises(EnvError, match=r"^my_task\.py:4: ZeroDivisionError: .*by zero$"):
        make_suite("my_task.py:Suite", {"train": "nope.jsonl", "pieces": 0})
    with pytest.raises(EnvError, match=r"^my_task\.py:4: TypeError: unsupported operand"):
        make_suite("my_task.py:Suite", {"train": "nope.jsonl", "pieces": "2"})


def test_an_error_inside_a_library_is_blamed_on_the_line_that_called_it(tmp_path, monkeypatch, path):
    suite_file(tmp_path, "my_json.py", "import json\n\ndef Suite():\n    return json.loads('{')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvError, match=r"^my_json\.py:4: JSONDecodeError: "):
        make_suite("my_json.py:Suite", {})


def test_an_env_file_may_import_its_neighbours(tmp_path, path):
    suite_file(tmp_path, "rewards_next_door.py", "def reward():\n    return 0.5\n")
    file = suite_file(
        tmp_path,
        "uses_neighbour.py",
        """
        from rewards_next_door import reward

        class Suite:
            half = reward()
        """,
    )
    assert make_suite(f"{file}:Suite", {}).half == 0.5


def test_an_import_error_inside_the_users_code_is_one_line_and_not_hidden(tmp_path, monkeypatch, path):
    (tmp_path / "broken_env.py").write_text("\nimport no_such_library\n")
    (tmp_path / "no_python.py").write_text("x = 1\nclass Suite(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = r"^broken_env\.py:2: ModuleNotFoundError: No module named 'no_such_library'$"
    with pytest.raises(EnvError, match=said):
        find_factory("broken_env:Suite")
    with pytest.raises(EnvError, match=said):
        find_factory("broken_env.py:Suite")
    with pytest.raises(EnvError, match=r"^no_python\.py:2: SyntaxError: "):
        find_factory("no_python.py:Suite")


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


def test_a_module_of_the_working_folder_is_found_behind_all_others(tmp_path, monkeypatch):
    (tmp_path / "task_of_this_folder.py").write_text("class Words:\n    pass\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert make_suite("task_of_this_folder:Words", {}).__class__.__name__ == "Words"
    assert sys.path[-1] == str(tmp_path)


def test_a_changed_file_of_the_users_has_another_fingerprint(tmp_path):
    """A tiny model that is kept for later runs belongs to the tasks that it was warmed up on."""
    file = tmp_path / "tasks.py"
    file.write_text("class Suite: ...\n")
    name = f"{file}:Suite"
    before = fingerprint(name, {})
    assert before == fingerprint(name, {})
    file.write_text("class Suite: easy = True\n")
    assert fingerprint(name, {}) != before


SUITE = '''"""A module."""
from envs.calculator import opening
FIRST = 1
OTHER: int = 2

def answer(index):
    """Return it."""
    return str(index + FIRST)  # one more

class Base:
    shift = 3

class Words(Base):
    """Words."""
    def __init__(self, known=OTHER):
        self.known = known
    def demonstration(self, index, split):
        return self.opening(index) + answer(index)
    def opening(self, index):
        return [index]
    def reward(self, text):
        return score(text)

def score(text):
    return 0.0
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# one more", "# another word", True),
        ("Return it.", "Return the answer.", True),
        ("return 0.0", "return 1.0", True),
        ("return score(text)", "return 0.5", True),
        ("def answer(index):", "def answer(\n    index\n):", True),
        ("FIRST = 1", "FIRST = 2", False),
        ("OTHER: int = 2", "OTHER: int = 3", False),
        ("index + FIRST", "index - FIRST", False),
        ("return [index]", "return [index, 1]", False),
        ("shift = 3", "shift = 4", False),
    ],
)
def test_only_code_that_writes_solutions_makes_another_warm_start(old, new, same):
    assert SUITE.count(old) == 1
    assert (solving_code(SUITE, "Words") == solving_code(SUITE.replace(old, new), "Words")) == same


def test_each_built_in_suite_has_code_of_solutions_and_others_have_none():
    hashes = [code_of_solutions(name) for name in BUILT_IN]
    assert len(set(hashes)) == len(BUILT_IN)
    assert all(hashes)
    assert code_of_solutions("tasks.py:Suite") == ""
