"""Fuzz all code that reads bytes or messages from other processes.

docs/run/fuzzing.md describes the targets, what must hold, and what was found.

    python -m tests.campaigns.fuzz --target decoder|broker|journal|manifest|session|all --inputs N [--seed S]
                              [--start I] [--out FILE.json] [--findings FOLDER]
    python -m tests.campaigns.fuzz --target T --replay FILE

Each target runs in its own process, with limits on memory and on the processor time of an input. An input is
made only from the seed and its number, so a run can start at any number. A failing input is written to a
file, and the run goes on.
"""

import argparse
import logging
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from benchmarks.report import peak_rss, save_results
from tests.campaigns.fuzz.broker import BrokerTarget
from tests.campaigns.fuzz.engine import Finding, Loop, Report, Target, save
from tests.campaigns.fuzz.journal import JournalTarget
from tests.campaigns.fuzz.messages import DecoderTarget, SessionTarget
from tests.campaigns.fuzz.weights import ManifestTarget

TARGETS: dict[str, Callable[[], Target]] = {
    "decoder": DecoderTarget,
    "broker": BrokerTarget,
    "journal": JournalTarget,
    "manifest": ManifestTarget,
    "session": SessionTarget,
}
CPU_LIMIT_S = 5.0
"""Processor seconds that one input may take."""
SILENCE_S = 300.0
"""Seconds without a new input after which the supervisor kills a target's process as stuck."""
MAX_ADDRESS_BYTES = 4 << 30
MAX_RSS_BYTES = 512 << 20
CHUNK = 2_000
MAX_DEATHS = 20


def work(
    target: str,
    seed: int,
    start: int,
    inputs: int,
    leave_out: set[int],
    folder: Path,
    at: "Synchronized[int]",
    out: Connection,
) -> None:
    """Run the process of one target. Send a report after each chunk of inputs."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    raw = at.get_obj()

    def begun(number: int) -> None:
        raw.value = number

    loop = Loop(TARGETS[target](), folder, begun, CPU_LIMIT_S)
    for first in range(start, start + inputs, CHUNK):
        end = min(first + CHUNK, start + inputs)
        report = loop.many(seed, end - first, first, leave_out)
        report.peak_rss = peak_rss()
        out.send((end, report))


class Supervisor:
    """A supervisor of a target's process.

    If the process dies, the supervisor starts a new one that continues from the last report and leaves out
    the input that killed it.
    """

    def __init__(self, target: str, seed: int, start: int, inputs: int, folder: Path) -> None:
        self._target, self._seed, self._end, self._folder = target, seed, start + inputs, folder
        self._next = start
        self._killers: dict[int, Finding] = {}
        self._reports: list[Report] = []

    def run(self) -> Report:
        """Run all inputs. Stop early after `MAX_DEATHS` deaths of the process. Return the merged report."""
        while self._next < self._end:
            self._attempt()
            if len(self._killers) >= MAX_DEATHS:
                break
        return self._merged()

    def _attempt(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        at = context.Value("q", -1)
        arguments = (
            self._seed,
            self._next,
            self._end - self._next,
            {*self._killers},
            self._folder,
            at,
            theirs,
        )
        process = context.Process(target=work, args=(self._target, *arguments))
        process.start()
        theirs.close()
        newest: Report | None = None
        seen, since, why = -1, time.monotonic(), ""
        while self._next < self._end:
            try:
                if ours.poll(1.0):
                    self._next, newest = ours.recv()
                    continue
            except EOFError:
                why = "the process ended"
                break
            number = at.get_obj().value
            if number != seen:
                seen, since = number, time.monotonic()
            elif time.monotonic() - since > SILENCE_S:
                why = f"nothing for {SILENCE_S:g} s"
                process.kill()
                break
        process.join()
        self._reports += [newest] if newest is not None else []
        if why:
            self._died(at.get_obj().value, f"{why}, with {process.exitcode}")

    def _died(self, number: int, why: str) -> None:
        if number < 0:
            raise SystemExit(f"{self._target}: the process cannot begin ({why})")
        finding = Finding(f"{why} at input {number}", why, self._seed, number)
        data = Loop(TARGETS[self._target]()).make(self._seed, number)
        finding.file = save(self._folder, self._target, finding, data)
        self._killers[number] = finding

    def _merged(self) -> Report:
        whole = Report(self._target, inputs=len(self._killers))
        for report in self._reports:
            for name in ("inputs", "seconds", "cpu_s", "units"):
                setattr(whole, name, getattr(whole, name) + getattr(report, name))
            whole.slowest_s = max(whole.slowest_s, report.slowest_s)
            whole.peak_rss = max(whole.peak_rss, report.peak_rss)
            for place, finding in report.findings.items():
                known = whole.findings.setdefault(place, finding)
                known.count += finding.count if known is not finding else 0
        for finding in self._killers.values():
            whole.findings[finding.place] = finding
        if whole.peak_rss > MAX_RSS_BYTES:
            text = f"{whole.peak_rss} bytes of memory, at most {MAX_RSS_BYTES} expected"
            whole.findings["memory"] = Finding("memory", text, self._seed, self._next)
        return whole


def table(reports: list[Report]) -> str:
    """Return the reports as a Markdown table."""
    lines = [
        "| target | inputs | of these | processor seconds | inputs/s | slowest | peak memory | findings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in reports:
        unit = TARGETS[r.target]().unit
        lines.append(
            f"| {r.target} | {r.inputs:,} | {r.units:,} {unit} | {r.cpu_s:.0f} | {r.inputs / max(r.cpu_s, 1e-9):,.0f} "
            f"| {1000 * r.slowest_s:.0f} ms | {r.peak_rss / 2**20:.0f} MiB | {len(r.findings)} |"
        )
    return "\n".join(lines)


def replay(target: str, path: Path) -> None:
    """Run one input again. An exception that it raises is shown."""
    TARGETS[target]().run(path.read_bytes())
    sys.stdout.write(f"{path}: nothing is wrong\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--inputs", type=int, default=10_000, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--out", type=Path, help="the reports, as JSON")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz"), help="where failing inputs go")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run this input alone")
    args = parser.parse_args()
    names = list(TARGETS) if args.target == "all" else [args.target]
    if args.replay is not None:
        replay(names[0], args.replay)
        return
    reports = []
    for name in names:
        report = Supervisor(name, args.seed, args.start, args.inputs, args.findings).run()
        reports.append(report)
        for finding in report.findings.values():
            sys.stdout.write(
                f"{name}: {finding.count} x {finding.place}: {finding.file}\n{finding.text[-600:]}\n"
            )
        if args.out is not None:
            save_results(args.out, {"targets": table(reports)}, [asdict(r) for r in reports])
    sys.stdout.write(table(reports) + "\n")
    sys.exit(any(report.findings for report in reports))
