"""One run of benchmarks/every_way/program.py: the real system, its peak memory, and what must hold at its end."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.every_way.cases import SHORT, Case
from launch.processes import families

ROOT = Path(__file__).parents[2]
LOOK_S = 1.0
STOP_S = 120.0
GIB = 2**30


@dataclass
class Outcome:
    """What a case has shown. ``faults`` is empty if everything held that must hold."""

    name: str
    seconds: float = 0.0
    steps: int = 0
    trained_tokens: int = 0
    gradient_norm: float | None = None
    """Of the last step that changed the policy; None: no step reported one."""
    lag_max: int | None = None
    restarts: int = 0
    memory_gib: dict[str, float] = field(default_factory=dict)
    """Peak of the proportional memory of each role's processes, looked at once a second."""
    faults: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_case(name: str, case: Case, run_file: str, steps: int, folder: Path, limit_s: float) -> Outcome:
    """Run a case in ``folder`` and look at what it leaves behind."""
    outcome, began = Outcome(name), time.monotonic()
    label = name.replace(" ", "-").replace(",", "")
    overrides = [*SHORT, *case.overrides, f"run.dir={folder}", f"run.name={label}"]
    run = folder / label
    # A killed process must have something left to do.
    targets = [steps, 2 * steps] if case.resumed else [2 * steps if case.killed else steps]
    for number, target in enumerate(targets):
        command = [sys.executable, "-m", "launch.cli", "train", run_file, *overrides]
        command += [f"learner.steps={target}", *(["--resume"] if number else [])]
        _watch(command, run, outcome, case.killed, began + limit_s)
    outcome.seconds = time.monotonic() - began
    if not outcome.faults:
        _judge(run, case, targets[-1], outcome)
    if not outcome.faults and case.exported:
        _load(run, run_file, overrides, outcome)
    return outcome


def _watch(command: Sequence[str], run: Path, outcome: Outcome, kill: str, until: float) -> None:
    """Run the command to its end, note the memory, and kill one process after the first step."""
    log = run.parent / f"{run.name}.log"
    with open(log, "ab") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink)
    try:
        while True:
            # The wait is the clock of the look at the memory.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
                break
            _note_memory(run, outcome)
            if kill and _steps(run):
                os.kill(_pids(run)[kill], signal.SIGKILL)
                kill = ""
            if time.monotonic() > until:
                outcome.faults.append("it did not end in time")
                break
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if kill:
        outcome.faults.append(f"it ended before {kill} was killed")
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        outcome.faults.append(f"exit {process.returncode}: {' '.join(lines[-3:])[-300:]}")


def _judge(run: Path, case: Case, steps: int, outcome: Outcome) -> None:
    """Check the run's files: each step once, tokens trained, finite gradients, versions published, restarts."""
    lines = _steps(run)
    summary = json.loads((run / "summary.json").read_text())
    norms = [m["learner/gradient_norm"] for m in lines if m.get("learner/trained_tokens")]
    outcome.steps = int(summary["steps"])
    outcome.trained_tokens = int(summary["tokens_trained"])
    outcome.gradient_norm = norms[-1] if norms else None
    outcome.lag_max = summary["policy_lag"]["max_versions"]
    outcome.restarts = sum(summary["restarts"].values())
    checks = {
        f"steps {[m['step'] for m in lines]}, not 1 to {steps}, once each": [m["step"] for m in lines]
        == list(range(1, steps + 1)),
        "no token was trained": outcome.trained_tokens > 0,
        f"gradient norms {norms}": any(norms) and all(math.isfinite(n) for n in norms),
        # A critic that warms up publishes no version.
        "no version was published": summary["policy_version"] > 0,
        f"{outcome.restarts} restarts": outcome.restarts == (1 if case.killed else 0),
        "episodes failed": summary["episodes"]["failed"] == 0,
    }
    outcome.faults += [what for what, holds in checks.items() if not holds]


def _load(run: Path, run_file: str, overrides: Sequence[str], outcome: Outcome) -> None:
    """Load the written model with transformers, and evaluate it with vLLM."""
    check = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()\n"
    )
    own = [o for o in overrides if not o.startswith(("run.", "learner.evaluation_tasks"))]
    evaluate = [*own, f"run.dir={run.parent}", f"run.name={run.name}-eval", "learner.evaluation_tasks=8"]
    commands = {
        "transformers": ["-c", check, str(run / "model")],
        "offbeat eval": ["-m", "launch.cli", "eval", str(run / "model"), run_file, *evaluate],
    }
    for what, command in commands.items():
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            outcome.faults.append(f"{what}: exit {done.returncode}: {(done.stdout + done.stderr)[-300:]}")


def _pids(run: Path) -> dict[str, int]:
    try:
        posts = json.loads((run / "supervisor.json").read_text())["processes"]
    except (OSError, ValueError):
        return {}
    return {name: post["pid"] for name, post in posts.items() if post["pid"]}


def _steps(run: Path) -> list[dict[str, Any]]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [m for m in map(json.loads, lines) if "learner/policy_version" in m]


def _note_memory(run: Path, outcome: Outcome) -> None:
    pids = _pids(run)
    found = families(pids.values())
    for name, pid in pids.items():
        role = name.partition("-")[0]
        used = proportional(found[pid]) / GIB
        outcome.memory_gib[role] = max(outcome.memory_gib.get(role, 0.0), used)


def proportional(pids: Iterable[int]) -> int:
    """Return the memory of processes in bytes. Each gets its share of the pages that several have mapped."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
