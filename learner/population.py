"""A population of instructions, one of which stands behind the prompt of each group (INSPO, arXiv:2512.01945). Pure.

An instruction is known by its number for the whole of a run, and the name of a group says it
(`protocol.names.Choice`). So a restarted learner finds the instruction of every group that the broker holds. For that
an instruction that the policy proposed is drawn only once a checkpoint has it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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


WAITING = 8
"""Most proposals that wait for a place; the oldest one makes room."""


@dataclass
class Proposals:
    """Instructions that the policy proposed and that wait for a place, and counts over the whole run."""

    made: int = 0
    unreadable: int = 0
    repeated: int = 0
    """Readable ones that the population had at any time, or that waited already."""
    taken: list[int] = field(default_factory=list)
    """Numbers of those that entered the population, pruned ones included."""
    waiting: deque[str] = field(default_factory=lambda: deque(maxlen=WAITING))

    def add(self, text: str | None, known: Sequence[str]) -> None:
        """Count a proposal, and let it wait unless it cannot be read or is there already."""
        self.made += 1
        if text is None:
            self.unreadable += 1
        elif plain(text) in map(plain, (*known, *self.waiting)):
            self.repeated += 1
        else:
            self.waiting.append(text)

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return asdict(self) | {"waiting": list(self.waiting), "taken": list(self.taken)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Proposals":
        """Return the proposals of a checkpoint; an empty state has none."""
        return cls(
            **(
                dict(state)
                | {"waiting": deque(state.get("waiting", ()), WAITING), "taken": list(state.get("taken", ()))}
            )
        )


def plain(text: str) -> str:
    """Return a text without what makes no other instruction of it: the sizes of letters, and of spaces.

    Example:
        >>> plain("Read  it from the END.")
        'read it from the end.'
    """
    return " ".join(text.split()).casefold()


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

    def __init__(
        self, config: PopulationSelection, saved: Mapping[str, Any] | None = None, most: int = 0
    ) -> None:
        """Begin a population, or go on with that of a checkpoint.

        Instructions that the settings have since then are new. Those that they no longer have are pruned, but for
        proposals.

        Args:
            config: the instructions, and how they are drawn.
            saved: `state` of an earlier process.
            most: proposals that may enter during the run; 0: none.
        """
        self._config, self._most = config, most
        self.proposals = Proposals.restored({} if saved is None else saved.get("proposals", {}))
        self.texts: list[str] = [] if saved is None else list(saved["texts"])
        before = len(self.texts)
        self.texts += [text for text in config.instructions if text not in self.texts]
        """Instructions by number. None is ever taken out, so that a number keeps its meaning."""
        taken = set(self.proposals.taken)
        self.kept: Mask = np.array(
            [text in config.instructions or number in taken for number, text in enumerate(self.texts)]
        )
        """False for those that were pruned, [instructions]."""
        self._covered = len(self.texts)
        """Instructions that a checkpoint or the settings have. The others are not drawn yet: a process that begins from
        the checkpoint could not say what their numbers mean."""
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
        known: Mask = np.arange(len(self.texts)) < self._covered
        drawn = self.kept & known
        return instruction_chances(self.weights, drawn if drawn.any() else known, self._config.temperature)

    def choose(self, rng: np.random.Generator) -> int:
        """Return the number of the instruction of the next group.

        Args:
            rng: generator that depends on the seed of the run and on the number of the group alone.
        """
        return int(rng.choice(len(self.texts), p=self.chances))

    def propose(self, texts: Sequence[str | None]) -> None:
        """Add proposals of a family that is trained or dropped; None stands for one that cannot be read."""
        for text in texts:
            self.proposals.add(text, self.texts)

    def covered(self) -> list[tuple[int, str]]:
        """Note that a checkpoint has all instructions. Return those that are drawn from now on, with their numbers."""
        before, self._covered = self._covered, len(self.texts)
        return list(enumerate(self.texts))[before:]

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
        """Prune the instruction with the smallest weight, the first of several; one without answers stays.

        The proposal that has waited longest takes its place. Then the best instruction with answers stays, too.
        """
        measured = self.kept & (self.stats.attempts > 0)
        waiting = self.proposals.waiting
        replaced = bool(waiting) and len(self.proposals.taken) < self._most
        enough = (
            measured.sum() > 1 if replaced else measured.any() and self.kept.sum() > self._config.smallest
        )
        # One that may be drawn at once must be left, because newcomers wait for a checkpoint.
        if not enough or self.kept[: self._covered].sum() < 2:
            return
        self.kept[np.where(measured, self.weights, np.inf).argmin()] = False
        if replaced:
            self._admit(waiting.popleft())

    def _admit(self, text: str) -> None:
        """Give a proposal the next number."""
        self.proposals.taken.append(len(self.texts))
        self.texts.append(text)
        self.kept = np.append(self.kept, True)
        # A further row; what is counted since the last step stays.
        counted = self.stats.groups, self.stats.informative
        self.stats = TaskStats.restored(len(self.texts), self._config.half_life, self.stats.state())
        self.stats.groups, self.stats.informative = counted

    def gauges(self) -> dict[str, float]:
        """Return the metrics `selection/...` of a learner step."""
        chances, of_groups = self.chances, self.stats.gauges()
        informative = "selection/informative_share"
        return {
            "selection/instructions": float(self.kept.sum()),
            "selection/best_instruction": float(chances.argmax()),
            "selection/best_instruction_share": float(chances.max()),
            **({informative: of_groups[informative]} if informative in of_groups else {}),
            **(self._gauges_of_proposals(chances) if self._most or self.proposals.made else {}),
        }

    def _gauges_of_proposals(self, chances: Float64s) -> dict[str, float]:
        proposals = self.proposals
        return {
            "selection/proposals": float(proposals.made),
            "selection/proposals_unreadable": float(proposals.unreadable),
            "selection/proposals_repeated": float(proposals.repeated),
            "selection/proposals_taken": float(len(proposals.taken)),
            "selection/proposed_share": float(chances[proposals.taken].sum()),
        }

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {
            "texts": list(self.texts),
            "kept": self.kept.tolist(),
            "ended": self._ended,
            "stats": self.stats.state(),
            **({"proposals": self.proposals.state()} if self.proposals.made else {}),
        }
