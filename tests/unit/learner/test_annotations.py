"""Test the annotations: the bits and numbers of each token, the files and their ring, going back, and errors."""

import json
import resource
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from learner import annotations as module
from learner import trajectory as trajectory_module
from learner.annotation_files import (
    FOLDER,
    AnnotatedStep,
    AnnotatedTrajectory,
    AnnotationFiles,
    Bit,
    read_index,
    read_rows,
    records,
    row_type,
)
from learner.annotations import AnnotationLog, rows_of
from learner.families.branching import behind_prompt
from learner.given import GIVEN, Conversation, as_trajectory
from learner.trajectory import Counts
from learner.update.report import ROWS
from learner.update.token_numbers import TokenNumbers
from protocol.messages.episodes import Turn
from tests.trajectories import batch_of, make_trajectory


def numbers_of(batch, **given):
    """Return numbers of the seen tokens: 1 in every row, or what is given."""
    seen = int(batch.seen_mask.sum())
    rows = {name: np.ones(seen, np.float32) for name in ROWS} | {
        name: np.zeros(seen, np.float32) for name in ("clipped", "truncated")
    }
    return TokenNumbers(batch, rows | {name: np.asarray(row, np.float32) for name, row in given.items()})


def two_steps():
    """Return a batch with all reasons for which a token carries no gradient, and its numbers."""
    fresh = make_trajectory("a", prompt=2, actions=4, version=[0, 3, 3, 3])
    turns = [Turn(0, 0, 2, False), Turn(1, 2, 4, True), Turn(2, 4, 5, False), Turn(3, 5, 7, True)]
    branching = make_trajectory(
        "b", prompt=2, actions=5, version=[3, 3, 3, 3], turns=turns, observation=(4, 5), auxiliary=[1]
    )
    window = make_trajectory("c", prompt=1, actions=4, version=3, window_start=3)
    greedy = make_trajectory("d", prompt=1, actions=2, version=3, temperature=0.0)
    trajectories = [fresh, branching, window, greedy]
    return trajectories, batch_of(trajectories, current_version=3, max_policy_lag=1)


def test_each_token_says_whether_and_why_it_was_masked():
    trajectories, batch = two_steps()
    assert batch.trained.tolist() == [3, 2, 2, 0]
    numbers = numbers_of(
        batch,
        clipped=[0, 1, 0, 0, 0, 0, 0],
        truncated=[0, 0, 0, 1, 0, 0, 0],
        correction=[1, 1, 1, 0, 1, 1, 1],
    )
    rows, places = rows_of(trajectories, [numbers], "float16")
    expected = [
        Bit.STALE, Bit.TRAINED, Bit.TRAINED | Bit.CLIPPED, Bit.TRAINED,
        Bit.AUXILIARY, Bit.AUXILIARY, Bit.TRAINED | Bit.TRUNCATED | Bit.ZERO_WEIGHT, Bit.TRAINED,
        Bit.TRAINED, Bit.TRAINED,
        Bit.UNUSED, Bit.UNUSED,
    ]  # fmt: skip
    assert rows["bits"].tolist() == [int(bits) for bits in expected]
    assert rows["lag"].tolist() == [3, *[0] * 11]
    assert places == [
        AnnotatedTrajectory("a", 4, 0, [(2, 6)]),
        AnnotatedTrajectory("b", 4, 0, [(2, 4), (5, 7)]),
        AnnotatedTrajectory("c", 2, 3, [(3, 5)]),
        AnnotatedTrajectory("d", 2, 0, [(1, 3)]),
    ]
    trained = (rows["bits"] & Bit.TRAINED) > 0
    for name in ("logp_current", "entropy", "advantage", "ratio"):
        assert np.isnan(rows[name][~trained]).all(), "missing is not zero"
        assert np.isfinite(rows[name][trained]).all()


def test_tokens_stand_where_the_journal_has_them_whoever_wrote_them():
    """A guided answer was sampled behind a longer prompt, a teacher's has no version. What a file has is in no journal:
    its answers to a group bring their tokens along, and given conversations are left out."""
    noted = make_trajectory("noted", prompt=6, actions=3, version=2)
    guided = behind_prompt(noted, np.array([7, 8], np.int32))
    taught = make_trajectory("taught", prompt=2, actions=2, origin="taught", version=-1)
    given = make_trajectory("given-0.0", prompt=2, actions=4, origin="given", env=GIVEN)
    own = make_trajectory("own", prompt=2, actions=1, version=3)
    ids = [5, 6, 7]
    talk = Conversation("answers.jsonl:1", np.array(ids, np.int32), np.array([False, True, True]))
    shown = replace(as_trajectory(talk, "taught-1g2.0"), origin="taught", group_id="1g2", advantage=1.0)
    trajectories = [guided, taught, given, own, shown]
    batch = batch_of(trajectories, current_version=3, max_policy_lag=9)
    rows, places = rows_of(trajectories, [numbers_of(batch)], "float32")
    assert places == [
        AnnotatedTrajectory("noted", 3, 0, [(6, 9)], origin="guided"),
        AnnotatedTrajectory("taught", 2, 0, [(2, 4)], origin="taught"),
        AnnotatedTrajectory("given-0.0", 0, 0, [], origin="given"),
        AnnotatedTrajectory("own", 1, 0, [(2, 3)]),
        AnnotatedTrajectory("taught-1g2.0", 2, 0, [(1, 3)], origin="taught", group="1g2", token_ids=ids),
    ]
    np.testing.assert_array_equal(noted.token_ids[places[0].places], guided.token_ids[guided.action_mask])
    assert rows["lag"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    unknown = [False] * 3 + [True] * 2 + [False] + [True] * 2
    assert np.isnan(rows["ratio"]).tolist() == unknown, "a teacher's ratio is none"
    assert (rows["bits"] & Bit.TRAINED).all()


def test_neighbours_that_are_all_actions_stay_apart():
    """A trajectory that ends with an action, and one that begins with one, because its window does."""
    one = make_trajectory("a", prompt=1, actions=2)
    other = make_trajectory("b", prompt=0, actions=3, turns=[Turn(0, 0, 3, True)])
    last = make_trajectory("c", prompt=2, actions=1)
    _, places = rows_of([one, other, last], [numbers_of(batch_of([one, other, last]))], "float16")
    assert [place.spans for place in places] == [[(1, 3)], [(0, 3)], [(2, 3)]]
    assert [place.rows for place in places] == [2, 3, 1]


def test_float32_is_what_the_learner_had_and_half_is_near():
    trajectories = [make_trajectory("a", prompt=2, actions=50)]
    batch = batch_of(trajectories)
    rng = np.random.default_rng(0)
    given = {
        name: rng.standard_normal(50).astype(np.float32)
        for name in ("logp_current", "logp_proximal", "logp_behaviour", "correction", "advantage", "entropy")
    }
    exact, _ = rows_of(trajectories, [numbers_of(batch, **given)], "float32")
    half, _ = rows_of(trajectories, [numbers_of(batch, **given)], "float16")
    for name in ("logp_current", "logp_proximal", "correction", "advantage", "entropy"):
        assert exact[name].tobytes() == given[name].tobytes()
        assert half[name] == pytest.approx(given[name], rel=1e-3, abs=1e-3)
    assert exact["ratio"] == pytest.approx(np.exp(given["logp_current"] - given["logp_behaviour"]), rel=1e-6)


def step_of(number, rows=4, name="t"):
    one = AnnotatedTrajectory(f"{name}{number}", rows, 0, [(0, rows)])
    data = np.zeros(rows, row_type("float16"))
    data["lag"] = number % 256
    return AnnotatedStep(
        step=number, version=number, time=0.0, applied=True, floats="float16", offset=0, trajectories=[one]
    ), data.tobytes()


@pytest.fixture
def open_files(tmp_path):
    """Return a function that opens the files of a folder; they are closed at the end."""
    opened = []

    def make(limit=1 << 20):
        opened.append(AnnotationFiles(tmp_path / FOLDER, limit))
        return opened[-1]

    yield make
    for files in opened:
        files.close()


def steps_in(folder):
    return [step.step for step, _ in read_index(folder)]


def test_a_record_is_found_by_its_trajectory(tmp_path, open_files):
    files = open_files()
    for number in (1, 2, 3):
        files.add(*step_of(number, rows=number))
    files.add(*step_of(4, name="t3 again "))
    (record,) = records(tmp_path, "t3")
    assert (record.of.step, record.trajectory.rows, record.offset) == (3, 3, 14 * 3)
    assert read_rows(record)["lag"].tolist() == [3, 3, 3]
    assert len(list(records(tmp_path))) == 4
    assert list(records(tmp_path, "nobody")) == []
    record.path.unlink()
    assert read_rows(record) is None
    assert steps_in(tmp_path) == []


def test_the_oldest_files_go_as_a_whole(tmp_path, open_files):
    limit = 40_000
    files = open_files(limit)
    for number in range(1, 101):
        files.add(*step_of(number, rows=100))
        kept = steps_in(tmp_path)
        assert kept == list(range(kept[0], number + 1))
        assert sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir()) <= limit
    assert 15 < len(kept) < 30
    files.add(*step_of(101, rows=100_000))
    files.add(*step_of(102, rows=1))
    assert steps_in(tmp_path) in ([101, 102], [102])


def test_what_a_crash_left_is_cut_and_the_files_go_on(tmp_path, open_files):
    files = open_files()
    for number in (1, 2):
        files.add(*step_of(number))
    data, index = (tmp_path / FOLDER / f"00000001.{kind}" for kind in ("bin", "idx"))
    whole = data.read_bytes()
    with open(data, "ab") as file:
        file.write(b"rows of a step that is in no index")
    with open(index, "ab") as file:
        file.write(b'{"step":3,"vers')
    assert steps_in(tmp_path) == [1, 2]
    files = open_files()
    assert data.read_bytes() == whole
    files.add(*step_of(3))
    assert [read_rows(record)["lag"].tolist() for record in records(tmp_path)] == [[1] * 4, [2] * 4, [3] * 4]
    # Rows that the disk never got, although the index names them.
    data.write_bytes(data.read_bytes()[:-1])
    assert steps_in(tmp_path) == [1, 2]
    open_files().add(*step_of(4))
    assert steps_in(tmp_path) == [1, 2, 4]


def test_a_disk_that_takes_a_part_of_a_step_gets_none_of_it(tmp_path, open_files):
    files, rows = open_files(), 1_000
    files.add(*step_of(1, rows=rows))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Behind so many bytes of a file, a write is cut, and the next one fails: as on a disk that becomes full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (14 * rows + 20, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            files.add(*step_of(2, rows=rows))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    files.add(*step_of(3, rows=rows))
    assert [set(read_rows(record)["lag"].tolist()) for record in records(tmp_path)] == [{1}, {3}]


@pytest.mark.parametrize("back_to", [0, 1, 3, 5, 9])
def test_a_learner_that_goes_back_writes_the_steps_again(tmp_path, open_files, back_to):
    files = open_files(2_500)
    for number in range(1, 7):
        files.add(*step_of(number, rows=12))
    kept = [step for step in steps_in(tmp_path) if step <= back_to]
    files.rewind(back_to)
    assert steps_in(tmp_path) == kept
    files.add(*step_of(back_to + 1, name="anew "))
    assert steps_in(tmp_path)[-1] == back_to + 1
    (again,) = records(tmp_path, f"anew {back_to + 1}")
    assert read_rows(again)["lag"].tolist() == [back_to + 1] * 4


def test_an_index_with_nonsense_is_read_as_far_as_it_is_one(tmp_path, open_files):
    open_files().add(*step_of(1))
    index = tmp_path / FOLDER / "00000001.idx"
    line = json.loads(index.read_bytes())
    index.write_bytes(
        b"\xff\xfe\n[]\n"
        + json.dumps(line | {"floats": "float8"}).encode()
        + b"\n"
        + json.dumps(line).encode()
    )
    assert steps_in(tmp_path) == [1]


# --- the thread ---------------------------------------------------------------------------------------------


def log_of(tmp_path, **settings):
    return AnnotationLog(tmp_path, mib=1, floats="float16", wall_clock=lambda: 12.3456, **settings)


def write(annotations, step, **more):
    trajectories, batch = two_steps()
    given = {"applied": True, "untrained": {"uniform": ["x", "y"]}} | more
    annotations.step(step, step - 1, trajectories, numbers_of(batch), **given)


def test_a_step_is_written_behind_it(tmp_path):
    annotations = log_of(tmp_path)
    for step in (1, 2):
        write(annotations, step, applied=step == 1)
        assert annotations.settle()
    annotations.close()
    (one, _), (two, _) = read_index(tmp_path)
    assert (one.step, one.version, one.time, one.applied, two.applied) == (1, 0, 12.346, True, False)
    assert one.untrained == {"uniform": ["x", "y"]}
    assert two.offset == one.rows * 14
    annotations.close()


def test_a_disk_that_fails_costs_annotations_and_not_the_run(tmp_path, caplog):
    (tmp_path / FOLDER).write_text("not a folder")
    annotations = log_of(tmp_path)
    for step in (1, 2, 3):
        write(annotations, step)
        assert annotations.settle()
    assert (annotations.left_out, len(caplog.records)) == (3, 1)
    assert "the annotations of step 1 are left out: " in caplog.text
    (tmp_path / FOLDER).unlink()
    write(annotations, 4)
    annotations.close()
    assert steps_in(tmp_path) == [4]


@pytest.mark.parametrize(("tokens", "most"), [(1 << 20, 32), (42, 3)])
def test_a_slow_disk_makes_no_step_wait(tmp_path, monkeypatch, caplog, tokens, most):
    """Steps wait as long as there are few of them, and few tokens: those of a step of this test are 21."""
    monkeypatch.setattr(module, "QUEUED_TOKENS", tokens)
    entered, go_on = threading.Event(), threading.Event()

    def add(*_):
        entered.set()
        assert go_on.wait(60)

    slow = SimpleNamespace(add=add, rewind=lambda step: None, close=lambda: None)
    monkeypatch.setattr(module, "AnnotationFiles", lambda *_: slow)
    annotations = log_of(tmp_path)
    write(annotations, 1)
    assert entered.wait(60)
    for step in range(2, 2 + most):
        write(annotations, step)
    assert (annotations.left_out, annotations.settle(0.0)) == (0, False)
    write(annotations, 99)
    assert annotations.left_out == 1
    assert "slower than training" in caplog.text
    go_on.set()
    annotations.close()
    assert annotations.settle(0.0)


def test_going_back_waits_behind_a_write_that_hangs(tmp_path, monkeypatch, caplog):
    """Two threads never change the files at once: the thread that writes goes back, as soon as its write ends."""
    entered, go_on, calls = threading.Event(), threading.Event(), []

    def add(line, rows):
        calls.append(("add", line.step, threading.current_thread().name))
        entered.set()
        assert go_on.wait(60)

    def back(step):
        calls.append(("rewind", step, threading.current_thread().name))

    files = SimpleNamespace(add=add, rewind=back, close=lambda: None)
    monkeypatch.setattr(module, "AnnotationFiles", lambda *_: files)
    annotations = log_of(tmp_path)
    write(annotations, 1)
    assert entered.wait(60)
    for step in (2, 3):
        write(annotations, step)
    annotations.rewind(2, timeout_s=0.0)
    annotations.rewind(4, timeout_s=0.0)
    write(annotations, 3)
    assert calls == [("add", 1, "annotations")]
    go_on.set()
    assert annotations.settle()
    assert [(what, step) for what, step, _ in calls] == [("add", 1), ("rewind", 2), ("add", 3)]
    assert {thread for *_, thread in calls} == {"annotations"}
    assert annotations.left_out == 1
    assert "the annotations of step 2 are left out" in caplog.text
    annotations.close()


def test_the_ids_of_what_was_not_trained_are_told_once_and_bounded(monkeypatch):
    counts = Counts()
    counts.add("uniform", [make_trajectory("a"), make_trajectory("b")])
    counts.add("evaluated", [make_trajectory("c", purpose="eval")])
    counts.add("stale", [make_trajectory("d")])
    assert counts.take_newest() == {"uniform": ["a", "b"], "stale": ["d"]}
    assert counts.take_newest() == {}
    monkeypatch.setattr(trajectory_module, "MAX_NEWEST", 3)
    for name in "abcde":
        counts.add("uniform", [make_trajectory(name)])
    assert counts.take_newest() == {"uniform": ["a", "b", "c"]}
