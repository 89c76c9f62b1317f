"""Tells when nothing that arrives can be trained: every episode fails, or every group has equal returns. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.errors import NothingToLearn, Stopped
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory
from protocol.failures import FailureCounts, failure_or_text

MOST = 0.5
"""Share of failed episodes from which on they are the reason why groups have no two different returns."""
SOLVED = "no group has anything left to learn from"
"""Reason why a run ends whose groups once had a signal, and have none any more."""


@dataclass
class Streak:
    """Number of like things in a row, and since when `look` has seen it without a break."""

    length: int = 0
    ever_broken: bool = False
    """True if anything unlike has ever come."""
    _began: float | None = None

    def grow(self) -> None:
        self.length += 1

    def end(self) -> None:
        self.length, self.ever_broken, self._began = 0, True, None

    def look(self, now: float) -> float:
        """Return for how many seconds this row has grown, as far as `look` has been called."""
        if self.length and self._began is None:
            self._began = now
        return 0.0 if self._began is None else now - self._began


@dataclass
class SignalWatch:
    """Counts of episodes and groups, and the rows of failures and of groups with equal returns.

    Example:
        >>> watch = SignalWatch()
        >>> watch.group([0.0, 1.0], uniform=False); watch.group([1.0, 1.0], uniform=True)
        >>> watch.groups, watch.uniform_groups, watch.uniform.length, watch.uniform_return
        (2, 1, 1, 1.0)
    """

    episodes: int = 0
    """Episodes that ended, in training and evaluation."""
    failures: FailureCounts = field(default_factory=FailureCounts)
    groups: int = 0
    """Training groups of which at least one member did not fail."""
    uniform_groups: int = 0
    """Number of these groups whose returns are all equal."""
    uniform_return: float = 0.0
    """Return of the last group with equal returns."""
    failed: Streak = field(default_factory=Streak)
    uniform: Streak = field(default_factory=Streak)

    def episode(self, trajectory: Trajectory) -> None:
        """Count an episode that ended. A failure without fault neither lengthens nor ends the row."""
        self.episodes += 1
        if trajectory.status != "failed":
            self.failed.end()
            return
        failure = failure_or_text(trajectory.failure, trajectory.error)
        self.failures.add(failure)
        if failure.fault:
            self.failed.grow()

    def group(self, returns: Sequence[float], *, uniform: bool) -> None:
        """Count a training group that is complete, by the returns of its members that did not fail."""
        if not returns:
            return
        self.groups += 1
        if not uniform:
            self.uniform.end()
            return
        self.uniform_groups += 1
        self.uniform_return = returns[0]
        self.uniform.grow()

    def look(self, config: LearnerConfig, now: float, *, training: bool = True) -> None:
        """End the run if the rows are longer than the settings allow.

        A row that follows on something better must also last `data_timeout_s`: a service that a reward needs may
        come back.

        Args:
            config: for `max_failed_episodes`, `max_uniform_groups` and `data_timeout_s`.
            now: monotonic time in seconds.
            training: whether the learner waits for groups. Their returns end no evaluation, because the run whose
                groups have nothing left is evaluated once more.

        Raises:
            NothingToLearn: all episodes fail, or no group so far had different returns.
            Stopped: groups had different returns, but have none any more.
        """
        failed_s, uniform_s = self.failed.look(now), self.uniform.look(now)
        if self.failed.length >= config.max_failed_episodes and (
            not self.failed.ever_broken or failed_s > config.data_timeout_s
        ):
            raise NothingToLearn(self._all_fail(config))
        if not training or self.uniform.length < config.max_uniform_groups:
            return
        if not self.uniform.ever_broken:
            raise NothingToLearn(self._all_uniform(config))
        if uniform_s > config.data_timeout_s:
            raise Stopped(f"{SOLVED}: {self.uniform.length} in a row with equal returns, {self._last_return}")

    def state(self) -> dict[str, Any]:
        """Return the counts for the checkpoint and for ``result.json``; rows begin anew."""
        return {
            "episodes": self.episodes,
            "failed": self.failures.total,
            "failures": self.failures.rows(),
            "groups": self.groups,
            "uniform_groups": self.uniform_groups,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.episodes, self.groups = state["episodes"], state["groups"]
        self.uniform_groups = state["uniform_groups"]
        self.failures = FailureCounts.from_rows(state["failed"], state["failures"])
        self.failed.ever_broken = self.episodes > self.failures.total
        self.uniform.ever_broken = self.groups > self.uniform_groups

    @property
    def failed_share(self) -> float:
        """Share of all episodes that failed."""
        return self.failures.total / max(1, self.episodes)

    def _all_fail(self, config: LearnerConfig) -> str:
        row = self.failed.length
        return (
            f"{row} of {row} episodes failed, one after the other: {self.failures.sentence()}; correct this, then "
            f"start again (learner.max_failed_episodes is {config.max_failed_episodes})"
        )

    def _all_uniform(self, config: LearnerConfig) -> str:
        if self.failed_share >= MOST:
            return (
                f"{self.failed_share:.0%} of episodes failed, and in each of the first {self.uniform.length} groups "
                f"the others have equal returns: {self.failures.sentence()}; correct this, then start again "
                f"(learner.max_uniform_groups is {config.max_uniform_groups})"
            )
        failed = (
            f" {self.failed_share:.0%} of episodes failed: {self.failures.sentence()};"
            if self.failures.total
            else ""
        )
        return (
            f"each of the first {self.uniform.length} groups has equal returns ({self._last_return}), so there is "
            f"nothing to learn;{failed} make the reward depend on the answer, or the tasks easier or harder, or "
            f"raise learner.sampling.temperature (learner.max_uniform_groups is {config.max_uniform_groups})"
        )

    @property
    def _last_return(self) -> str:
        return f"{self.uniform_return:g} in the last one"
