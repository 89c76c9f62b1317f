"""How benchmarks keep and show their results: JSON files that docs/benchmarks.md is made from, memory, plots."""

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.budget import t_quantile

ROOT = Path(__file__).parents[1]
# Counted when the program starts, because a benchmark may pin itself to one core later.
_CORES = len(os.sched_getaffinity(0))


def half_interval(values: Sequence[float], quantile: float) -> float:
    """Return half of the interval of a mean by Student's t.

    Args:
        values: at least two.
        quantile: of the distribution, for example 0.975 for an interval of 95 %.

    Example:
        >>> round(half_interval([0.1, 0.2, 0.3], 0.975), 3)
        0.248
    """
    deviation = statistics.stdev(values) / math.sqrt(len(values))
    return t_quantile(quantile, len(values) - 1) * deviation


def save_results(
    path: Path,
    tables: Mapping[str, str],
    results: Any,
    headlines: Sequence[tuple[str, str, str]] = (),
    device: str = "",
) -> None:
    """Write what a benchmark has found, with the tables that a page shows and where the figures come from.

    Args:
        tables: Markdown by name; `benchmarks.page` puts them into pages.
        results: everything that was measured, in a form that JSON can hold.
        headlines: the ratios to show in the README: what Offbeat does, the peer or limit, the ratio.
        device: the GPU that was measured; "" if none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": f"{device}; {machine()}" if device else machine(),
        "tables": {name: text.strip() for name, text in tables.items()},
        "headlines": [list(headline) for headline in headlines],
        "results": results,
    }
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def measured(evaluation: Mapping[str, Any], name: str) -> float:
    """Return a number of an evaluation.

    Raises:
        ValueError: the evaluation has no such result; a missing number is never taken for a zero.

    Example:
        >>> measured({"step": 0, "return_mean": 0.5}, "return_mean")
        0.5
    """
    if evaluation[name] is None:
        raise ValueError(
            f"the evaluation has no {name}, because too many tasks were never run: {dict(evaluation)}"
        )
    return float(evaluation[name])


def machine() -> str:
    """Describe the processor and the memory of this machine in one line."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {_CORES} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def peak_rss() -> int:
    """Return the peak resident memory of this process, in bytes.

    getrusage would also count the memory of the process from which this one was forked.

    Raises:
        RuntimeError: the system is not Linux.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: run this on Linux")


def pyplot() -> Any:
    """Import Matplotlib, which only plots need, and return pyplot with a backend that needs no screen."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).stem


def commit() -> str:
    """Return the commit that was measured, with "+" if files differ from it; empty without Git or a checkout."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    # Results of other benchmarks and the pages with their tables may wait to be committed.
    changed = git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results", ":!*.md")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


@dataclass(frozen=True)
class Figure:
    """One measured number, and what it is compared with."""

    name: str
    unit: str
    values: list[float]
    """One value for each repetition; the table shows median, minimum and maximum."""
    beside: str = ""
    """Number of the bare loop, in words; "": nothing to compare with."""
    bare: list[float] = field(default_factory=list)
    """The bare loop's values, of the same repetitions."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Median of the ratios to the bare loop, repetition by repetition; None without one."""
        pairs = list(zip(self.values, self.bare, strict=False))
        return statistics.median(mine / bare for mine, bare in pairs) if pairs and all(self.bare) else None


def middle_and_range(values: Sequence[float]) -> list[float]:
    """Return the median, minimum and maximum.

    Example:
        >>> middle_and_range([1.0, 3.0, 2.5])
        [2.5, 1.0, 3.0]
    """
    return [statistics.median(values), min(values), max(values)]


def spread(values: Sequence[float | None], digits: int = 2, *, wanted: int = 0) -> str:
    """Return the median as text, with minimum and maximum in brackets, and the count if below ``wanted``.

    Example:
        >>> spread([1.0, 3.0, None, 2.0]), spread([1500.0], 0), spread([None]), spread([1.0], wanted=3)
        ('2.00 [1.00, 3.00]', '1,500', '-', '1.00 (1 of 3)')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text, least, most = (f"{value:,.{digits}f}" for value in middle_and_range(known))
    if len(known) > 1:
        text += f" [{least}, {most}]"
    return text if len(known) >= wanted else f"{text} ({len(known)} of {wanted})"


def shown(values: Sequence[float]) -> str:
    """Return median, minimum and maximum with three significant digits.

    Example:
        >>> shown([1234.5, 1200.0, 1300.0]), shown([0.01234]), shown([])
        ('1,234 [1,200, 1,300]', '0.0123', '')
    """
    if not values:
        return ""
    middle, least, most = map(_digits, middle_and_range(values))
    return middle if len(values) == 1 else f"{middle} [{least}, {most}]"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table.

    Example:
        >>> print(table([Figure("copy", "GB/s", [2.0], "plain copy", [4.0])]))
        | figure | unit | median [least, most] | beside | its median | ratio | note |
        |---|---|---|---|---|---|---|
        | copy | GB/s | 2 | plain copy | 4 | 0.50 |  |
    """
    lines = [
        "| figure | unit | median [least, most] | beside | its median | ratio | note |",
        "|---" * 7 + "|",
    ]
    for one in figures:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        cells = [one.name, one.unit, shown(one.values), one.beside, shown(one.bare), ratio, one.note]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
