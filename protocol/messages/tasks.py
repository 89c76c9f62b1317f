"""A task: the learner puts it, an actor asks for it, and the broker leases it or takes it back."""

from typing import Annotated

from msgspec import Meta, Struct, field

from protocol import names
from protocol.messages.fields import (
    MAX_ITEMS,
    MAX_PREFIX_BYTES,
    MAX_STOPS,
    MAX_TASKS,
    AtLeastOne,
    Count,
    Duration,
    Free,
    Id,
    Message,
    Name,
    Prose,
    Purpose,
    Seed,
    Version,
)
from protocol.messages.segments import Failure, Turn


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the actor has the tokens of an episode sampled. Training needs ``top_p = 1`` and ``top_k = 0``.

    The learner writes it in each task. It leaves ``top_p``, ``top_k`` and ``seed`` at their defaults; other
    programs that put tasks may set them.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Read by the actor, which passes it to the generator and reports it in each Segment. 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Read by the actor, which passes it to the generator."""
    top_k: Version = 0
    """Read by the actor, which passes it to the generator. 0 means no bound."""
    max_turn_tokens: AtLeastOne = 64
    """Read by the actor, which ends an action turn at this number of tokens."""
    max_trajectory_tokens: AtLeastOne = 256
    """Read by the actor, which ends the trajectory there; the broker refuses segments beyond it."""
    max_context_tokens: Version = 0
    """Read by the actor: most tokens of one branch of the trajectory. 0 means that of the trajectory."""
    seed: Seed | None = None
    """Read by the actor, which derives the seed of each Generate from it."""
    stop: Annotated[list[Name], Meta(max_length=MAX_STOPS)] = field(default_factory=list)
    """Read by the actor, which ends an action turn with the token that completes one of these strings."""
    include_stop: bool = False
    """Read by the actor: whether the text for the environment keeps the stop string. The tokens always do."""
    routes: bool = False
    """Read by the actor: whether segments carry the experts that tokens went through; since 4.4.

    A broker before 4.4 would lose it, so the learner looks at the broker's version before it puts such a task.
    """


class TaskStart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The beginning of an earlier trajectory, from which an episode goes on. The learner writes it, the actor reads it.

    The actor resets the environment, repeats the prefix's actions, and compares each observation. The tokens of the
    prefix become observation tokens, so they are context.
    """

    token_ids: Annotated[bytes, Meta(max_length=MAX_PREFIX_BYTES)]
    """Token ids of the prefix, little-endian int32. They end where the first action of this episode begins."""
    turns: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_ITEMS)]
    """Turns of the prefix: observations and actions in turns, an observation last."""
    parent: Id
    """Trajectory that the prefix was cut from; the actor names it in errors."""


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One episode to run: which environment, which instance of it, as a member of which rollout group.

    The learner writes it in PutTasks, and the broker leases it to an actor in LeaseTask.
    """

    task_id: Name
    """Read by the broker, which queues each id once, and by the actor, whose trajectory id begins with it."""
    env: Name
    """Read by the actor, which rejects a task of an environment it does not run."""
    data: Free = field(default_factory=dict)
    """Read by the actor, which resets the environment with it: the task instance, as index and split."""
    group_id: Name
    """Read by the broker, which assembles rollout groups; copied by the actor into segments."""
    group_size: AtLeastOne
    """Read by the broker, which waits for this number of members; copied by the actor into segments."""
    member: Count = 0
    """Place in the rollout group. For programs of others; in Offbeat the learner reads only its own copy."""
    purpose: Purpose = "train"
    """Read by the broker, which leases and delivers evaluation first; copied by the actor into segments."""
    sampling: Sampling = Sampling()
    """Read by the actor for each request to a generator; the broker reads the length limit."""
    min_policy_version: Version = 0
    """Read by the actor, which asks generators for this version or a later one (lockstep, evaluation)."""
    deadline_s: Duration = 120.0
    """Read by the actor, which fails a longer episode, and by the broker for the end of the lease.

    The learner of Offbeat writes learner.sampling.max_trajectory_s.
    """
    note: Prose = ""
    """Read by the actor, which puts this text behind the last message of the first prompt; since 4.3.

    A broker before 4.3 would lose it, so the learner looks at the broker's version before it puts such a task.
    """
    start: TaskStart | None = None
    """Read by the actor, which begins the episode with this prefix; since 4.3, as the note.

    With a note, the prefix's first turn gives way to the prompt with the note, and the other turns follow it.
    """


class PutTasks(Message, tag="put_tasks", frozen=True):
    """New tasks for the queue. The broker ignores a task_id that it knows, so the message may be repeated."""

    tasks: Annotated[list[Task], Meta(max_length=MAX_TASKS)]
    """Written by the learner, read by the broker, which queues the new tasks or, if they do not fit, none."""


class TaskCredit(Message, tag="task_credit", frozen=True):
    """Flow control of LeaseTask."""

    tasks: Count
    """Written by the actor: episodes it can run, added to its unused credit. The broker leases no more."""
    void: bool = False
    """Written by the actor: its unused credit is void, and ``tasks`` is all it has. It asks so when the first
    generator lets it in, and when no generator does any more."""


class LeaseTask(Message, tag="lease_task", frozen=True):
    """An actor is to run this task. Its segments and the progress in its heartbeats renew the lease."""

    lease_id: Id
    """Written by the broker; TaskRejected and CancelTask name the lease by it."""
    attempt: Count
    """Written by the broker, counted from 0; the actor makes it a part of the trajectory id."""
    task: Task
    """Written by the learner; the actor runs it."""

    @property
    def trajectory_id(self) -> str:
        """Trajectory id that the segments of this lease must have."""
        return names.trajectory_id(self.task.task_id, self.attempt)


class CancelTask(Message, tag="cancel_task", frozen=True):
    """An actor is to stop work on a lease that has expired or is no longer wanted."""

    lease_id: Id
    """Written by the broker; the actor cancels the episode of this lease."""
    reason: Prose
    """Written by the broker; the actor logs it."""


class TaskRejected(Message, tag="task_rejected", frozen=True):
    """The actor cannot run this task (unknown environment, draining); the broker leases it again."""

    lease_id: Id
    """Written by the actor; the broker ends this lease."""
    reason: Prose
    """Written by the actor. At "draining" and "full" the broker voids its task credit and counts no loss."""
    fault: bool = True
    """Written by the actor; the broker counts the attempt towards max_attempts only if it is true.

    False means that neither the environment nor the model failed the attempt: no generator could continue it.
    """
    failure: Failure | None = None
    """Written by the actor if an error ended the attempt. Read by the broker, which counts it for `/status`."""
