"""The type of a fault, and everything that a fault may touch."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.system import System
from benchmarks.faults.wire import Wire


@dataclass
class Scene:
    """Everything that a fault may touch."""

    system: System
    rng: random.Random
    clock: Path
    """File with the number of seconds by which the processes' wall clocks are off."""
    wire: Wire | None = None
    """Connection to tamper with. None if the campaign has no faults that need it."""

    def name(self, role: str) -> str:
        """Return the name of a process of this role; for generators, of one that is not restarting."""
        if role == "generator":
            return self.rng.choice(self.system.generators() or ["generator-0"])
        return role if role in ("broker", "learner") else f"{role}-{self.rng.randrange(2)}"


Fault = Callable[[Scene], float | None]
"""Function that breaks something, and repairs what the system cannot repair itself.

It returns the moment from which the recovery time counts. None means the moment at which it returns.
"""
