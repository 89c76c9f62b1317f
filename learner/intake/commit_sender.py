"""Sends commits to the broker, and tells it which step a checkpoint covers."""

import logging
from collections.abc import Sequence

from learner.config import LearnerConfig
from learner.intake.intake import Intake
from learner.units import Unit
from protocol.messages.episodes import Checkpointed, Commit
from protocol.sockets import ThreadLink

log = logging.getLogger(__name__)


class CommitSender:
    """Commits of an `Intake` on their way to the broker.

    Args:
        link: connection to the broker.
        intake: units, and which of them are to be committed.
        config: for `checkpoint_every`.
        step: learner step of the checkpoint that this process continues.
    """

    def __init__(self, link: ThreadLink, intake: Intake, config: LearnerConfig, *, step: int) -> None:
        self._link, self._intake, self._config = link, intake, config
        self._checkpointed: Checkpointed | None = None
        self._committed = step
        """Newest learner step of a Commit."""
        self._covered = step
        """Newest learner step that a checkpoint covers."""

    @property
    def _epoch(self) -> int:
        return self._intake.curriculum.epoch

    def flush(self, *, step: int) -> None:
        """Commit units that were dropped since the last call, and repeat commits that were lost.

        Dropped windows are context of later windows, so the broker must keep them until a checkpoint contains
        their segments. If a checkpoint already covers ``step``, they are committed with the next step.
        """
        self.recommit()
        later = self._intake.windows and self._config.checkpoint_every > 0 and self._covered == step
        self.commit([], step=step + later)

    def recommit(self) -> None:
        """Repeat commits that were lost."""
        again = self._intake.commits.recommit(self._epoch)
        for message in again:
            self._link.send(message)
        # The broker refused a checkpoint of a step whose commit it had lost.
        if again:
            self.repeat_checkpointed()

    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None:
        """Commit units that entered a gradient, and units that were dropped since the last call.

        Args:
            trained: units that entered a gradient.
            step: learner step that trained them.
            version: policy version that the step updated.
            replayed_tokens: number of replayed tokens that the step trained.
        """
        message = self._intake.commit(self._epoch, step, trained, replayed_tokens, version)
        if message is None:
            return
        if message.trained:
            log.debug("step %d trained %s", step, " ".join(message.trained))
        self._committed = max(self._committed, step)
        self._link.send(message)
        # Without checkpoints no learner will need the units again, so the broker may release them now.
        if not self._config.checkpoint_every:
            self.checkpointed(step=step)

    def checkpointed(self, *, step: int) -> None:
        """Tell the broker that a checkpoint covers ``step``; repeated at every join."""
        self._covered = step
        if step > self._committed:
            # The broker takes no checkpoint of a step that it does not know, and this step had no units.
            self._committed = step
            self._link.send(Commit(epoch=self._epoch, step=step))
        self._checkpointed = Checkpointed(epoch=self._epoch, step=step)
        self._link.send(self._checkpointed)

    def repeat_checkpointed(self) -> None:
        """Send the last Checkpointed again, if there was one."""
        if self._checkpointed is not None:
            self._link.send(self._checkpointed)
