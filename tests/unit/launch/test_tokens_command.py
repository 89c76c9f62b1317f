"""Test `offbeat journal export --trained`: rows, outcomes, forms of the file, refusals, and the page in pandas."""

import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from broker.core.records import Committed, LearnerJoined, UnitDropped, encode_event
from broker.journal.writer import Kind
from launch.cli import main
from launch.commands import tokens as module
from launch.commands.tokens import COLUMNS, Outcomes
from learner.annotation_files import (
    FOLDER,
    AnnotatedStep,
    AnnotatedTrajectory,
    AnnotationFiles,
    Bit,
    row_type,
)
from protocol.messages.peers import Hello
from tests.journals import DEADLINE_S, begin, small
from tests.pages import ROOT
from tests.unit.launch.test_journal_command import segment


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run: one trajectory in two steps, one uniform, one stale, one that goes on."""
    folder = tmp_path / "run"
    with begin(folder / "journal", small()) as journal:
        for name in ("1g1.0.0", "1g2.0.0", "1g3.0.0"):
            journal.append(Kind.SEGMENT, *segment(name, 0, 3))
            journal.append(Kind.SEGMENT, *segment(name, 1, 2, offset=3, status="finished"))
        journal.append(Kind.SEGMENT, *segment("1g4.0.0", 0, 3))
        journal.append(Kind.SEGMENT, *segment("1g5.0.0", 0, 3, status="finished", purpose="eval"))
        for event in (
            Committed(epoch=1, step=1, trained=["1g1"], dropped=["1g2"], version=0),
            UnitDropped(unit_id="1g3", outcome="stale"),
        ):
            journal.append(Kind.EVENT, encode_event(event))
        assert journal.sync(DEADLINE_S)
    files = AnnotationFiles(folder / FOLDER, 1 << 20)
    rows = np.zeros(3, row_type("float32"))
    rows["bits"] = [Bit.TRAINED, Bit.TRAINED | Bit.CLIPPED, Bit.STALE]
    rows["lag"], rows["ratio"], rows["advantage"] = [0, 1, 5], [1.1, 0.1, np.nan], [0.1, 0.1, np.nan]
    place = AnnotatedTrajectory("1g1.0.0", 3, 0, [(1, 3), (4, 5)])
    of_file = AnnotatedTrajectory("taught-1g2.0", 2, 0, [(1, 3)], False, "taught", "1g2", [7, 8, 9])
    for step, untrained in ((1, {"uniform": ["1g2.0.0"]}), (2, {})):
        also = [] if step == 1 else [of_file]
        line = AnnotatedStep(
            step=step, version=step - 1, time=0.0, applied=True, floats="float32", offset=0,
            trajectories=[place, *also], untrained=untrained,
        )  # fmt: skip
        files.add(line, rows.tobytes() + (rows[:2].tobytes() if also else b""))
    files.close()
    return folder


def exported(run, out, *arguments, code=0):
    assert main(["journal", "export", str(run), "--trained", "--out", str(out), *arguments]) == code
    return [json.loads(line) for line in out.read_text().splitlines()] if code == 0 else []


def test_each_sampled_token_has_a_row_for_each_step_that_took_it(run, tmp_path, capsys):
    rows = exported(run, tmp_path / "tokens.jsonl")
    assert all(list(row) == list(COLUMNS) for row in rows)
    first = [row for row in rows if row["trajectory"] == "1g1.0.0"]
    assert [(row["step"], row["position"]) for row in first] == [
        (1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (None, 3)
    ]  # fmt: skip
    assert [row["masked"] for row in first[:3]] == ["", "", "lag"]
    assert [row["clipped"] for row in first[:3]] == [False, True, False]
    assert [row["lag"] for row in first[:3]] == [0, 1, 5]
    assert np.float32(first[0]["ratio"]).tobytes() == np.float32(1.1).tobytes()
    assert (first[2]["ratio"], first[0]["weight"], first[6]["ratio"]) == (None, None, None)
    assert [row["token"] for row in first[:3]] == [1, 2, 4]
    assert np.float32(first[2]["logp_behaviour"]) == np.float32(-4 / 3)
    assert {row["trajectory"]: row["outcome"] for row in rows} == {
        "1g1.0.0": "trained", "1g2.0.0": "uniform", "1g3.0.0": "stale", "1g4.0.0": "waiting",
        "taught-1g2.0": "trained",
    }  # fmt: skip
    assert "tokens of 5 trajectories (2 trained, 1 uniform, 1 stale, 1 waiting)" in capsys.readouterr().out
    assert {r["trajectory"] for r in exported(run, tmp_path / "t.jsonl", "--trajectory", "1g3.0.0")} == {
        "1g3.0.0"
    }


def test_an_answer_of_a_file_is_there_although_the_journal_lacks_it(run, tmp_path):
    rows = exported(run, tmp_path / "t.jsonl", "--trajectory", "taught-1g2.0")
    assert [(row["step"], row["position"], row["token"], row["origin"]) for row in rows] == [
        (2, 1, 8, "taught"),
        (2, 2, 9, "taught"),
    ]
    assert {(row["group"], row["version"], row["logp_behaviour"], row["outcome"]) for row in rows} == {
        ("1g2", None, None, "trained")
    }
    assert [row["clipped"] for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("out", "arguments", "said"),
    [
        ("tokens.csv", (), "tokens are written as .jsonl or .parquet"),
        ("tokens.jsonl", ("--format", "jsonl"), "leave --format out"),
        ("none/tokens.jsonl", (), "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_refused(run, tmp_path, capsys, out, arguments, said):
    exported(run, tmp_path / out, *arguments, code=1)
    assert said in capsys.readouterr().err
    assert not (tmp_path / out).exists()


def test_parquet_without_pyarrow_is_refused_with_the_cure(run, tmp_path, capsys, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=missing))
    exported(run, tmp_path / "tokens.parquet", code=1)
    assert (
        "needs pyarrow (No module named 'pyarrow'); pip install pyarrow, or write .jsonl"
        in capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == [run]


def test_a_run_without_annotations_says_so(run, tmp_path, capsys):
    for path in (run / FOLDER).iterdir():
        path.unlink()
    exported(run, tmp_path / "tokens.jsonl", code=1)
    assert "learner.annotations_mib is 0" in capsys.readouterr().err


def package(name, monkeypatch):
    """Return a package, which `make trackers` puts into a folder of its own: behind what is installed."""
    if folder := os.environ.get("OFFBEAT_TRACKERS"):
        monkeypatch.setattr(sys, "path", [*sys.path, folder])
    return pytest.importorskip(name)


def test_parquet_has_the_rows_of_json_lines(run, tmp_path, monkeypatch):
    parquet = package("pyarrow.parquet", monkeypatch)
    rows = exported(run, tmp_path / "tokens.jsonl")
    assert main(["journal", "export", str(run), "--trained", "--out", str(tmp_path / "t.parquet")]) == 0
    table = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["position"] for row in table] == [row["position"] for row in rows]
    for one, other in zip(table, rows, strict=True):
        assert one == other


def test_the_ten_lines_of_the_page_run(run, tmp_path, monkeypatch, capsys):
    package("pandas", monkeypatch)
    exported(run, tmp_path / "tokens.jsonl")
    page = (ROOT / "docs" / "run" / "tokens.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "tokens.md", "exec"), {})
    assert "clipped" in capsys.readouterr().out


def test_steps_that_were_undone_leave_no_outcome():
    outcomes = Outcomes()

    def joined(step):
        return LearnerJoined(hello=Hello(role="learner", peer="learner", incarnation=step + 1, step=step))

    outcomes.add_event(Committed(epoch=1, step=1, trained=["1g1"], version=0))
    outcomes.add_event(Committed(epoch=1, step=2, trained=["1g2"], dropped=["1g3"], version=1))
    outcomes.add_event(joined(1))
    assert [outcomes.of(f"1g{n}.0.0") for n in (1, 2, 3)] == ["trained", "waiting", "waiting"]
    outcomes.add_event(Committed(epoch=2, step=2, trained=["1g3"], version=1))
    assert outcomes.of("1g3.0.0") == "trained"


def test_what_a_teacher_wrote_has_no_version_no_lag_and_no_probability(run, tmp_path):
    with begin(run / "journal", small()) as journal:
        own = {"policy_version": np.full(3, -1, "<i4"), "logp_behaviour": np.zeros(3, "<f4")}
        parts = segment("1g6r1.0.0", 0, 3, status="finished", policy="big", more=own)
        journal.append(Kind.SEGMENT, *parts)
        assert journal.sync(DEADLINE_S)
    rows = [row for row in exported(run, tmp_path / "tokens.jsonl") if row["trajectory"] == "1g6r1.0.0"]
    assert [row["position"] for row in rows] == [1, 2]
    assert {(row["version"], row["lag"], row["logp_behaviour"]) for row in rows} == {(None, None, None)}
