"""Test what the supervisor does to a process: the environment it gets, and the stacks of one that hangs."""

import sys
import time

from launch.processes import dump_stacks, kill, role_environment, spawn


def test_a_process_that_hangs_says_where_it_stands_before_it_is_killed(tmp_path):
    code = (
        "import faulthandler, signal, time\n"
        "faulthandler.register(signal.SIGUSR1, all_threads=True)\n"
        "print('ready', flush=True)\n"
        "def stands_here():\n"
        "    time.sleep(600)\n"
        "stands_here()\n"
    )
    child = spawn("hanging", [sys.executable, "-c", code], log=tmp_path / "log", env={})
    deadline = time.monotonic() + 60
    while "ready" not in child.tail() and time.monotonic() < deadline:
        time.sleep(0.01)
    dump_stacks(child)
    assert child.running
    assert kill(child)
    assert "in stands_here" in child.tail()


def test_roles_do_not_import_from_the_working_folder():
    assert role_environment(1, local_model=True)["PYTHONSAFEPATH"] == "1"
