"""Run a short, fixed campaign of faults: nothing is lost or trained twice, and no role is left waiting."""

import json
import subprocess
import sys

import pytest

KINDS = (
    "kill broker",
    "kill actor",
    "kill learner",
    "kill scorer",
    "weights flipped",
    "NaN rewards",
    "key of another role",
    "bits flipped",
    "replayed frames",
    "zombie learner",
)


@pytest.mark.timeout(900)
def test_ten_faults(root, tmp_path):
    out = tmp_path / "campaign.json"
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.faults",
        "--faults",
        "10",
        "--seed",
        "3",
        "--kinds",
        *KINDS,
    ]
    ended = subprocess.run(
        [*command, "--dir", str(tmp_path / "run"), "--out", str(out)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    found = json.loads(out.read_text())["results"]
    assert sorted(result["kind"] for result in found["results"]) == sorted(KINDS)
    assert all(result["recovered"] for result in found["results"]), found["results"]
    proof = found["proof"]
    assert (proof["lost"], proof["trained_twice"], proof["audit"]) == ([], [], [])
    assert (proof["violation"], proof["damaged_records"]) == ("", 0)
    assert proof["acknowledged"] > 500, "the proof read something"
    assert proof["units_trained"] > 50
    assert proof["rolled_back"] > 0, "a learner was killed between two checkpoints"
