"""Commits of units: which deliveries are here, which are dropped, and which were committed. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from learner.intake.commit_memory import CommitMemory
from learner.units import Unit
from protocol.messages.episodes import Commit


@dataclass
class UnitCommits:
    """Deliveries between their arrival and their commit, and the memory of those that were committed.

    Example:
        >>> commits = UnitCommits()
        >>> commits.hold("1g0"); commits.drop("1g1")
        >>> "1g0" in commits, "1g1" in commits, "1g2" in commits
        (True, True, False)
        >>> commits.commit(1, 7, []).dropped
        ['1g1']
        >>> commits.commit_again(["1g1", "1g2"]), [again.dropped for again in commits.recommit(1)]
        (1, [['1g1']])
    """

    committed: CommitMemory = field(default_factory=CommitMemory)
    held: set[str] = field(default_factory=set)
    """Deliveries that wait for their family, are ready or are being trained."""
    _dropped: list[str] = field(default_factory=list)
    """Units that were dropped and are not committed yet."""
    _recommits: list[str] = field(default_factory=list)
    """Units whose commit must be repeated."""

    def __contains__(self, unit_id: str) -> bool:
        """Return whether a delivery is here: its commit is not sent yet."""
        return unit_id in self.held or unit_id in self._dropped

    def hold(self, unit_id: str) -> None:
        """Note a delivery that is to be trained."""
        self.held.add(unit_id)

    def drop(self, unit_id: str) -> None:
        """Note a new delivery that will not be trained. The next commit names it."""
        self._dropped.append(unit_id)

    def drop_held(self, unit_id: str) -> None:
        """Note that a held delivery will not be trained after all. The next commit names it."""
        self.held.remove(unit_id)
        self._dropped.append(unit_id)

    def commit(
        self, epoch: int, step: int, trained: Sequence[Unit], replayed_tokens: int = 0, version: int = -1
    ) -> Commit | None:
        """Note units as trained and return the Commit to send; None if there is nothing to commit.

        Args:
            epoch: number of this learner process.
            step: learner step of the commit.
            trained: units that entered a gradient. Units dropped since the last commit are added.
            replayed_tokens: replayed tokens that were trained in the step.
            version: policy version that the step updated.
        """
        parts = [part for unit in trained for part in unit.parts]
        for part in parts:
            self.held.remove(part.unit_id)
            if part.trained:
                self.committed.add(part.unit_id, step=step, trained=True, version=version)
            else:
                self._dropped.append(part.unit_id)
        dropped, self._dropped = self._dropped, []
        for unit_id in dropped:
            self.committed.add(unit_id, step=step, trained=False)
        if not trained and not dropped:
            return None
        return Commit(
            epoch=epoch,
            step=step,
            trained=[part.unit_id for part in parts if part.trained],
            dropped=dropped,
            replayed_tokens=replayed_tokens,
            version=version if trained else -1,
        )

    def repeat(self, unit_id: str) -> None:
        """Queue the commit of a unit to be repeated, because the unit was delivered again."""
        self._recommits.append(unit_id)

    def commit_again(self, held: Iterable[str]) -> int:
        """Queue commits to repeat for units that the broker still holds. Return their number.

        A unit that is ready or dropped here is left out, even if it was committed before under the same id:
        it is a new unit of a broker that lost its journal and uses ids again.
        """
        here = self.held | set(self._dropped)
        units = [unit_id for unit_id in held if unit_id in self.committed and unit_id not in here]
        self._recommits += units
        return len(units)

    def recommit(self, epoch: int) -> list[Commit]:
        """Return the repeated commits queued since the last call, each for the step of its first commit."""
        again, self._recommits = dict.fromkeys(self._recommits), []
        steps = sorted({self.committed[unit_id].step for unit_id in again})
        units = [(unit_id, self.committed[unit_id]) for unit_id in again]
        return [
            Commit(
                epoch=epoch,
                step=step,
                trained=[unit_id for unit_id, was in units if was.step == step and was.trained],
                dropped=[unit_id for unit_id, was in units if was.step == step and not was.trained],
                version=max(was.version for _, was in units if was.step == step),
            )
            for step in steps
        ]
