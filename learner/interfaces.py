"""What a learner step needs of others: a source of batches, and a destination of policy versions."""

from collections.abc import Callable, Sequence
from typing import Protocol

from learner.intake.intake import Intake
from learner.publishing.weight_copy import OutgoingWeights
from learner.run_files import PublishedVersion
from learner.units import Unit
from protocol.messages.peers import PublishWeights


class Batches(Protocol):
    """Source of batches, which also takes commits and announcements: the broker, or a recording."""

    intake: Intake

    @property
    def in_step(self) -> bool: ...
    @property
    def awaits_versions(self) -> bool: ...
    def collect(self, *, step: int, version: int) -> list[Unit]: ...
    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None: ...
    def refill(self, *, step: int, version: int) -> None: ...
    def announce(self, message: PublishWeights) -> None: ...


class Versions(Protocol):
    """Destination of new policy versions: generators, or nowhere."""

    stood_s: float
    """Seconds that the learner stood for the newest version."""
    announced_s: float | None
    """Seconds from the beginning of a publication until the announcement, for the newest announced version."""
    announced: int
    """Newest version that this process has announced."""
    published: PublishedVersion

    def publish(
        self,
        version: int,
        weights: OutgoingWeights,
        *,
        announce: Callable[[PublishWeights], None],
        line: Sequence[tuple[int, int]] = (),
    ) -> None: ...
    def settle(self) -> None: ...
    def check(self) -> None: ...
