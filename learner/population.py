"""A population of instructions, one of which stands behind the prompt of each group (INSPO, arXiv:2512.01945). Pure.

An instruction is known by its number for the whole of a run, and the name of a group says it
(`protocol.names.Choice`). So a restarted learner finds the instruction of every group that the broker holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from learner.selection import Answer, Mask, TaskStats
from learner.settings.selection import PopulationSelection
from protocol.arrays import Float64s


def instruction_chances(weights: Float64s, kept: Mask, temperature: float) -> Float64s:
    r"""Return the probability with which a group gets each instruction, [instructions].

    .. math:: p_j = \exp(w_j / \tau) / \sum_k \exp(w_k / \tau)

    over the instructions that are kept; the others have 0. The formula is that of INSPO (arXiv:2512.01945).

    Args:
        weights: importance of each instruction, in units of the reward, [instructions].
        kept: the instructions that are not pruned, at least one, [instructions].
        temperature: the same units; above 0.

    Example:
        >>> instruction_chances(np.array([0.5, 0.5, 9.0]), np.array([True, True, False]), 0.1).tolist()
        [0.5, 0.5, 0.0]
    """
    below = np.where(kept, weights - weights[kept].max(), -np.inf)
    with np.errstate(over="ignore", under="ignore"):
        chances: Float64s = np.exp(below / temperature)
    chances /= chances.sum()
    return chances


class Population:
    """Instructions, the returns that they brought, and those that were pruned.

    The weight of an instruction is the mean return of its answers, where an answer counts ``0.5 ** (n / half_life)``
    once n further answers to the same instruction have come. One without answers has the largest weight of all, so
    that it is tried. A group counts when it is trained or dropped, as in `TaskStats`.

    Example:
        >>> population = Population(PopulationSelection(instructions=("a", "b"), half_life=4, prune_every=0))
        >>> population.add(0, 0, [Answer(1.0)] * 4); population.add(0, 1, [Answer(0.0)] * 4)
        >>> population.weights.round(4).tolist(), population.text(0)
        ([0.3333, 0.3333], 'a')
    """

    def __init__(self, config: PopulationSelection, saved: Mapping[str, Any] | None = None) -> None:
        """Begin a population, or go on with that of a checkpoint.

        Instructions that the settings have since then are new; those that they no longer have are pruned.
        """
        self._config = config
        self.texts: list[str] = [] if saved is None else list(saved["texts"])
        before = len(self.texts)
        self.texts += [text for text in config.instructions if text not in self.texts]
        """Instructions by number. None is ever taken out, so that a number keeps its meaning."""
        self.kept: Mask = np.array([text in config.instructions for text in self.texts])
        """False for those that were pruned, [instructions]."""
        self._ended = 0
        """Groups that ended since the last one was pruned."""
        if saved is None:
            self.stats = TaskStats(len(self.texts), config.half_life)
        else:
            self.kept[:before] &= np.array(saved["kept"], np.bool_)
            self._ended = saved["ended"]
            self.stats = TaskStats.restored(len(self.texts), config.half_life, saved["stats"])

    def text(self, number: int) -> str:
        """Return an instruction; "" for a number that is unknown, of a run with other settings."""
        return self.texts[number] if number < len(self.texts) else ""

    @property
    def weights(self) -> Float64s:
        """Importance of each instruction, [instructions]; 0 if there are no answers at all."""
        known = self.stats.attempts > 0
        means: Float64s = self.stats.total / np.maximum(self.stats.attempts, 1e-12)
        means[~known] = means[known].max() if known.any() else 0.0
        return means

    @property
    def chances(self) -> Float64s:
        """Probability of each instruction for the next group, [instructions]."""
        kept = self.kept if self.kept.any() else np.ones_like(self.kept)
        return instruction_chances(self.weights, kept, self._config.temperature)

    def choose(self, rng: np.random.Generator) -> int:
        """Return the number of the instruction of the next group.

        Args:
            rng: generator that depends on the seed of the run and on the number of the group alone.
        """
        return int(rng.choice(len(self.texts), p=self.chances))

    def add(self, number: int, group: int, answers: Sequence[Answer]) -> None:
        """Count the answers of a group, or of a member of it, that is trained or dropped, and prune if it is time.

        Args:
            number: number of the instruction; an unknown one is left out.
            group: number of the group.
            answers: those that did not fail for a fault of the environment.
        """
        if not answers or number >= len(self.texts):
            return
        self.stats.add(number, group, answers)
        self._ended += 1
        if self._config.prune_every and self._ended >= self._config.prune_every:
            self._ended = 0
            self._prune()

    def _prune(self) -> None:
        """Prune the instruction with the smallest weight, the first of several; one without answers stays."""
        measured = self.kept & (self.stats.attempts > 0)
        if measured.any() and self.kept.sum() > self._config.smallest:
            self.kept[np.where(measured, self.weights, np.inf).argmin()] = False

    def gauges(self) -> dict[str, float]:
        """Return the metrics `selection/...` of a learner step."""
        chances, of_groups = self.chances, self.stats.gauges()
        informative = "selection/informative_share"
        return {
            "selection/instructions": float(self.kept.sum()),
            "selection/best_instruction": float(chances.argmax()),
            "selection/best_instruction_share": float(chances.max()),
            **({informative: of_groups[informative]} if informative in of_groups else {}),
        }

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {
            "texts": list(self.texts),
            "kept": self.kept.tolist(),
            "ended": self._ended,
            "stats": self.stats.state(),
        }
