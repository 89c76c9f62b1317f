"""Check that codec, batching and objective have not become more expensive than a baseline allows.

    python -m benchmarks.ratios [--renew] [--json build/ratios.json]

Each is compared with a plain implementation that does only the minimum. The counts do not depend on how busy
the machine is: Python and C functions called, peak bytes held, torch operators called, and bytes that the
operators return. A ratio is the count of the plain implementation over the count of ours: 1 means no
overhead, and a drop is a loss. If a ratio is more than 20 % below `benchmarks/ratios/baseline.json`, the
program exits with code 1. The program also compares times: the best of many short repetitions in turns. The
limit for times is 50 %, because they depend on the processor.

`--renew` writes the baseline, for a change that is worth its cost or that has made something cheaper.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.ratios.pairs import pairs
from benchmarks.report import save_results

BASELINE = Path(__file__).with_name("baseline.json")
MOST_DROP = {"calls": 0.2, "peak bytes": 0.2, "operators": 0.2, "operators' bytes": 0.2, "time": 0.5}
"""Largest allowed drop of each quantity, as a share of the baseline's ratio."""
TIMES, REPETITIONS = 5, 25


class Pair(NamedTuple):
    """Two implementations of the same work."""

    ours: Callable[[], object]
    plain: Callable[[], object]
    torch: bool
    """True if the work is counted in torch operators, False if in function calls and memory."""


class Operators(TorchDispatchMode):
    """Counter of the operators that reach torch's dispatcher, in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def calls(run: Callable[[], object]) -> int:
    """Return the number of Python and C functions called while ``run`` runs."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes that ``run`` holds beyond those held before it, its result included."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def counts(pair: Pair) -> dict[str, float]:
    """Return the ratio plain over ours of each quantity."""
    sides: list[dict[str, int]] = []
    for run in (pair.ours, pair.plain):
        # Do the work that happens only once, such as imports and caches, before counting.
        run()
        if pair.torch:
            with Operators() as operators:
                run()
            sides.append({"operators": operators.count, "operators' bytes": operators.nbytes})
        else:
            sides.append({"calls": calls(run), "peak bytes": peak_bytes(run)})
    ours, plain = sides
    return {name: plain[name] / ours[name] for name in ours}


def time_ratio(pair: Pair) -> float:
    """Return the time ratio plain over ours: the median of several ratios between the best repetitions."""
    ratios = []
    for _ in range(TIMES):
        best = [float("inf"), float("inf")]
        for _ in range(REPETITIONS):
            for side, run in enumerate((pair.ours, pair.plain)):
                began = time.perf_counter_ns()
                run()
                best[side] = min(best[side], time.perf_counter_ns() - began)
        ratios.append(best[1] / best[0])
    return statistics.median(ratios)


def measure() -> dict[str, float]:
    """Return every ratio by its name."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    gc.disable()
    try:
        for name, functions in pairs().items():
            pair = Pair(*functions)
            quantities = counts(pair) | {"time": time_ratio(pair)}
            gc.collect()
            found |= {f"{name}, {quantity}": round(ratio, 5) for quantity, ratio in quantities.items()}
    finally:
        gc.enable()
    return found


def complaints(found: dict[str, float], baseline: dict[str, float]) -> list[str]:
    """Return what is worse than the baseline allows, and the names that are in only one of the two."""
    wrong = [
        f"{name}: in one of the two only; renew the baseline"
        for name in sorted(found.keys() ^ baseline.keys())
    ]
    for name in sorted(found.keys() & baseline.keys()):
        least = baseline[name] * (1 - MOST_DROP[name.rpartition(", ")[2]])
        if found[name] < least:
            wrong.append(f"{name}: {found[name]:.4f}, at least {least:.4f} (baseline {baseline[name]:.4f})")
    return wrong


def table(found: dict[str, float], baseline: dict[str, float]) -> str:
    """Return all ratios as a Markdown table."""
    lines = ["| plain over ours | now | baseline |", "|---|---|---|"]
    return "\n".join(
        [
            *lines,
            *(f"| {name} | {ratio:.4f} | {baseline.get(name, 0):.4f} |" for name, ratio in found.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure()
    if arguments.renew:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n")
    baseline: dict[str, float] = json.loads(BASELINE.read_text())
    if arguments.json is not None:
        save_results(arguments.json, {"ratios": table(found, baseline)}, {"now": found, "baseline": baseline})
    sys.stdout.write(table(found, baseline) + "\n")
    wrong = complaints(found, baseline)
    if wrong:
        sys.exit("dearer than the baseline allows:\n  " + "\n  ".join(wrong))
