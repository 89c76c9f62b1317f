"""Tables and headlines of `benchmarks.broker`."""

from typing import Any

FIGURES = {
    "over_loop": "CPU over that of the loop in Python that only forwards, round by round",
    "cpu_us": "CPU microseconds of the broker per segment",
    "per_s": "segments/s",
    "mb_per_s": "MB/s",
}
Results = dict[str, dict[str, Any]]


def tables(results: dict[str, Results], chosen: list[str]) -> dict[str, str]:
    """Return the results as Markdown tables, by name."""
    found = dict[str, str]()
    if "sizes" in results:
        for figure, title in FIGURES.items():
            rows = "\n".join(_table(results["sizes"], chosen, figure))
            found[figure] = f"**{title}** (median, in brackets minimum and maximum)\n\n{rows}"
    if "latency" in results:
        rows = "\n".join(_rows(results["latency"], {"p50_ms": ("p50", 2), "p99_ms": ("p99", 2)}))
        found["latency"] = (
            f"**Milliseconds from sending a segment of 16 KB to its acknowledgement**\n\n{rows}"
        )
    if "peers" in results:
        columns = {
            "cpu_us": ("CPU us a segment", 0),
            "over_loop": ("over the forwarder", 2),
            "per_s": ("segments/s", 0),
        }
        rows = "\n".join(_rows(results["peers"], columns))
        found["peers"] = f"**Cost of a segment of 16 KB over connected actors**\n\n{rows}"
    return found


def headlines(results: dict[str, Results]) -> list[tuple[str, str, str]]:
    """Return the cost of the broker as it is shipped, encrypted with a synced journal, for the README."""
    row = results.get("sizes", {}).get("ours, CURVE, journal synced", {})
    what = "CPU of the broker for a segment of {}, encrypted, journal synced (less is better)"
    return [
        (what.format(size), "a plain ZeroMQ forwarder in Python", _cell(figures["over_loop"], 2))
        for size, figures in row.items()
    ]


def _table(rows: Results, columns: list[str], figure: str) -> list[str]:
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        digits = 2 if figure == "over_loop" else 0
        cells = [
            row["missing"] if "missing" in row else _cell(row[column][figure], digits) for column in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _rows(rows: Results, columns: dict[str, tuple[str, int]]) -> list[str]:
    """Return the lines of a table. ``columns`` gives the title and the number of digits of each column."""
    lines = [
        f"| | {' | '.join(title for title, _ in columns.values())} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in rows.items():
        cells = [_cell(row[column], digits) for column, (_, digits) in columns.items()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cell(figures: list[float], digits: int) -> str:
    median, least, most = (f"{figure:,.{digits}f}" for figure in figures)
    return median if least == most else f"{median} [{least}, {most}]"
