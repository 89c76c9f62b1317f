"""Settings of the broker."""

from pydantic import Field

from broker.journal.config import JournalConfig
from protocol.section import Section


class BrokerConfig(Section):
    """`[broker]` of the run file."""

    endpoint: str = "tcp://127.0.0.1:0"
    """Address where peers connect. Port 0: a free port is chosen at launch."""
    http: str = "127.0.0.1:0"
    """Address (host:port) of `/status` and `/metrics`."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Seconds between the heartbeats of a peer. A peer is lost after five missed heartbeats."""
    task_lease_s: float = Field(60.0, gt=0)
    """Seconds without progress after which an actor loses a task, and the task is leased again."""
    delivery_lease_s: float = Field(300.0, gt=0)
    """Seconds without progress of the learner after which a unit it has not committed is delivered again."""
    group_deadline_s: float = Field(120.0, gt=0)
    """Seconds a rollout group waits for other members after the first one. Then it is delivered as it is."""
    min_group_members: int = Field(2, ge=1)
    """Finished members that a rollout group needs for delivery. A group with fewer is dropped."""
    max_attempts: int = Field(3, ge=1)
    """Lost attempts after which a task is given up. An attempt is lost when its actor is lost, makes no
    progress, misses the deadline, rejects the task, or sends an invalid segment."""
    max_queued_tasks: int = Field(65_536, ge=1)
    """Upper limit of the tasks that wait for an actor. The broker refuses more."""
    max_queued_segments: int = Field(65_536, ge=1)
    """Upper limit of the segments held for the learner. At the limit, actors get no credit and wait."""
    max_queued_bytes: int = Field(1 << 30, ge=1 << 20)
    """Upper limit of the bytes held for the learner. At the limit, actors get no credit and wait."""
    segment_credit: int = Field(256, ge=1)
    """Upper limit of the unacknowledged segments that one actor may have under way."""
    max_deliveries: int = Field(5, ge=1)
    """Learner processes in a row that may get a unit and write no checkpoint. Then the unit is dropped."""
    journal: JournalConfig = JournalConfig()
    """Settings of the journal, from which a restarted broker recovers its state."""
    generator_stall_s: float = Field(8.0, gt=0)
    """Least time in seconds for which a generator with work may make no step of its engine. It is longer for a
    generator that reports that its steps take long. After that it is not offered to actors until it makes
    progress."""
