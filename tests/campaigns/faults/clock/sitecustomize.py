"""Shift the wall clock of a process: `time.time` is off by the number of seconds that a file holds.

Python imports a module of this name at its start. The campaign puts this folder on PYTHONPATH of the
processes whose clock it shifts. Monotonic clocks stay true, as in a real jump of the clock.
"""

import os
import time
from pathlib import Path

FILE = Path(os.environ.get("OFFBEAT_FAULT_CLOCK", os.devnull))
_true, _true_ns = time.time, time.time_ns


def _off() -> float:
    try:
        return float(FILE.read_text() or 0)
    except (OSError, ValueError):
        return 0.0


time.time = lambda: _true() + _off()
time.time_ns = lambda: _true_ns() + int(_off() * 1e9)
