"""Figures of a measurement, and the table that shows them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """One measured number, and what it is compared with."""

    name: str
    unit: str
    values: list[float]
    """One value for each repetition; the table shows median, minimum and maximum."""
    beside: str = ""
    """What the same number is for the bare loop, in words; "": nothing to compare with."""
    bare: list[float] = field(default_factory=list)
    """The bare loop's values, of the same repetitions."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Median of the ratios to the bare loop, repetition by repetition; None without one."""
        pairs = list(zip(self.values, self.bare, strict=False))
        return statistics.median(mine / bare for mine, bare in pairs) if pairs and all(self.bare) else None


def shown(values: Sequence[float]) -> str:
    """Return median, minimum and maximum with three significant digits.

    Example:
        >>> shown([1234.5, 1200.0, 1300.0]), shown([0.01234]), shown([])
        ('1,234 [1,200, 1,300]', '0.0123', '')
    """
    if not values:
        return ""
    middle, least, most = (_digits(f(values)) for f in (statistics.median, min, max))
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
