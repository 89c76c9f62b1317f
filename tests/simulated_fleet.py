"""A simulated run whose number of generators follows the broker's advice."""

from itertools import pairwise

from broker.core.autoscaling import Autoscaler, Bounds, Counts, Look
from launch.plan.parts import Setting
from launch.plan.rates import MeasuredRates
from launch.plan.simulation import Simulation


class FollowedAdvice:
    """Looks at a simulation once a second, and does what is advised."""

    def __init__(self, rates: MeasuredRates, setting: Setting, bounds: Bounds) -> None:
        self.simulation = Simulation(rates, setting)
        self.scaler = Autoscaler(bounds, setting.max_policy_lag + 1)
        self.counts = Counts(setting.generators, setting.actors)
        self.changes: list[tuple[float, Counts, str]] = []
        self.simulation.every(1.0, self._look)

    def _look(self) -> None:
        simulation = self.simulation
        advice = self.scaler.look(look_of(simulation), self.counts)
        before, after = self.counts, advice.counts
        if before == after:
            return
        self.changes.append((simulation.now, after, advice.reason))
        more = after.generators - before.generators
        if more < 0:
            simulation.shrink(-more)
        simulation.grow(generators=max(0, more), actors=max(0, after.actors - before.actors))
        self.counts = after

    def turns(self) -> int:
        """Return how often the number of generators rose after it fell, or fell after it rose."""
        numbers = [counts.generators for _, counts, _ in self.changes]
        rises = [b > a for a, b in pairwise(numbers) if a != b]
        return sum(a != b for a, b in pairwise(rises))


def look_of(simulation: Simulation) -> Look:
    """Return what the broker would see of a simulated run."""
    for generator in simulation.serving:
        generator.advance(simulation.now)
    trained, busy_s, idle_s = simulation.told or (None, 0.0, 0.0)
    ledger, generators = simulation.ledger, simulation.generators
    return Look(
        at=simulation.now,
        generators=len(simulation.serving),
        actors=simulation.actors,
        trained_tokens=trained,
        busy_s=busy_s,
        idle_s=idle_s,
        sampled_tokens=sum(g.sampled + g.in_flight for g in generators),
        serving_s=sum(g.served_s for g in generators),
        unused_s=sum(g.idle_s for g in generators),
        kept_tokens=float(ledger.trained.total()),
        dropped_tokens=float(ledger.masked + ledger.stale + ledger.filtered),
        tasks_waiting=simulation.tasks_waiting,
        fetching=simulation.fetching,
    )
