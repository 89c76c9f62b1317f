"""Units on their way from the broker to the learner, and what the learner says when it is done with them."""

from msgspec import field

from protocol.messages.fields import Count, Id, Ids, MaybeVersion, Message, Name, Prose, Summand


class DeliveryCredit(Message, tag="delivery_credit", frozen=True):
    """Flow control of Deliver."""

    units: Count
    """Written by the learner: units it can take, added to its unused credit. The broker delivers no more."""


class Deliver(Message, tag="deliver", frozen=True):
    """One unit, leased to the learner until it is committed. Headers and bodies of its segments follow."""

    unit_id: Id
    """Written by the broker; the learner recognises a unit that it has, and names the unit in Commit."""
    segments: Count
    """Written by the broker; the learner rejects a delivery with a different number of segments behind it."""
    complete: bool = True
    """Written by the broker: no member is missing, or this is the last window of the trajectory.

    Where the unit is unusable or committed already, the learner reads from it that nothing more will come.
    """
    redelivered: bool = False
    """Written by the broker: delivered before. For programs of others; nothing in Offbeat reads it."""


class Dropped(Message, tag="dropped", frozen=True):
    """Notice to the learner that a unit will never be delivered (too stale, failed, expired)."""

    unit_id: Id
    """Written by the broker; the learner frees the room of this group or of this member."""
    group_id: Name
    """Written by the broker; the learner finds the rollout group, or the evaluation task, by it."""
    trajectories: Count
    """Written by the broker, counted by the learner. 0 is a window before the last, which frees no room."""
    reason: Prose
    """Written by the broker; the learner counts the trajectories under ``dropped_REASON``."""


class Commit(Message, tag="commit", frozen=True):
    """The learner has trained these units or dropped them.

    The broker keeps them until a Checkpointed covers ``step``, because a learner that restarts from a
    checkpoint before that needs them again.
    """

    epoch: Count
    """Written by the learner; the broker refuses an epoch that is not the one of its Hello."""
    step: Count
    """Written by the learner: its step. The broker releases the units when a checkpoint covers it."""
    trained: Ids = field(default_factory=list)
    """Unit ids that entered a gradient, in that order. The broker counts their tokens as trained."""
    dropped: Ids = field(default_factory=list)
    """Unit ids that the learner filtered out or only evaluated. The broker counts their tokens as dropped."""
    replayed_tokens: Summand = 0
    """Tokens trained again from the learner's replay buffer; they were committed as trained before.

    The broker adds them up for `/status` and `/metrics`.
    """
    version: MaybeVersion = -1
    """Version that the step updated; -1 if nothing was trained. `offbeat retrain` reads it."""


class Held(Message, tag="held", frozen=True):
    """List of what the broker holds, sent by it to the learner after each Welcome, maybe in parts."""

    task_ids: Ids = field(default_factory=list)
    """Training tasks, done or not. A learner that continues the lineage adopts them, and puts only others."""
    unit_ids: Ids = field(default_factory=list)
    """Units delivered and not committed. The learner repeats the commits among them, which were lost."""
    more: bool = False
    """Tells the learner that another Held follows; it acts on the whole list only."""


class Checkpointed(Message, tag="checkpointed", frozen=True):
    """A checkpoint is on disk: no learner will repeat the steps up to ``step``."""

    epoch: Count
    """Written by the learner; the broker refuses an epoch that is not the one of its Hello."""
    step: Count
    """Written by the learner; the broker releases for good what was committed up to this step."""


class CheckpointWanted(Message, tag="checkpoint_wanted", frozen=True):
    """Committed units fill the journal; the learner is to write a checkpoint after this step."""

    reason: Prose = ""
    """Written by the broker; the learner logs it."""
