"""What is due at a learner step. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from learner.config import LearnerConfig


def is_due(every: int, step: int) -> bool:
    """Return whether something that happens every so many learner steps happens at this one; 0: never.

    Example:
        >>> is_due(10, 20), is_due(10, 25), is_due(0, 20)
        (True, False, False)
    """
    return bool(every) and step % every == 0


def evaluations_due(
    config: LearnerConfig, evaluations: Sequence[Mapping[str, Any]], step: int
) -> list[tuple[str, str]]:
    """Return tag and set of each evaluation that is due: before the first step, and every so many steps.

    The last step has none of its own, because the evaluation at the end follows. An evaluation that a crash
    prevented after the checkpoint of its step is made up for.

    Args:
        evaluations: records of the evaluations so far.
        step: learner steps done.

    Example:
        >>> config = LearnerConfig(steps=20, evaluation_every=10)
        >>> seen = [{"set": "", "step": 0}]
        >>> evaluations_due(config, [], 0), evaluations_due(config, seen, 10), evaluations_due(config, seen, 20)
        ([('before', '')], [('step 10', '')], [])
    """
    due = []
    for name, of in config.evaluation_sets.items():
        every = config.evaluation_every if of.every is None else of.every
        # An earlier version wrote no names: it had one set.
        steps = [e["step"] for e in evaluations if e.get("set", "") == name]
        if not steps:
            due.append(("before", name))
        elif is_due(every, step) and step < config.steps and steps[-1] != step:
            due.append((f"step {step}", name))
    return due
