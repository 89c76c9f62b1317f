"""Each tracker's own package, offline: what it stored is read back, of a run that was resumed in between.

The packages are extras, and full MLflow needs a different fastapi than vLLM. `make trackers` puts them into a folder
and sets OFFBEAT_TRACKERS; without it, a tracker whose package is not installed is skipped.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FOLDER = os.environ.get("OFFBEAT_TRACKERS", "")


def installed(name):
    return (Path(FOLDER) / name).is_dir() if FOLDER else importlib.util.find_spec(name) is not None


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_resumed_run_is_one_run_there_with_the_steps_and_clocks_of_the_report(name, tmp_path):
    if not installed(name):
        pytest.skip(f"the package {name} is not installed; `make trackers` runs this test")
    places = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    # First what the tracker needs: it may want other versions than those of this environment.
    search = os.pathsep.join(filter(None, [str(ROOT), FOLDER]))
    env = {**os.environ, **places, **offline, "PYTHONPATH": search}
    env.pop("MLFLOW_TRACKING_URI", None)
    for act in ("begin", "resume", "read"):
        command = [sys.executable, str(Path(__file__).with_name("program.py")), name, str(tmp_path), act]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / "read.json").read_text())
    if name != "trackio":
        identity = (tmp_path / "tracker_id").read_text()
        assert read["runs"] == [["letters", "spell", identity]]
    assert len(read["runs"]) == 1
    # Step 2 was done again behind the checkpoint of step 1.
    assert read["loss"] == [[1, 0.5, 1001.0], [2, 1.0, 1002.0], [2, 1.0, 2002.0], [3, 1.5, 2003.0]]
    assert [point[:2] for point in read["odd"]] == [[1, 1.0], [2, 1.0], [2, 1.0], [3, 1.0]]
    assert [point[:2] for point in read["held_out"]] == [[2, 0.25]]
    assert read["config"] == {"optimizer": {"lr": 0.5}}
    assert read["histogram"]
    assert read["answer"] == "2\\x1b[2J", "a model's escape codes are written as text"
    assert read["summary"] == ["all steps done", 3]
    assert read["notes"] == 2, "the note, and that the run went back"
    assert not read.get("console_lines")
