"""The folder of an engine's sockets goes with its process, also one that was killed, and no other folder does."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from actors.config import GeneratorConfig
from actors.generator.vllm_engine.engine import SOCKETS, prepare_environment
from actors.generator.vllm_engine.socket_folder import LONGEST, PREFIX, make_socket_folder

OWNER = """
import sys
from pathlib import Path
from actors.generator.vllm_engine.socket_folder import make_socket_folder
print(make_socket_folder(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root():
    """Return a folder with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="o") as folder:
        yield Path(folder)


@pytest.fixture
def owner(root):
    """Return a function that starts a process with a folder of its own, and returns both."""
    started = []

    def start(program=OWNER):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def test_what_a_killed_process_left_goes_with_the_next_start(owner, root, monkeypatch):
    (_, its), (killed, left), (ended, gone) = (owner() for _ in range(3))
    (left / "socket").touch()
    (root / f"{PREFIX}file").touch()
    (root / f"{PREFIX}link").symlink_to(root)
    killed.kill()
    killed.wait(60)
    ended.stdin.close()
    assert ended.wait(60) == 0
    assert not gone.exists(), "an orderly end leaves nothing"
    young = make_socket_folder(root)
    assert left.exists(), "it is too young to tell"
    monkeypatch.setattr("protocol.files.YOUNG_S", -1.0)
    newest = make_socket_folder(root)
    assert {path.name for path in root.iterdir()} == {
        *(path.name for path in (its, young, newest)), f"{PREFIX}file", f"{PREFIX}link",
    }  # fmt: skip


def test_a_lock_outlives_exec(owner, root, monkeypatch):
    program = OWNER.replace("sys.stdin.read()", "import os; os.execvp('cat', ['cat'])")
    process, folder = owner(program)
    # `cat` answers, so that the process has been replaced.
    process.stdin.write("x\n")
    process.stdin.flush()
    assert process.stdout.readline() == "x\n"
    monkeypatch.setattr("protocol.files.YOUNG_S", -1.0)
    make_socket_folder(root)
    assert folder.exists()


def test_a_path_that_is_too_long_for_a_socket_is_left_to_vllm(tmp_path):
    deep = tmp_path / ("x" * LONGEST)
    deep.mkdir()
    assert make_socket_folder(deep) is None
    assert list(deep.iterdir()) == []


def test_vllm_gets_the_folder_unless_the_user_named_one(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setattr(os, "environ", {SOCKETS: "/mine"})
    prepare_environment(GeneratorConfig())
    assert os.environ[SOCKETS] == "/mine"
    monkeypatch.setattr(os, "environ", {})
    prepare_environment(GeneratorConfig())
    assert Path(os.environ[SOCKETS]).name.startswith(PREFIX)
    Path(os.environ[SOCKETS]).rmdir()
