"""A flame graph of a function and a table of its torch operators. Needs only Python and torch."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from html import escape
from pathlib import Path

import torch

INTERVAL = 0.002
WIDTH, ROW = 1200, 17
SHOWN = 0.003
"""Minimum share of the time that a frame needs to be drawn."""

Stack = tuple[str, ...]


def write_profile(run: Callable[[], object], rounds: int, path: Path) -> None:
    """Profile ``run``: write ``path.svg`` (flame graph of ``rounds`` calls) and ``path.txt`` (operators)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stacks = sample(lambda: [run() for _ in range(rounds)])
    Path(f"{path}.svg").write_text(flame_graph(stacks))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    table = profiler.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50
    )
    Path(f"{path}.txt").write_text(table)


def sample(run: Callable[[], object], interval: float = INTERVAL) -> Counter[Stack]:
    """Sample the stack of the calling thread every ``interval`` seconds while ``run`` runs.

    Return how often each stack was seen. A stack lists its outermost frame first.
    """
    stacks: Counter[Stack] = Counter()
    done, ident = threading.Event(), threading.get_ident()

    def watch() -> None:
        while not done.is_set():
            frame, names = sys._current_frames().get(ident), []
            while frame is not None:
                code = frame.f_code
                names.append(f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])})")
                frame = frame.f_back
            stacks[tuple(reversed(names))] += 1
            time.sleep(interval)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(interval / 4)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(switch)
    return stacks


def flame_graph(stacks: Counter[Stack]) -> str:
    """Return an SVG picture. Time runs to the right, callers lie below callees, names show on hovering."""
    common = _common(list(stacks))
    total = sum(stacks.values())
    boxes: list[str] = []
    deepest = max((len(stack) for stack in stacks), default=0) - common

    def draw(level: int, left: float, members: list[tuple[Stack, int]]) -> None:
        groups: dict[str, list[tuple[Stack, int]]] = {}
        for stack, count in members:
            if len(stack) > common + level:
                groups.setdefault(stack[common + level], []).append((stack, count))
        for name, group in sorted(groups.items()):
            share = sum(count for _, count in group) / total
            if share >= SHOWN:
                boxes.append(_box(name, left, share, (deepest - level) * ROW))
                draw(level + 1, left, group)
            left += share

    draw(0, 0.0, sorted(stacks.items()))
    height = (deepest + 2) * ROW
    size = f'width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *boxes, "</svg>"]) + "\n"


def _common(stacks: list[Stack]) -> int:
    """Return the number of outermost frames that all stacks share."""
    shortest = min((len(stack) for stack in stacks), default=0)
    return next((i for i in range(shortest) if len({stack[i] for stack in stacks}) > 1), shortest)


def _box(name: str, left: float, share: float, top: float) -> str:
    shade = 120 + sum(name.encode()) % 80
    width = share * WIDTH
    shown = escape(name[: int(width / 6.7)]) if width > 25 else ""
    return (
        f'<g><title>{escape(name)}: {share:.1%}</title><rect x="{left * WIDTH:.1f}" y="{top}" '
        f'width="{width:.1f}" height="{ROW - 1}" fill="rgb(235,{shade},70)"/>'
        f'<text x="{left * WIDTH + 2:.1f}" y="{top + 12}">{shown}</text></g>'
    )
