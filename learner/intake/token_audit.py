"""Checks that every action token that reached the learner is counted in exactly one place. Pure."""

from collections.abc import Mapping

from learner.errors import LedgerViolation


def check_ledger(
    *, delivered: int, trained: int, outcomes: Mapping[str, int], ready: int, kept: int = 0
) -> None:
    """Check that no action token was lost or counted twice.

    The check is for the time between two learner steps, when no unit is being trained. Each segment of a
    growing trajectory was delivered as a window and is counted as such. Evaluation counts as an outcome.

    Args:
        delivered: action tokens of all delivered units; a unit that came again while it was here counts once.
        trained: action tokens of units that were in a batch.
        outcomes: action tokens of all other units, by outcome; units that came again after their commit
            have an outcome of their own.
        ready: action tokens of units that wait to be trained.
        kept: action tokens of groups that wait for others of their family.

    Raises:
        LedgerViolation: ``delivered`` is not the sum of the others.

    Example:
        >>> check_ledger(delivered=10, trained=4, outcomes={"stale": 3}, ready=3)
        >>> check_ledger(delivered=10, trained=4, outcomes={"stale": 3}, ready=2)
        Traceback (most recent call last):
        ...
        learner.errors.LedgerViolation: of 10 action tokens that were delivered, 9 are accounted for ...
    """
    known = trained + sum(outcomes.values()) + ready + kept
    if known != delivered:
        raise LedgerViolation(
            f"of {delivered} action tokens that were delivered, {known} are accounted for (difference "
            f"{delivered - known}): trained {trained}, ready {ready}, kept {kept}, outcomes "
            f"{dict(outcomes)}. This is an error "
            "in the learner, not in the run file: what was trained since the last checkpoint is in doubt; please "
            "report it with the learner's log, and go on from that checkpoint with --resume"
        )
