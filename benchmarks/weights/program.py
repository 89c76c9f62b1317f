"""Measure the cost of a new policy version: pause of generation, and time from publishing until it serves.

    python -m benchmarks.weights [--sizes 1M 10M 50M] [--repetitions 5] [--json build/weights.json]

A learner (this process) publishes float32 weights into shared memory, as in `offbeat train`. A generator
process loads them, with 64 requests running and with none. It reads them from the shared folder, or over HTTP
(with TLS, as in an encrypted run) from a server process on loopback, as if that were another host. The ways
take turns. The clock starts when the learner has the tensors in memory and begins to copy them. The learner stands
until they are copied; a thread hashes and announces them behind its next step, which is left out here.

The results are compared with a plain copy of the file within shared memory, and with the engine's own time to
load (start, update, finish). The plain copy does not hash, verify, pause or load. The table has medians, with
minimum and maximum in brackets.
"""

import argparse
import logging
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from actors.config import GeneratorConfig
from benchmarks.generation.program import SIZES, make_model
from benchmarks.report import save_results
from benchmarks.weights.sides import RUN, Side, Taken, Told, run_generator, run_server
from learner.publisher import Publisher
from learner.run_files import weights_folder
from protocol.messages.peers import PublishWeights
from protocol.security.key_files import make as make_keys
from protocol.weights.format import DATA, read_shapes

SHARED = Path("/dev/shm")
WAYS = ("shared folder", "HTTP")
NOWHERE = "/nowhere/manifest.msgpack"

Row = dict[str, float]
Results = dict[str, dict[str, Any]]


class Learner:
    """A learner with weights in memory, which change a little with each version."""

    def __init__(self, model: Path, folder: Path, url: str) -> None:
        from safetensors.torch import load_file

        self._tensors = load_file(model / "model.safetensors")
        self._shapes = read_shapes(model / "model.safetensors")
        self.publisher = Publisher(RUN, folder, epoch=1, keep=2, url=url)
        self._version = 0

    def publish(self, way: str) -> tuple[Told, float, float, float]:
        """Publish a version.

        Returns:
            Its announcement, the time when copying began, and the seconds until it was copied and announced.
        """
        from learner.weight_copy import OutgoingWeights

        self._version += 1
        for tensor in self._tensors.values():
            tensor.mul_(1.0001)
        # Wait until the publisher has tidied up, before the clock starts. A real learner's step is longer.
        self.publisher.await_tidied()
        told: list[PublishWeights] = []
        began = time.perf_counter()
        tensors = ((name, self._tensors[name]) for name in self._shapes)
        self.publisher.publish(self._version, OutgoingWeights(self._shapes, tensors), announce=told.append)
        stood = time.perf_counter() - began
        self.publisher.settle()
        took, message = time.perf_counter() - began, told[0]
        near = way == WAYS[0]
        manifest, sources = (message.manifest, ()) if near else (NOWHERE, (message.url,))
        return Told(self._version, manifest, sources, message.root), began, stood, took

    def file(self) -> Path:
        """Return the data file of the newest version."""
        return max(self.publisher.folder.glob("v*")) / DATA


def copy(source: Path, target: Path) -> float:
    """Copy a file plainly. Return the seconds it took."""
    began = time.perf_counter()
    shutil.copyfile(source, target)
    took = time.perf_counter() - began
    target.unlink()
    return took


def measure(size: str, arguments: argparse.Namespace, folder: Path, shared: Path, results: Results) -> None:
    """Measure one model by way and number of requests. Add its rows to ``results``."""
    parameters = make_model(size, folder / size)
    nbytes = (folder / size / "model.safetensors").stat().st_size
    config = GeneratorConfig(max_num_seqs=64, kv_on_update=arguments.kv)
    (shared / size).mkdir()
    keys = folder / "keys"
    make_keys(keys)
    generator = Side(run_generator, folder / size, config, shared / size, keys)
    run_dir = folder / f"run-{size}"
    run_dir.mkdir()
    server = Side(run_server, weights_folder(run_dir), keys)
    rows: dict[str, list[Row]] = {}
    results[size] = {"parameters": parameters, "bytes": nbytes, "ways": rows}
    try:
        learner = Learner(folder / size, run_dir, server.receive())
        assert generator.receive() == "ready"
        for repetition in range(arguments.repetitions + 1):
            for requests in (0, arguments.requests):
                rate = generator.ask(requests)
                for way in WAYS:
                    row = once(learner, generator, way, shared)
                    name = f"{way}, {'sampling' if requests else 'idle'}"
                    logging.info("%s %s %.0f tokens/s: %s", size, name, rate, row)
                    # The first repetition is a warm-up.
                    if repetition:
                        rows.setdefault(name, []).append(row)
    finally:
        generator.close()
        server.close()
        shutil.rmtree(weights_folder(run_dir), ignore_errors=True)


def once(learner: Learner, generator: Side, way: str, shared: Path) -> Row:
    """Measure one update, and one plain copy of its file.

    Raises:
        RuntimeError: the generator did not accept the version.
    """
    told, began, stand_s, publish_s = learner.publish(way)
    taken: Taken = generator.ask(told)
    if taken.failure:
        raise RuntimeError(taken.failure)
    copied = copy(learner.file(), shared / "copy")
    staged, serving = taken.staged - began, taken.serving - began
    return {
        "copy_s": copied,
        "stand_s": stand_s,
        "publish_s": publish_s,
        "staged_s": staged,
        "serving_s": serving,
        "load_s": taken.load_s,
        "step_s": taken.step_s,
        "paused_s": taken.paused_s,
        "lost_s": taken.lost_s,
        "paused_over_load": taken.paused_s / taken.load_s,
        "staged_over_copy": staged / copied,
        "serving_over_copy": serving / copied,
        "serving_over_copy_and_load": serving / (copied + taken.load_s),
    }


def summary(rows: list[Row]) -> dict[str, list[float]]:
    """Return the median, minimum and maximum of each figure."""
    return {
        name: [reduce([row[name] for row in rows]) for reduce in (statistics.median, min, max)]
        for name in rows[0]
    }


COLUMNS = {
    "copy_s": "plain copy, ms",
    "stand_s": "learner stands, ms",
    "publish_s": "written and hashed, ms",
    "staged_s": "ready to load, ms",
    "load_s": "engine's load, ms",
    "step_s": "end of the step, ms",
    "paused_s": "pause, ms",
    "lost_s": "generation lost, ms",
    "serving_s": "serving, ms",
    "paused_over_load": "pause / load",
    "staged_over_copy": "ready / copy",
    "serving_over_copy": "serving / copy",
    "serving_over_copy_and_load": "serving / (copy + load)",
}


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for size, result in results.items():
        for way, row in result["ways"].items():
            cells = [_cell(row[name], 1e3 if name.endswith("_s") else 1.0) for name in COLUMNS]
            lines.append(f"| {size} ({result['bytes'] / 1e6:.0f} MB), {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def headline(results: dict[str, Any]) -> tuple[str, str, str]:
    """Return the range of the ways' median ratios of pause over load, for the README."""
    ratios = [row["paused_over_load"][0] for result in results.values() for row in result["ways"].values()]
    return (
        "pause of sampling for new weights (less is better)",
        "vLLM's own load",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
    )


def _cell(figures: list[float], unit: float) -> str:
    digits = 0 if unit > 1 and figures[0] * unit >= 20 else 1 if unit > 1 else 2
    median, least, most = (f"{figure * unit:,.{digits}f}" for figure in figures)
    return f"{median} [{least}, {most}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kv", choices=["recomputed", "kept"], default="recomputed")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    # Exit through Python on SIGTERM, so that the processes of the benchmark end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results: Results = {}
    try:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=SHARED) as shared:
            for size in arguments.sizes:
                measure(size, arguments, Path(folder), Path(shared), results)
    finally:
        # Report what was measured so far, even if the benchmark is cut short.
        report(arguments, results)


def report(arguments: argparse.Namespace, rows: Results) -> None:
    results = {
        size: found | {"ways": {way: summary(r) for way, r in found["ways"].items()}}
        for size, found in rows.items()
    }
    if arguments.json is not None:
        save_results(arguments.json, {"arms": table(results)}, results, [headline(results)])
    logging.info("%s", table(results))
