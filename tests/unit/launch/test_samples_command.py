"""Test `offbeat samples`."""

import json

import pytest

from launch.cli import main
from learner.samples import OLDER_SAMPLES_FILE, SAMPLES_FILE, Sample, SamplePart, encode_line


def sample(step, return_=0.0, *, answer="4", **changes):
    values = {
        "step": step,
        "policy_version": step - 1,
        "split": "train",
        "env": "e",
        "task": f"1g{step}.0",
        "group": f"1g{step}",
        "return_": return_,
        "rewards": {"exact": return_},
        "advantage": 0.5,
        "version_min": step - 2,
        "version_max": step - 1,
        "lag": 1,
        "end": "finished: stop",
        "parts": [SamplePart("prompt", "2 + 2 =", 4), SamplePart("answer", answer, 2)],
    }
    return Sample(**(values | changes))


@pytest.fixture
def run(tmp_path):
    rows = [sample(step, step / 10) for step in range(2, 9)]
    rows.append(sample(5, 1.0, split="heldout", evaluation="step 5", advantage=None, task="1eval-5-0"))
    rows.append(sample(9, failed=True, failure="KeyError: 'x' in t.py:3", advantage=None))
    (tmp_path / OLDER_SAMPLES_FILE).write_bytes(b"".join(map(encode_line, rows[:3])))
    (tmp_path / SAMPLES_FILE).write_bytes(b"".join(map(encode_line, rows[3:])) + b'{"step": 10, "poli')
    return tmp_path


def heads(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


def test_the_newest_come_last(run, capsys):
    assert main(["samples", str(run), "-n", "3"]) == 0
    assert heads(capsys) == [
        "step 8, trained, 1g8.0 (e): return 0.8 (exact 0.8), advantage +0.500, v6-7, lag 1, finished: stop",
        "step 5, held-out, step 5, 1eval-5-0 (e): return 1 (exact 1), v3-4, finished: stop",
        "step 9, training task, 1g9.0 (e): failed: KeyError: 'x' in t.py:3",
    ]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (["--worst", "-n", "2"], ["step 2,", "step 3,"]),
        (["--best", "-n", "2"], ["step 5,", "step 8,"]),
        (["--failed"], ["step 9,"]),
        (["--heldout"], ["step 5,"]),
        (["--step", "5"], ["step 5,", "step 5,"]),
        (["--best", "--step", "5", "-n", "1"], ["step 5,"]),
    ],
)
def test_the_user_chooses(run, capsys, flags, steps):
    assert main(["samples", str(run), *flags]) == 0
    assert [line[:7] for line in heads(capsys)] == steps


def test_lines_of_json_are_for_programs(run, capsys):
    assert main(["samples", str(run), "--json", "-n", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["return"] for line in lines] == [1.0, 0.0]


def test_a_model_cannot_send_escape_codes_to_the_terminal(tmp_path, capsys):
    rows = [sample(1, answer="a\x1b[2J\nb\u202e"), sample(2, env="\x1b[0m", end="\x1b]0;x\x07")]
    (tmp_path / SAMPLES_FILE).write_bytes(b"".join(map(encode_line, rows)))
    assert main(["samples", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "  answer   a\\x1b[2J\n           b\\u202e\n" in out


@pytest.mark.parametrize(
    ("files", "flags", "text"),
    [
        ([], [], "has no samples yet"),
        ([sample(3)], ["--failed"], "none of the 1 samples"),
        ([sample(3)], ["--step", "4"], "of the steps 3 to 3"),
    ],
)
def test_what_is_not_there_is_said(tmp_path, capsys, files, flags, text):
    if files:
        (tmp_path / SAMPLES_FILE).write_bytes(b"".join(map(encode_line, files)))
    assert main(["samples", str(tmp_path), *flags]) == 1
    assert text in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["samples", str(tmp_path / "no")]) == 1
    assert "is not a run folder" in capsys.readouterr().err


def test_no_samples_cannot_be_asked_for(run):
    with pytest.raises(SystemExit):
        main(["samples", str(run), "-n", "0"])
