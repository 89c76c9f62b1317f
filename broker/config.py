"""Settings of the broker."""

from pydantic import Field

from broker.journal.config import JournalConfig
from protocol.section import Section


class BrokerConfig(Section):
    """`[broker]` of the run file."""

    endpoint: str = "tcp://127.0.0.1:0"
    """Where peers connect. Port 0: a free port is chosen at launch."""
    http: str = "127.0.0.1:0"
    """host:port of `/status` and `/metrics`."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Rhythm asked of all peers; five missed beats mean dead."""
    task_lease_s: float = Field(60.0, gt=0)
    """An actor that shows no progress on a task for so long loses it to another."""
    delivery_lease_s: float = Field(300.0, gt=0)
    """A learner that does not commit a delivery for so long gets it again."""
    group_deadline_s: float = Field(120.0, gt=0)
    """A rollout group waits so long after its first finished member; then it is delivered as it is."""
    min_group_members: int = Field(2, ge=1)
    """A group with fewer finished members at its deadline is dropped."""
    max_attempts: int = Field(3, ge=1)
    """A task that failed or was lost so often is given up."""
    max_queued_tasks: int = Field(65_536, ge=1)
    """Tasks waiting for an actor; more are refused."""
    max_queued_segments: int = Field(65_536, ge=1)
    """Segments held for the learner. When full, no segment credit is granted and actors wait."""
    max_queued_bytes: int = Field(1 << 30, ge=1 << 20)
    """Bytes held for the learner; the same rule."""
    segment_credit: int = Field(256, ge=1)
    """Unacknowledged segments one actor may have under way."""
    max_deliveries: int = Field(5, ge=1)
    """A unit that so many learner processes in a row were given, none of which wrote a checkpoint, is dropped."""
    journal: JournalConfig = JournalConfig()
    """What makes a killed broker go on where it stopped."""
    generator_stall_s: float = Field(8.0, gt=0)
    """A generator with work and without a token for so long is not offered to actors meanwhile."""
