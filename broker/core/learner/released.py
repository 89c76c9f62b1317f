"""How far the learner's line of steps has come, and what a step back behind a checkpoint costs. Pure."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from broker.core.ledger import Tally
from broker.core.records import Outcome, Unit
from protocol.messages.peers import Refused

MAX_RELEASED = 4_096
"""Upper limit of the released units whose names the broker keeps."""
MAX_NAMED = 20
"""Upper limit of the units that a text names."""


class ReleasedUnit(Struct, frozen=True, array_like=True):
    """A unit that a checkpoint covers, so that the broker has deleted its segments."""

    unit_id: str
    step: int
    outcome: Outcome
    segments: int
    tokens: int
    action_tokens: int
    lengths: list[int]


class LearnerSteps(Struct):
    """Steps of the live line of checkpoints. The journal keeps them, so that the next process knows them, too."""

    committed: int = 0
    """Newest step that the learner named in a Commit, or had at its Hello."""
    released: int = 0
    """Newest step that a checkpoint covers."""
    units: list[ReleasedUnit] = []
    """Units released last, the newest at the end."""

    def note(self, units: Iterable[Unit]) -> None:
        """Keep the names of units that are released now."""
        for unit in units:
            assert unit.outcome is not None
            tally = Tally()
            tally.add_all(unit.segments)
            self.units.append(
                ReleasedUnit(
                    unit.unit_id, unit.step, unit.outcome,
                    tally.segments, tally.tokens, tally.action_tokens, unit.lengths,
                )
            )  # fmt: skip
        del self.units[:-MAX_RELEASED]

    def behind(self, step: int) -> list[ReleasedUnit]:
        """Return the units, as far as they are known by name, that were released with steps after this one."""
        return [unit for unit in self.units if unit.step > step]

    def goes_back(self, step: int) -> bool:
        """Return whether a learner at this step would repeat steps whose units are released."""
        return step < self.released

    def begin(self, step: int, *, new_line: bool) -> None:
        """Continue at this step, with the units of a checkpoint of it. ``new_line`` forgets the units before."""
        self.units = [] if new_line else [unit for unit in self.units if unit.step <= step]
        self.committed = self.released = step


def named(units: Sequence[ReleasedUnit]) -> str:
    """Return a text that counts units and names them, as many as fit into a line.

    Example:
        >>> named([ReleasedUnit("1g7", 3, "trained", 4, 90, 60, [60])])
        '1 units of 90 tokens (1g7)'
    """
    tokens = sum(unit.tokens for unit in units)
    names = ", ".join(unit.unit_id for unit in units[:MAX_NAMED]) + (
        ", ..." if len(units) > MAX_NAMED else ""
    )
    return f"{len(units)} units of {tokens} tokens{f' ({names})' if names else ''}"


def no_step_back(steps: LearnerSteps, step: int) -> Refused:
    """Return the refusal of a learner at this step, which would repeat steps whose units are released."""
    # There is no checkpoint of step 0 to go back to.
    accept = (
        f"accept the loss with `offbeat train RUN_FILE --resume --from {step}`"
        if step
        else "start anew with `offbeat train RUN_FILE`, without --resume"
    )
    text = (
        f"this learner continues at step {step}, but a checkpoint of step {steps.released} was written: "
        f"{named(steps.behind(step))} of the steps between are deleted and cannot be trained again; resume "
        f"from the checkpoint of step {steps.released}, or {accept}"
    )
    return Refused(code="step_back", message=text, fatal=True)
