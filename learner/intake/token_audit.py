"""Every action token that reached the learner is in one place. Pure."""

from collections.abc import Mapping

from learner.errors import LedgerViolation


def check_ledger(*, delivered: int, trained: int, outcomes: Mapping[str, int], ready: int) -> None:
    """See that nothing was lost or counted twice.

    Checked between two learner steps, when nothing is in training. Segments of trajectories that are still
    growing were each delivered as a window, and are counted as such; evaluation counts as an outcome.

    Args:
        delivered: action tokens of all units that came, but for those that were here already.
        trained: of units that were in a batch.
        outcomes: of units that were not, by what became of them; also of units that came again after
            they had been committed.
        ready: of units that wait.

    Raises:
        LedgerViolation: ``delivered`` is not the sum of the others.

    Example:
        >>> check_ledger(delivered=10, trained=4, outcomes={"stale": 3}, ready=3)
        >>> check_ledger(delivered=10, trained=4, outcomes={"stale": 3}, ready=2)
        Traceback (most recent call last):
        ...
        learner.errors.LedgerViolation: of 10 action tokens that were delivered, 9 are accounted for ...
    """
    known = trained + sum(outcomes.values()) + ready
    if known != delivered:
        raise LedgerViolation(
            f"of {delivered} action tokens that were delivered, {known} are accounted for (difference "
            f"{delivered - known}): trained {trained}, ready {ready}, outcomes {dict(outcomes)}. This is an error "
            "in the learner, not in the run file: what was trained since the last checkpoint is in doubt; please "
            "report it with the learner's log, and go on from that checkpoint with --resume"
        )
