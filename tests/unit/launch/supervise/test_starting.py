"""The start of a run says who is waited for, for how long, and how long it took the last time."""

from launch.run_file.load import check
from launch.supervise.broker_status import Answer
from launch.supervise.panel import PLAIN_STILL_S, Panel
from launch.supervise.supervisor import Starting, keep_starts, last_starts

WAITS = ["everybody waits for a learner: none has joined"]


def test_the_seconds_of_the_last_start_are_kept_for_the_next(tmp_path):
    assert last_starts(tmp_path) == {}
    keep_starts(tmp_path, {"learner": 68.0, "generator": 40.0})
    assert last_starts(tmp_path) == {"learner": 68.0, "generator": 40.0}
    (tmp_path / ".start-seconds.json").write_text("[1]")
    assert last_starts(tmp_path) == {}
    keep_starts(tmp_path / "nowhere", {"learner": 1.0})


def test_each_role_counts_its_slowest_process_and_joins_once():
    starting = Starting(["broker", "weights", "actor-0", "actor-1"], {})
    assert starting.look(["actor-1"], {"actor-0": 3.0, "actor-1": 3.0}) == ["actor-1 has joined after 3 s"]
    assert starting.text.startswith("actor-0 3 s (")
    assert starting.look(["actor-0", "actor-1"], {"actor-0": 9.0}) == ["actor-0 has joined after 9 s"]
    assert starting.look(["actor-0"], {"actor-0": 1.0}) == []
    assert starting.took == {"actor": 9.0}


def test_plain_lines_are_rare_while_processes_start_and_do_not_repeat_the_wait(tmp_path, monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr("launch.supervise.panel.time.monotonic", lambda: clock[0])
    config = check({"model": {"path": "a/b"}, "env": {"name": "calculator"}}, "run.toml")
    panel = Panel()
    panel.heard(Answer(0.0, {"waits": WAITS}))
    for _ in range(90):
        clock[0] += 1.0
        panel.update(tmp_path, config, restarts={}, starting="learner 12 s (imports DeepSpeed)")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 90 / PLAIN_STILL_S + 1
    assert lines[0].endswith("starting the roles, 1 s | learner 12 s (imports DeepSpeed)")
