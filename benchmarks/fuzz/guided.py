"""Fuzzes by coverage: an input that reaches something new is kept, and others are made of it. Needs offbeat[fuzz].

    python -m benchmarks.fuzz.guided --target decoder [--inputs N] [--seed S] [--corpus FOLDER] [--findings FOLDER]

The targets are those of `benchmarks.fuzz`, which needs nothing else and says more of memory and hangs; this one finds
what hides behind several conditions. Python code of ours is measured, no C extension. Files of the corpus and failing
inputs are inputs of ``benchmarks.fuzz --replay``.
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
from typing import IO

import atheris

from benchmarks.memory import peak_rss

MODULES = (
    "protocol.codec", "protocol.session", "protocol.weights.format", "protocol.weights.chunks",
    "protocol.weights.delta", "broker.core.dispatch", "broker.recovery", "broker.journal.journal", "broker.status",
)  # fmt: skip
GUIDED = ("decoder", "broker", "manifest", "session")
"""Not the journal: an input of it says what was changed in it, which the engine would make untrue."""
BEGINNING = 300
"""Inputs of the random kind that the corpus begins with."""
MAX_INPUT_BYTES = 4096
CPU_LIMIT_S = 5.0
EDGES = re.compile(rb"cov: (\d+)")


def main() -> None:
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
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    said = tempfile.TemporaryFile()  # noqa: SIM115 (what the engine says, until the process ends)
    shown = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    os.dup2(said.fileno(), sys.stderr.fileno())
    with atheris.instrument_imports(include=["protocol", "broker"]):
        for name in MODULES:
            import_module(name)
    from benchmarks.fuzz.engine import Loop
    from benchmarks.fuzz.program import (
        TARGETS,  # behind the instrumented modules, which it would import as they are
    )

    loop = Loop(TARGETS[args.target](), args.findings, limit_s=CPU_LIMIT_S)
    corpus = args.corpus or Path(tempfile.mkdtemp(prefix="fuzz-corpus-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(BEGINNING):
        (corpus / f"seed-{args.seed}-{number}").write_bytes(loop.make(args.seed, number))
    began = time.process_time()

    def one(data: bytes) -> None:
        loop.one(data, args.seed, loop.report.inputs)
        if loop.report.inputs < args.inputs:
            return
        report, seconds = loop.report, time.process_time() - began
        for finding in report.findings.values():
            shown.write(
                f"{args.target}: {finding.count} x {finding.place}: {finding.file}\n{finding.text[-600:]}\n"
            )
        shown.write(
            f"| {args.target} | {report.inputs:,} | {report.units:,} {loop.target.unit} | {_edges(said):,} edges "
            f"| {seconds:.0f} s | {peak_rss() / 2**20:.0f} MiB "
            f"| {len(report.findings)} |\n"
        )
        shown.flush()
        if args.corpus is None:
            shutil.rmtree(corpus)
        os._exit(bool(report.findings))  # the engine never returns

    arguments = [
        sys.argv[0],
        f"-seed={args.seed + 1}",
        f"-max_len={MAX_INPUT_BYTES}",
        "-rss_limit_mb=0",
        str(corpus),
    ]
    atheris.Setup(arguments, one)
    atheris.Fuzz()


def _edges(said: IO[bytes]) -> int:
    said.seek(0)
    return max(map(int, EDGES.findall(said.read())), default=0)


if __name__ == "__main__":
    main()
