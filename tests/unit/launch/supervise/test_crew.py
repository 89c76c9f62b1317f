"""Roles of one machine get an environment, are started again, survive a full disk, and say that memory is short."""

import errno
import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import processes
from launch.errors import DONE, FINAL, RoleFailed, exit_code, leave_note
from launch.processes import Child, role_environment, tail
from launch.run_file.load import check
from launch.supervise import crew as crew_module
from launch.supervise import posts
from launch.supervise.crew import START_RETRY_S, STATE_FILE, Crew
from launch.supervise.health import FIRST_DELAY_S, LONGEST_DELAY_S, Patience, RestartBackoff
from launch.supervise.panel import Panel
from launch.supervise.posts import Post, crowded, too_little_memory


def run(mode="async", learner=1, generator=1, count=1, **settings):
    return check(
        {
            "run": {"name": "crowd", "mode": mode},
            "model": {"path": "model"},
            "env": {"name": "calculator"},
            "learner": {"threads": learner},
            "generator": {"threads": generator, "count": count, **settings},
        },
        "a test",
    )


@pytest.mark.parametrize(
    ("config", "cores", "expected"),
    [
        (run(), 2, False),
        (run(learner=2), 2, True),
        (run(learner=2, generator=2), 4, False),
        (run(generator=2, count=2), 4, True),
        (run("sync", learner=2, generator=2), 2, False),  # learner and generator take turns
        (run("sync", generator=2, count=2), 2, True),  # two generators compute at the same time
        # The generator runs elsewhere.
        (run(learner=2, generator=2, backend="http", url="http://127.0.0.1:1"), 2, False),
    ],
)
def test_threads_are_counted_where_they_compute_at_a_time(config, cores, expected):
    assert crowded(config, cores) is expected


def test_waiting_threads_sleep_where_cores_are_few(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert role_environment(2, local_model=True, crowded=True)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in role_environment(2, local_model=True)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a host without the driver's file")
def test_deepspeed_is_told_of_the_cpu_unless_the_user_names_gpus(monkeypatch):
    """A learner on GPUs refuses to start with this variable, so it must not come from here."""
    for chosen, expected in (("", "cpu"), ("0,1", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert role_environment(2, local_model=True).get("DS_ACCELERATOR") == expected


def test_what_the_user_has_set_wins(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "OMP_WAIT_POLICY" not in role_environment(2, local_model=True, crowded=True)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def notes():
    return []


@pytest.fixture
def spawned(monkeypatch):
    """Return a record of the fake processes started in place of real ones; while ``full``, none can start."""
    found = SimpleNamespace(children=[], full=False)

    def spawn(name, command, *, log, env):
        if found.full:
            raise FULL
        process = SimpleNamespace(pid=len(found.children) + 1, returncode=None)
        process.poll = lambda: process.returncode
        child = Child(name, command, process, log)
        found.children.append(child)
        return child

    monkeypatch.setattr(crew_module, "spawn", spawn)
    return found


@pytest.fixture
def crew(tmp_path, notes, spawned):
    settings = {"model": {"path": "none"}, "env": {"name": "calculator"}, "actor": {"count": 1}}
    crew = Crew(check(settings, "test"), tmp_path / "run", note=notes.append)
    crew.broker_answered = True
    return crew


def state(crew):
    return json.loads((crew._folder / STATE_FILE).read_text())["processes"]


def test_a_state_that_cannot_be_written_is_written_later(crew, notes):
    # The folder does not exist yet.
    crew.start(["broker", "learner"], resume=False)
    crew.revive(1.0)
    assert len(notes) == 1
    assert "offbeat status" in notes[0]
    crew._folder.mkdir()
    crew.revive(2.0)
    assert state(crew)["learner"]["pid"] == 2
    # Pids say something on this machine alone.
    assert json.loads((crew._folder / STATE_FILE).read_text())["machine"] == platform.node()
    assert len(notes) == 1


def test_what_ended_with_the_run_is_not_started_again(crew, notes, spawned):
    crew._folder.mkdir()
    crew.start(["broker", "generator-0", "actor-0"], resume=False)
    for child, code, note in zip(spawned.children, (DONE, DONE, 1), (DONE, None, None), strict=True):
        child.process.returncode = code
        if note is not None:
            leave_note(crew._folder, child.name, note, "the run is over")
    crew.revive(10.0)
    # A process that ends with code 0 for another reason, such as a signal of a person, comes back.
    assert [child.name for child in spawned.children[3:]] == ["generator-0", "actor-0"]


def test_who_was_asked_to_end_is_recorded_until_it_is_started_again(crew, spawned):
    crew._folder.mkdir()
    crew.resize("actor", 2)
    crew.start(["actor-0"], resume=False)
    for child in spawned.children:
        child.process.send_signal = lambda number: None
    crew.resize("actor", 1)
    assert {name: found["leaving"] for name, found in state(crew).items() if name.startswith("actor")} == {
        "actor-0": False,
        "actor-1": True,
    }
    crew.resize("actor", 2)
    next(child for child in spawned.children if child.name == "actor-1").process.returncode = DONE
    crew.revive(10.0)
    assert not state(crew)["actor-1"]["leaving"]


def test_the_end_of_a_former_process_does_not_count(crew, spawned):
    crew._folder.mkdir()
    leave_note(crew._folder, "generator-0", DONE, "the run is over")
    crew.start(["generator-0"], resume=False)
    spawned.children[0].process.returncode = 1
    crew.revive(10.0)
    assert crew.running("generator-0")


def test_a_process_that_cannot_be_started_is_started_later(crew, notes, spawned):
    crew._folder.mkdir()
    crew.start(["broker", "generator-0"], resume=False)
    spawned.children[1].process.returncode, spawned.full = 1, True
    crew.revive(10.0)
    crew.revive(10.0 + START_RETRY_S / 2)
    assert [note for note in notes if "cannot be started" in note] == [
        "generator-0 cannot be started: [Errno 28] No space left on device; trying again in 2 s"
    ]
    spawned.full = False
    crew.revive(10.1 + START_RETRY_S)
    assert crew.running("generator-0")
    saved = state(crew)["generator-0"]
    (ending,), started = saved.pop("endings"), saved.pop("started")
    assert ending["reason"] == "generator-0 ended with code 1"
    assert 0.0 < ending["time"] <= started <= time.time()
    assert saved | {"log": ""} == {
        "pid": 3, "restarts": 1, "log": "", "leaving": False, "last_reason": "generator-0 ended with code 1",
    }  # fmt: skip


def test_a_line_that_cannot_be_written_is_lost(monkeypatch):
    def full(*_, **__):
        raise FULL

    panel = Panel()
    monkeypatch.setattr(panel._console, "print", full)
    panel.note("something")


def test_the_first_restart_comes_at_once_and_delays_double_up_to_the_longest():
    row, patience = RestartBackoff(), Patience(max_restarts=9, settled_s=60.0)
    delays = [row.ended("x", lived_s=1.0, now=100.0, patience=patience) - 100.0 for _ in range(9)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (FIRST_DELAY_S, LONGEST_DELAY_S) == (1.0, 30.0)
    assert row.ended("x", lived_s=1.0, now=100.0, patience=patience) is None
    assert row.total == 9, "the end of the row is no restart"


def test_a_settled_process_begins_a_new_row_but_all_are_counted():
    row, patience = RestartBackoff(), Patience(max_restarts=2, settled_s=60.0)
    for _ in range(5):
        assert row.ended("x", lived_s=60.0, now=7.0, patience=patience) == 7.0
    assert (row.in_row, row.total, row.reasons) == (1, 5, ["x"] * 5)


def test_no_restarts_may_be_wanted():
    assert RestartBackoff().ended("x", lived_s=1e9, now=0.0, patience=Patience(max_restarts=0)) is None


DESIRED = (
    "ValueError: Free memory on device cuda:0 (20/80 GiB) is less than desired GPU memory utilization (0.5"
)
CACHE = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
LONG = "ValueError: 2.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)"


@pytest.mark.parametrize(
    ("role", "line", "cure"),
    [
        ("learner", "torch.OutOfMemoryError: CUDA out of memory.", "learner.micro_batch_tokens"),
        ("learner", "RuntimeError: [enforce fail at alloc_cpu.cpp] can't allocate memory", "zero_stage = 3"),
        (
            "learner",
            "OSError: [Errno 28] No space left on device: '/dev/shm/offbeat-run'",
            "learner.keep_versions",
        ),
        ("generator", "torch.OutOfMemoryError: CUDA out of memory.", "generator.max_num_seqs"),
        ("generator", DESIRED, "generator.gpu_memory_utilization, or give the engine a GPU of its own"),
        ("generator", CACHE, "generator.kv_cache_mb"),
        ("judge", LONG, "generator.max_model_len"),
    ],
)
def test_the_cure_names_the_setting_of_the_role(role, line, cure):
    log = f"INFO started\n{line}\nTraceback (most recent call last):\nRuntimeError: failed"
    # An engine ends in a process of its own, and what its generator says of it names no cause.
    said = too_little_memory(role, "" if role == "learner" else "RuntimeError: engine core failed", log)
    assert cure in said
    assert line[:60] in said


def test_other_ends_and_the_memory_of_user_code_are_none():
    assert too_little_memory("learner", "", "RuntimeError: shapes do not match") == ""
    assert too_little_memory("actor", "", "MemoryError") == ""
    assert too_little_memory("learner", "OSError: [Errno 28] No space left on device: '/home/runs'", "") == ""
    logged = "evaluation is repeated: the reward raised MemoryError in rewards.py:3"
    assert too_little_memory("learner", "LinkDown: no answer from the broker", logged) == ""
    assert too_little_memory("learner", "every episode fails: MemoryError in rewards.py:3", logged) == ""


def test_what_an_earlier_process_wrote_does_not_count(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("torch.OutOfMemoryError\n")
    begin = log.stat().st_size
    with open(log, "a") as more:
        more.write("fine\n")
    assert tail(log, begin=begin) == "fine"
    child = Child("learner", [], subprocess.Popen([sys.executable, "-c", ""]), log, begin)
    child.process.wait()
    assert child.own_tail(60) == "fine"


@pytest.mark.parametrize(("kills", "said"), [(3, False), (4, True)])
def test_a_kill_by_a_kernel_without_memory_is_named(tmp_path, monkeypatch, kills, said):
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    monkeypatch.setattr(posts, "oom_kills", lambda: kills)
    post = Post("generator-0", 1, child=Child("generator-0", [], killed, tmp_path / "log", oom_kills=3))
    assert ("the host ran out of memory" in post.how_it_ended(tmp_path)) is said


def test_the_kernel_counts_its_kills():
    assert processes.oom_kills() >= 0


ENGINE = "RuntimeError: Engine core initialization failed. See root cause above."


def test_an_engine_that_twice_cannot_start_for_one_reason_ends_the_run(crew, notes, spawned):
    crew._folder.mkdir()
    crew.start(["broker", "generator-0"], resume=False)

    def dies():
        child = spawned.children[-1]
        child.log.parent.mkdir(exist_ok=True)
        child.log.write_text(f"(EngineCore pid=9) ERROR ImportError: image processors need PIL\n{ENGINE}\n")
        child.process.returncode = 1
        leave_note(crew._folder, "generator-0", 1, ENGINE)

    dies()
    crew.revive(10.0)
    assert len(spawned.children) == 3, "the first time may be chance"
    dies()
    with pytest.raises(
        RoleFailed, match=r"\(ImportError: image processors need PIL\), for the second time: starting it"
    ) as caught:
        crew.revive(20.0)
    assert exit_code(caught.value) == FINAL, "engines would load the model for ever"


def test_an_engine_that_cannot_start_for_different_reasons_is_started_again(crew, notes, spawned):
    crew._folder.mkdir()
    crew.start(["broker", "generator-0"], resume=False)
    for at, reason in ((10.0, ENGINE), (20.0, "OSError: no route to host"), (30.0, ENGINE)):
        spawned.children[-1].process.returncode = 1
        leave_note(crew._folder, "generator-0", 1, reason)
        crew.revive(at)
        crew.revive(at + 9.0)
    assert len(spawned.children) == 5
