"""Stops the processes of a run: asks the learner to end, and ends all roles in order."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from launch.processes.child import stop
from launch.supervise.health import BROKER, role_of
from launch.supervise.posts import ACTOR, LEARNER, Post
from learner.run_files import PID_FILE

OTHERS_STOP_S = 30.0
"""Longest time that a role other than the learner may take to end, without an actor's episodes."""
FIRST_TO_STOP = (LEARNER, ACTOR, "generator")
"""Roles in the order in which they stop. All other roles follow, the broker last."""


def stop_order(names: Iterable[str]) -> list[str]:
    """Return the roles of a run's processes in the order in which they stop.

    Example:
        >>> stop_order(["broker", "learner", "judge", "generator-0", "actor-0"])
        ['learner', 'actor', 'generator', 'judge', 'broker']
    """
    others = dict.fromkeys(role_of(name) for name in names if role_of(name) not in (*FIRST_TO_STOP, BROKER))
    return [*FIRST_TO_STOP, *others, BROKER]


def stop_in_order(
    posts: Sequence[Post], *, learner_s: float, drain_s: float, note: Callable[[str], None]
) -> list[str]:
    """Stop all roles, the learner first and the broker last.

    Args:
        learner_s: longest time that the learner may take.
        drain_s: time in which an actor lets its episodes end first.
        note: function that shows a sentence to the user.

    Returns:
        The names of those that had to be killed.
    """
    stubborn: list[str] = []
    for role in stop_order(post.name for post in posts):
        children = [post.child for post in posts if role_of(post.name) == role and post.child is not None]
        others_s = OTHERS_STOP_S + (drain_s if role == ACTOR else 0.0)
        patience_s = learner_s if role == LEARNER else others_s
        stubborn += stop(children, patience_s=patience_s, late=partial(_note_late, note, patience_s))
    return stubborn


def _note_late(note: Callable[[str], None], patience_s: float, names: Sequence[str]) -> None:
    note(f"waiting up to {patience_s:g} s for {', '.join(names)} to end; a second Ctrl-C kills all at once")


def ask_to_end(learner: Post, folder: Path) -> None:
    """Send SIGTERM to the learner's rank 0; torchrun would kill the ranks and report a failure."""
    if not learner.running or learner.child is None:
        return
    path = folder / PID_FILE
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(path.read_text()) if path.exists() else learner.child.process.pid, signal.SIGTERM)
