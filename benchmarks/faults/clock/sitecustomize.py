"""Put on the path of processes whose wall clock is to jump: `time.time` is off by as many seconds as a file says.

Python imports a module of this name at its start. Monotonic clocks are true, as with a real jump.
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
