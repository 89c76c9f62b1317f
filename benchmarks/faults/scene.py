"""What a fault is, and what it may touch."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.system import System
from benchmarks.faults.wire import Wire


@dataclass
class Scene:
    """What a fault may touch."""

    system: System
    rng: random.Random
    clock: Path
    """File that says by how many seconds processes' wall clocks are off."""
    wire: Wire | None = None
    """To be tampered with, if the campaign has faults for it."""

    def name(self, role: str) -> str:
        """Of one process of this role; a generator that has started, as the other may be on its way back."""
        if role == "generator":
            return self.rng.choice(self.system.generators() or ["generator-0"])
        return role if role in ("broker", "learner") else f"{role}-{self.rng.randrange(2)}"


Fault = Callable[[Scene], float | None]
"""Breaks something, and mends what does not mend itself; returns since when the run has to recover (None: now)."""
