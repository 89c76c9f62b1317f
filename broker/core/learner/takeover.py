"""What happens to units when a new learner process takes over. Pure."""

import sys

from broker.core.deliveries import Deliveries
from broker.core.learner.released import LearnerSteps
from protocol.messages.peers import Hello


def process(hello: Hello) -> tuple[str, int, int]:
    """Return what identifies a learner process: name, incarnation and epoch."""
    return hello.peer, hello.incarnation, hello.epoch


def goes_back(steps: LearnerSteps, before: Hello, hello: Hello) -> bool:
    """Return whether a new learner process has fewer steps than were released for the one before.

    A learner that begins a new line at step 0 starts anew, which is no step back.
    """
    continues = before.lineage == hello.lineage or hello.step > 0
    return process(before) != process(hello) and continues and steps.goes_back(hello.step)


def release(deliveries: Deliveries, steps: LearnerSteps, step: int) -> None:
    """Release the units committed up to this step, and keep their names."""
    steps.note(deliveries.release(step))
    steps.released = max(steps.released, step)


def take_over(deliveries: Deliveries, steps: LearnerSteps, before: Hello, hello: Hello) -> tuple[str, ...]:
    """Hand the units of one learner process to the next; return the purposes whose tasks are to be cancelled.

    A new process of the same lineage gets every unit again that its checkpoint does not cover, and
    evaluation tasks are cancelled. In a new lineage, all tasks are cancelled and all units are dropped or
    released. Units that were released with steps which the learner does not have are lost.
    """
    deliveries.expire_all(void=True)
    for unit in steps.behind(hello.step) if goes_back(steps, before, hello) else ():
        deliveries.lose(unit)
    if before.lineage == hello.lineage:
        release(deliveries, steps, hello.step)
        deliveries.uncommit_all()
        return ("eval",)
    if hello.step:
        deliveries.release(hello.step)
        # What was trained after the checkpoint is undone, too.
        deliveries.uncommit_all()
    else:
        deliveries.release(sys.maxsize)
    return ("eval", "train")
