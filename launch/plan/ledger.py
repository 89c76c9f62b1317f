"""What became of the tokens of a simulated run, and of its learner's time. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from launch.plan.parts import SimulatedUnit


@dataclass
class SimulatedLedger:
    """Action tokens by outcome, steps, and the learner's idle time."""

    trained: Counter[int] = field(default_factory=Counter)
    """Trained tokens by policy lag."""
    masked: int = 0
    stale: int = 0
    filtered: int = 0
    steps: int = 0
    idle_s: float = 0.0
    """Seconds that the learner waited for a batch."""

    def train(self, batch: Iterable[SimulatedUnit], version: int, oldest: int) -> int:
        """Count the tokens of a batch by outcome. Return how many are trained.

        Args:
            version: the learner's policy version.
            oldest: version below which tokens are masked.
        """
        trained = 0
        for episode in (e for group in batch for e in group.episodes):
            for sampled, count in episode.spans:
                if not episode.trained:
                    self.filtered += count
                elif sampled < oldest:
                    self.masked += count
                else:
                    self.trained[version - sampled] += count
                    trained += count
        return trained
