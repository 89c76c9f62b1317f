"""Fuzz guided by coverage: keep inputs that reach new code, and make others from them. Needs offbeat[fuzz].

    python -m tests.campaigns.fuzz.guided --target decoder [--inputs N] [--seed S] [--corpus FOLDER]
                                     [--findings FOLDER]

The targets come from `tests.campaigns.fuzz`. That program needs no extra package and reports more about memory and
hangs. This one finds failures that hide behind several conditions. It measures the coverage of our Python
code, but of no C extension. ``tests.campaigns.fuzz --replay`` runs files of the corpus and failing inputs again.
"""

import argparse
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

import atheris

from benchmarks.report import peak_rss

if TYPE_CHECKING:
    from tests.campaigns.fuzz.engine import Loop


MODULES = (
    "protocol.codec", "protocol.session", "protocol.weights.format", "protocol.weights.files",
    "protocol.weights.files", "broker.core.dispatch", "broker.recovery", "broker.journal.journal", "broker.status",
)  # fmt: skip
GUIDED = ("decoder", "broker", "manifest", "session")
"""Targets for guided fuzzing. The journal is missing because its inputs carry flags that say how they were
made, and the engine's mutations would make the flags false."""
BEGINNING = 300
"""Number of random inputs with which the corpus begins."""
MAX_INPUT_BYTES = 4096
CPU_LIMIT_S = 5.0
EDGES = re.compile(rb"cov: (\d+)")


def main() -> None:
    args = parsed()
    logging.disable(logging.CRITICAL)
    # The engine writes to stderr until the process ends. Catch its output here, to read the coverage from it.
    said = tempfile.TemporaryFile()  # noqa: SIM115
    shown = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    os.dup2(said.fileno(), sys.stderr.fileno())
    loop = instrumented(args.target, args.findings)
    corpus = args.corpus or Path(tempfile.mkdtemp(prefix="fuzz-corpus-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(BEGINNING):
        (corpus / f"seed-{args.seed}-{number}").write_bytes(loop.make(args.seed, number))
    began = time.process_time()

    def one(data: bytes) -> None:
        loop.one(data, args.seed, loop.report.inputs)
        if loop.report.inputs < args.inputs:
            return
        shown.write(result(args.target, loop, time.process_time() - began, _edges(said)))
        shown.flush()
        if args.corpus is None:
            shutil.rmtree(corpus)
        # The engine never returns.
        os._exit(bool(loop.report.findings))

    arguments = [
        sys.argv[0],
        f"-seed={args.seed + 1}",
        f"-max_len={MAX_INPUT_BYTES}",
        "-rss_limit_mb=0",
        str(corpus),
    ]
    atheris.Setup(arguments, one)
    atheris.Fuzz()


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, choices=GUIDED)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--corpus", type=Path, help="taken up, and added to; without it, forgotten at the end"
    )
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"))
    return parser.parse_args()


def instrumented(target: str, findings: Path) -> "Loop":
    """Import our modules with instrumentation. Return the loop over a target's inputs."""
    with atheris.instrument_imports(include=["protocol", "broker"]):
        for name in MODULES:
            import_module(name)
    from tests.campaigns.fuzz.engine import Loop

    # Import this after the modules above: it imports the same modules, but without instrumentation.
    from tests.campaigns.fuzz.program import TARGETS

    return Loop(TARGETS[target](), findings, limit_s=CPU_LIMIT_S)


def result(target: str, loop: "Loop", seconds: float, edges: int) -> str:
    """Return the findings, and the row of the table.

    Args:
        seconds: processor time of all inputs.
        edges: parts of our code that they reached.
    """
    report = loop.report
    found = [
        f"{target}: {one.count} x {one.place}: {one.file}\n{one.text[-600:]}\n"
        for one in report.findings.values()
    ]
    row = (
        f"| {target} | {report.inputs:,} | {report.units:,} {loop.target.unit} | {edges:,} edges "
        f"| {seconds:.0f} s | {peak_rss() / 2**20:.0f} MiB "
        f"| {len(report.findings)} |\n"
    )
    return "".join([*found, row])


def _edges(said: IO[bytes]) -> int:
    said.seek(0)
    return max(map(int, EDGES.findall(said.read())), default=0)


if __name__ == "__main__":
    main()
