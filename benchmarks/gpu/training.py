"""Whole runs on one GPU that learner and generator share: asynchronous, and in lockstep with and without sleep.

All arms train on equally many trajectories of equal length. A run is `offbeat train` as users start it. The figure
counts the steps behind the first ones, in which engines compile and buffers are allocated. On one GPU both roles
compute on the same cores, so an asynchronous run may be slower here than one in lockstep.
"""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.setting import GpuSetting, make_model
from benchmarks.report import ROOT, Figure

RUN_FILE = Path(__file__).with_name("training.toml")
ARMS = {
    "asynchronous": ["run.mode=async"],
    "lockstep, the engine sleeps in updates": ["run.mode=sync", "generator.sleep_in_updates=true"],
    "lockstep, the engine stays awake": ["run.mode=sync", "generator.sleep_in_updates=false"],
}
BESIDE = "lockstep, the engine stays awake"
QUICK_ARMS = ("asynchronous", BESIDE)
SKIPPED = 2
"""Steps at the beginning that do not count."""
RUN_TIMEOUT_S = 900.0
TINY = [
    "learner.steps=4",
    "learner.batch_trajectories=16",
    "learner.sampling.max_turn_tokens=8",
    "learner.sampling.max_trajectory_tokens=64",
    "generator.max_model_len=64",
    "env.params.length=8",
]

QUICK = ["learner.steps=7"]


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure the first model in all arms, which take turns."""
    name = setting.models[0]
    folder = make_model(name, setting.shelf, setting.dtype, setting.device)
    arms = QUICK_ARMS if setting.quick else tuple(ARMS)
    # A run takes minutes, so one of each arm has to do.
    rates = {arm: [run(setting, folder, arm)] for arm in arms}
    return [
        Figure(
            f"{name}, learner and generator on one device: {arm}",
            "trained tokens/s",
            rates[arm],
            *(() if arm == BESIDE else (BESIDE, rates[BESIDE])),
        )
        for arm in arms
    ]


def run(setting: GpuSetting, model: Path, arm: str) -> float:
    """Train once, and return the tokens per second behind the first steps.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    place = setting.folder / "runs"
    name = f"run-{list(ARMS).index(arm)}"
    overrides = [f"model.path={model}", f"run.dir={place}", f"run.name={name}", *ARMS[arm]]
    command = [sys.executable, "-m", "launch.cli", "train", str(RUN_FILE), *overrides]
    command += TINY if setting.tiny else QUICK if setting.quick else []
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{arm}: {(done.stdout + done.stderr)[-2000:]}")
    return rate((place / name / "metrics.jsonl").read_text())


def rate(metrics: str) -> float:
    """Return the trained tokens per second of all steps but the first `SKIPPED`, from the lines of a run.

    Example:
        >>> lines = [{"learner/trained_tokens": 10.0, "learner/trained_tokens_per_second": s} for s in (1, 2, 5, 10)]
        >>> rate("\\n".join(map(json.dumps, lines)))
        6.666666666666667
    """
    steps = [line for line in map(json.loads, metrics.splitlines()) if "learner/trained_tokens" in line]
    tokens = [step["learner/trained_tokens"] for step in steps[SKIPPED:]]
    speeds = [step["learner/trained_tokens_per_second"] for step in steps[SKIPPED:]]
    return float(sum(tokens) / sum(count / speed for count, speed in zip(tokens, speeds, strict=True)))
