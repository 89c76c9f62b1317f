"""Test that the processes of all hosts of a run are told apart, with restarts and reasons."""

import fcntl
import json
import os
import platform

import pytest

from launch.view.questions import Questions
from tests.view_runs import CLOCK, Maker

GONE = 2**22 + 1
"""A pid that no process has: the kernel gives none above 2^22."""


def write_record(folder, processes, *, machine="", pid=GONE):
    """Write the record of a supervisor, as `launch.supervise.crew.StateFile` does."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "pid": pid,
        "http": "",
        "time": CLOCK,
        "machine": machine,
        "packages": {},
        "processes": processes,
    }
    (folder / "supervisor.json").write_text(json.dumps(record))


def process(pid=GONE, restarts=0, reason="", log=""):
    endings = [{"time": CLOCK + 0.5, "reason": reason}] if reason else []
    return {
        "pid": pid, "log": log, "restarts": restarts, "last_reason": reason, "started": CLOCK, "endings": endings,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run whose head and two hosts have left records; a process of one host was started again."""
    maker = Maker(tmp_path / "run")
    maker.group(2)
    maker.train()
    folder = maker.close()
    write_record(folder, {"broker": process(), "learner": process()}, machine=platform.node())
    killed = process(restarts=2, reason="killed by signal 9 (SIGKILL)")
    write_record(
        folder / "hosts" / "gpu7", {"generator-gpu7": killed, "actor-gpu7": process()}, machine="gpu7"
    )
    write_record(folder / "hosts" / "box", {"actor-box": process()}, machine=platform.node())
    return folder


def by_name(folder):
    return {one["name"]: one for one in Questions([folder]).ask("overview", {})["processes"]}


def test_processes_of_all_hosts_stand_with_their_host_and_reasons(run):
    page = Questions([run]).ask("overview", {})
    assert [(one["host"], one["name"]) for one in page["processes"]] == [
        ("", "broker"), ("", "learner"), ("box", "actor-box"), ("gpu7", "generator-gpu7"), ("gpu7", "actor-gpu7"),
    ]  # fmt: skip
    again = page["processes"][3]
    assert (again["restarts"], again["endings"]) == (
        2,
        [{"time": CLOCK + 0.5, "reason": "killed by signal 9 (SIGKILL)"}],
    )


def test_a_restart_on_another_host_is_an_alarm_and_stands_in_the_timeline(run):
    questions = Questions([run])
    alarm = next(
        one for one in questions.ask("overview", {})["alarms"] if "was started again" in one["title"]
    )
    assert alarm["title"] == "generator-gpu7 on host gpu7 was started again"
    assert "2 times; at last: killed by signal 9 (SIGKILL)" in alarm["value"]
    assert questions.ask("timeline", {})["restarts"] == [
        {"process": "generator-gpu7", "at": CLOCK + 0.5, "reason": "killed by signal 9 (SIGKILL)"}
    ]


def test_a_pid_of_another_machine_is_not_looked_up_here(run):
    # This test's own pid is in use here, so a look at /proc would find it alive.
    mine = {"generator-gpu7": process(pid=os.getpid())}
    write_record(run / "hosts" / "gpu7", mine, machine="gpu7", pid=os.getpid())
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert by_name(run)["generator-gpu7"]["state"] == "unknown here: it runs on gpu7"
    assert by_name(run)["generator-gpu7"]["state"] == "ended when the run broke off"


def test_the_processes_of_a_host_on_this_machine_are_looked_up(run):
    here = {"actor-box": process(pid=os.getpid()), "judge": process()}
    write_record(run / "hosts" / "box", here, machine=platform.node())
    with open(run / "lock", "w") as head, open(run / "hosts" / "box" / "lock", "w") as host:
        fcntl.flock(head, fcntl.LOCK_EX)
        fcntl.flock(host, fcntl.LOCK_EX)
        states = {name: one["state"] for name, one in by_name(run).items()}
        assert (states["actor-box"], states["judge"]) == ("works", "is missing")
    with open(run / "lock", "w") as head:
        fcntl.flock(head, fcntl.LOCK_EX)
        # The host has left a run that goes on.
        assert by_name(run)["judge"]["state"] == "ended with its host"


def test_logs_of_hosts_are_merged_with_those_of_the_head(run):
    for place, name, second in ((run, "broker", 3), (run / "hosts" / "gpu7", "generator-gpu7", 2)):
        (place / "logs").mkdir(exist_ok=True)
        (place / "logs" / f"{name}.log").write_text(f"2026-11-27 10:00:0{second},000 INFO {name} starts\n")
    questions = Questions([run])
    assert [line["process"] for line in questions.ask("logs", {})["lines"]] == ["generator-gpu7", "broker"]
    assert [line["text"] for line in questions.ask("logs", {"process": "generator-gpu7"})["lines"]] == [
        "generator-gpu7 starts"
    ]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"processes": []}', '{"processes": {"a": 1}}', "\ud800"])
def test_a_damaged_record_hides_no_other(run, text):
    (run / "hosts" / "gpu7" / "supervisor.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert list(by_name(run)) == ["broker", "learner", "actor-box"]
