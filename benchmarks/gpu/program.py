"""Measure what Offbeat reaches on one GPU, each figure beside a bare loop, in about an hour.

    python -m benchmarks.gpu [--steps ceilings learner attention gradients publish load generation updates system
                             training] [--models 0.6B 1.7B] [--repetitions 3] [--quick] [--out build/gpu] [--json FILE]
    python -m benchmarks.gpu --device cpu --tiny

Each step runs in a process of its own, so a step that fails takes nothing from the others, and the next one finds
the GPU empty. That one has loaded its libraries meanwhile. Both sides of a figure take turns. The table has medians,
with minimum and maximum in brackets. Models and versions lie in shared memory meanwhile: 8 GB and twice that for a
version of 8 GB. `--quick` measures fewer sizes, for a GPU that is there for minutes only.

With `--device cpu --tiny` every step runs in seconds with a model of some thousand parameters. That proves that the
programs work, and the figures mean nothing. Without `--device`, a machine without a GPU is told so.
"""

import argparse
import importlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, save_results, table

STEPS = {
    "ceilings": "benchmarks.gpu.ceilings",
    "learner": "benchmarks.gpu.learner_step",
    "attention": "benchmarks.gpu.attention",
    "gradients": "benchmarks.gpu.gradient_sums",
    "publish": "benchmarks.gpu.publish",
    "load": "benchmarks.gpu.load",
    "generation": "benchmarks.gpu.generation",
    "updates": "benchmarks.gpu.update_cost",
    "system": "benchmarks.gpu.system",
    "training": "benchmarks.gpu.training",
}
STEP_TIMEOUT_S = 2400.0
NO_GPU = "no GPU is here, so nothing was measured; try the programs with `python -m benchmarks.gpu --device cpu --tiny`"


def arguments_of(given: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="only prove that the programs work")
    parser.add_argument("--quick", action="store_true", help="measure fewer sizes")
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--models", nargs="+", default=None, help="tiny, 0.6B, 1.7B, 4B; default 0.6B 1.7B")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--json", type=Path, help="the file of all figures; default gpu.json in --out")
    parser.add_argument("--here", action="store_true", help="run the one step of --steps in this process")
    parser.add_argument("--folder", type=Path, help="where models lie; with --here, after a line on stdin")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = arguments_of(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        (step,) = arguments.steps
        found = [asdict(figure) for figure in run_here(step, arguments)]
        (arguments.out / f"{step}.json").write_text(json.dumps(found, indent=1))
        return
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        logging.info(NO_GPU)
        return
    failed = run_all(arguments)
    report(arguments, failed)
    if failed:
        sys.exit(1)


def run_here(step: str, arguments: argparse.Namespace) -> list[Figure]:
    """Run one step in this process, when its turn has come."""
    import torch

    from benchmarks.gpu.setting import GpuSetting

    module = importlib.import_module(STEPS[step])
    if arguments.folder and not sys.stdin.readline():
        sys.exit("the program that started this step has ended")
    models = arguments.models or (["tiny"] if arguments.tiny else ["0.6B", "1.7B"])
    with new_folder() as folder:
        setting = GpuSetting(
            device=torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu"),
            tiny=arguments.tiny,
            repetitions=arguments.repetitions,
            folder=folder,
            shelf=arguments.folder or folder,
            models=tuple(models),
            quick=arguments.quick,
        )
        figures: list[Figure] = module.measure(setting)
    return figures


@contextmanager
def new_folder() -> Iterator[Path]:
    """Give a folder in shared memory, where versions of a run lie, too. It is removed afterwards."""
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="offbeat-gpu-") as folder:
        yield Path(folder)


def run_all(arguments: argparse.Namespace) -> dict[str, str]:
    """Run each step in a process. Return those that failed, with the last lines that they wrote."""
    failed: dict[str, str] = {}
    processes: list[subprocess.Popen[bytes]] = []
    with new_folder() as folder:
        try:
            for number, step in enumerate(arguments.steps):
                # The next one loads its libraries now, and waits for its turn.
                for each in arguments.steps[len(processes) : number + 2]:
                    processes.append(start(each, arguments, folder))
                logging.info("%s ...", step)
                if code := finish(processes[number]):
                    log = arguments.out / f"{step}.log"
                    failed[step] = f"{code}: {' / '.join(log.read_text(errors='replace').splitlines()[-3:])}"
                    logging.info("%s failed, see %s", step, log)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return failed


def finish(process: subprocess.Popen[bytes]) -> int | str:
    """Tell a step that its turn has come, and wait for it. Return its exit code, or words if it does not end."""
    try:
        process.communicate(b"your turn\n", timeout=STEP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no end after {STEP_TIMEOUT_S:g} s"
    return process.returncode


def start(step: str, arguments: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process of a step, which waits until its stdin has a line."""
    (arguments.out / f"{step}.json").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--here",
        "--steps",
        step,
        "--device",
        arguments.device,
    ]
    command += ["--repetitions", str(arguments.repetitions), "--out", str(arguments.out)]
    command += ["--folder", str(folder)]
    command += ["--tiny"] if arguments.tiny else []
    command += ["--quick"] if arguments.quick else []
    command += ["--models", *arguments.models] if arguments.models else []
    with open(arguments.out / f"{step}.log", "wb") as output:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)


def report(arguments: argparse.Namespace, failed: dict[str, str]) -> None:
    """Print the table, and write it with all figures to a JSON file."""
    found: dict[str, list[Figure]] = {}
    for step in arguments.steps:
        if step not in failed:
            rows = json.loads((arguments.out / f"{step}.json").read_text())
            found[step] = [Figure(**row) for row in rows]
    text = table([figure for figures in found.values() for figure in figures])
    results: dict[str, Any] = {
        "device": device_name(arguments.device),
        "tiny": arguments.tiny,
        "steps": {step: [asdict(figure) for figure in figures] for step, figures in found.items()},
        "failed": failed,
    }
    device = results["device"] if arguments.device == "cuda" else ""
    save_results(arguments.json or arguments.out / "gpu.json", {"figures": text}, results, device=device)
    logging.info("%s", text)
    for step, why in failed.items():
        logging.info("%s failed: %s", step, why)


def device_name(device: str) -> str:
    """Return the name of the GPU with the versions that matter, or "cpu"."""
    import torch

    if device == "cpu":
        return "cpu"
    return f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}"
