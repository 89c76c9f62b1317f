"""Run the whole loop in bfloat16 on one CUDA GPU that the generator and the learner share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_the_slice_runs_in_bfloat16(tmp_path):
    overrides = [f"run.dir={tmp_path}", "run.name=run", f"model.cache={tmp_path}"]
    command = [sys.executable, "-m", "launch.cli", "train", "tests/gpu/letters.toml", *overrides]
    # `tests/conftest.py` gives DeepSpeed the CPU.
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=800)
    decided = json.loads((tmp_path / "run" / "config.json").read_text())
    assert decided["learner"]["dtype"] == decided["generator"]["dtype"] == "bfloat16"
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [m for m in lines if "learner/policy_version" in m]
    assert len(steps) == 5
    assert all(0.8 < m["learner/ratio_proximal_behaviour_mean"] < 1.25 for m in steps)
