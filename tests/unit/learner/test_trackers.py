"""The machine between the report and trackers: bounded, and no fault of a tracker reaches the learner."""

import logging
import threading

import numpy as np
import pytest

from learner.metrics import Report
from learner.sample_log import make_sample
from learner.settings.trackers import missing_packages
from learner.trackers.feed import HANG_S, RETRY_S, FedSink, Feed
from learner.trackers.opening import open_trackers
from learner.trackers.sink import Histograms, Scalars, Summary, Text, TrackedRun, sample_rows, shown_config
from tests.trajectories import make_trajectory


def record(step):
    return Scalars(step, 0.0, {"learner/loss": float(step)})


def opened(**values):
    feed = Feed("wandb", **values)
    assert feed.next(0.0) == "open"
    feed.done()
    return feed


def test_a_full_queue_drops_the_oldest_record_and_says_so_once():
    feed = opened(size=2)
    said = [feed.offer(record(step), 1.0) for step in range(4)]
    assert said == ["", "", "tracker wandb is 2 records behind; the oldest ones are lost", ""]
    assert [feed.next(2.0).step, feed.lost] == [2, 2]


def test_records_wait_for_a_tracker_that_opens_late():
    feed = Feed("mlflow")
    assert feed.next(0.0) == "open"
    assert "tries again each 60 s" in feed.failed(ConnectionError("no server\nat all"), 5.0)
    feed.offer(record(1), 6.0)
    assert (feed.next(6.0), feed.sleep_s(6.0)) == ("sleep", RETRY_S - 1)
    assert feed.next(5.0 + RETRY_S) == "open"
    assert feed.failed(ConnectionError("no server"), 66.0) == "", "said once"
    assert feed.next(66.0 + RETRY_S) == "open"
    feed.done()
    assert feed.next(200.0) == record(1)
    feed.done()
    assert (feed.written, feed.lost, feed.end(abandoned=False)) == (1, 0, "")


def test_what_a_tracker_does_not_take_is_counted_and_the_next_record_is_tried():
    feed = opened()
    for step in (1, 2):
        feed.offer(record(step), 1.0)
        assert feed.next(1.0) == record(step)
        said = feed.failed(ValueError("odd \x1b[2J name"), 1.0)
        assert said == (
            "tracker wandb failed, and what it did not take is lost: ValueError: odd \\x1b[2J name"
            * (step == 1)
        )
    feed.offer(record(3), 2.0)
    feed.next(2.0)
    feed.done()
    assert feed.end(abandoned=False) == "tracker wandb: 1 records written, 2 lost"


def test_a_tracker_that_hangs_is_named_once_and_its_record_counts_as_lost_at_the_end():
    feed = opened()
    feed.offer(record(1), 0.0)
    feed.next(0.0)
    assert feed.offer(record(2), HANG_S) == ""
    assert "has not answered for 120 s" in feed.offer(record(3), HANG_S + 1)
    assert feed.offer(record(4), HANG_S + 2) == ""
    assert (
        feed.end(abandoned=True) == "tracker wandb: 0 records written, 4 lost, and it did not end within 60 s"
    )


def test_a_tracker_that_never_opened_ends_at_once_with_its_records_lost():
    feed = Feed("wandb")
    feed.next(0.0)
    feed.failed(OSError("no key"), 0.0)
    feed.offer(record(1), 1.0)
    feed.closing = True
    assert feed.next(1.0) == "end"
    assert feed.end(abandoned=False) == "tracker wandb: 0 records written, 1 lost"


def test_the_end_comes_behind_all_records():
    feed = opened()
    feed.offer(record(1), 0.0)
    feed.closing = True
    assert feed.next(0.0) == record(1)
    feed.done()
    assert feed.next(0.0) == "close"


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self, *, fails=(), gate=None):
        self.records, self.closed, self._fails, self._gate = [], None, fails, gate

    def write(self, one):
        if self._gate is not None:
            assert self._gate.wait(60)
        if one.step in self._fails:
            raise SystemExit(1) if one.step % 2 else RuntimeError("refused")
        self.records.append(one)

    def rewind(self, step):
        raise AssertionError("a thread's tracker gets a note in place of this")

    def close(self, *, failed):
        self.closed = failed


def test_a_tracker_that_raises_or_would_end_the_process_loses_only_its_record(caplog):
    kept = Kept(fails=(2, 3))
    sink = FedSink("wandb", lambda: kept)
    for step in range(1, 5):
        sink.write(record(step))
    sink.close(failed=True)
    assert [one.step for one in kept.records] == [1, 4]
    assert (kept.closed, sink.lost, sink.abandoned) == (True, 2, False)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 2, (
        "one line, and one at the end"
    )


def test_the_learner_leaves_a_tracker_that_hangs(caplog):
    gate = threading.Event()
    sink = FedSink("mlflow", lambda: Kept(gate=gate), size=3, close_s=0.05)
    for step in range(50):
        sink.write(record(step))
    sink.close(failed=False)
    assert sink.abandoned
    assert sink.lost == 50
    assert "mlflow: 0 records written, 50 lost" in caplog.text
    gate.set()


def test_a_package_that_cannot_be_imported_is_a_tracker_that_cannot_be_opened(tmp_path, monkeypatch, caplog):
    def broken(name):
        raise ImportError(f"{name} needs another numpy")

    monkeypatch.setattr("importlib.import_module", broken)
    (sink,) = open_trackers(["trackio"], TrackedRun("spell", tmp_path))
    sink.write(record(1))
    sink.close(failed=False)
    assert sink.lost == 1
    assert "tracker trackio cannot be opened" in caplog.text
    assert "trackio needs another numpy" in caplog.text


def test_one_report_goes_to_all_sinks_with_one_clock_and_the_loss_is_a_metric(tmp_path):
    plain, kept = Kept(), Kept(fails=(1,))
    plain.rewind = lambda step: plain.records.append(("rewound", step))
    clock = iter([100.0, 200.0, 300.0, 400.0])
    fed = FedSink("wandb", lambda: kept)
    report = Report(tmp_path, lambda: next(clock), sinks=[plain, fed])
    report.write(1, {"learner/loss": 0.5}, {"return_generated": np.array([1.0, np.nan])}, {"broker/x": 2.0})
    report.write_summary(1, {"steps": 1})
    report.rewind(0)
    report.note(2, "a note")
    report.close()
    assert plain.records[0].values["histogram/return_generated"].tolist() == [1.0]
    scalars = plain.records[1]
    assert (scalars.step, scalars.at, scalars.values["learner/loss"], scalars.values["broker/x"]) == (
        1,
        100.0,
        0.5,
        2.0,
    )
    assert scalars.values["learner/tracker_records_lost"] == 0.0
    assert isinstance(plain.records[0], Histograms)
    assert plain.records[0].at == 100.0
    assert plain.records[2] == Summary(1, 200.0, {"steps": 1})
    assert plain.records[3] == ("rewound", 0)
    assert plain.records[4] == Text(2, 300.0, "notes", "a note")
    assert [type(one).__name__ for one in kept.records] == ["Text", "Text"], "the rewind is a note there"
    assert fed.lost == 3


def test_a_run_keeps_its_name_at_trackers(tmp_path):
    first = TrackedRun("spell", tmp_path).identity()
    assert TrackedRun("spell", tmp_path).identity() == first
    assert len(first) == 16


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        *(
            (name, "s3cret", "(not shown)")
            for name in ("openai_key", "openaiApiKey", "access-key", "auth", "tokens")
        ),
        ("url", "https://me:s3cret@db.example/x", "https://(not shown)@db.example/x"),
        ("url", "https://db.example/a@b", "https://db.example/a@b"),
        ("max_tokens", 7, 7),
        ("keyboard", "qwerty", "qwerty"),
    ],
)
def test_secrets_of_the_environment_are_not_shown(name, value, shown):
    assert shown_config({"env": {"params": {name: value}}}) == {"env": {"params": {name: shown}}}
    assert shown_config({"env": {name: [value]}}) == {"env": {name: [shown]}}


def test_a_table_of_samples_has_a_cell_for_each_column():
    from learner.trackers.sink import SAMPLE_COLUMNS

    (row,) = sample_rows([make_sample(make_trajectory("t"), str, chosen="random", step=1, version=1)])
    assert len(row) == len(SAMPLE_COLUMNS)
    assert all(not isinstance(cell, dict | list) for cell in row)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else name)
    assert missing_packages(["tensorboard", "wandb", "mlflow"]) == ["wandb"]


def test_a_run_file_with_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    from launch.preflight.examine import without_trackers
    from launch.run_file.sections import RunConfig

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else name)
    base = {"model": {"path": "x"}, "env": {"name": "calculator"}}
    config = RunConfig(**base, run={"trackers": ["tensorboard", "wandb"]})
    assert list(without_trackers(config)) == [
        "run.trackers names wandb, whose package is not installed: pip install '.[wandb]'"
    ]
    assert not list(without_trackers(RunConfig(**base)))
    # A host that only checks has no learner, and need not have its trackers.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not list(without_trackers(config))


def test_a_tracker_named_twice_is_refused():
    from launch.run_file.sections import RunSection

    assert list(RunSection(trackers=["wandb", "wandb"]).contradictions("run")) == [
        "run.trackers names wandb twice; name each tracker once"
    ]
    with pytest.raises(ValueError, match="tensorboard"):
        RunSection(trackers=["wandbb"])
