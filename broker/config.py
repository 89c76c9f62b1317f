"""Settings of the broker, of its journal, and of the time that the processes of all hosts wait for each other."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from broker.core.autoscaling import Bounds
from protocol.section import Section
from protocol.wanted import LARGEST


class JournalConfig(Section):
    """The broker's journal in the run folder, from which a restarted broker recovers its state."""

    durability: Literal["written", "synced"] = "written"
    """When the broker confirms what it receives. "written": when the operating system has it; a power failure
    may then lose the last `sync_interval_s`, a killed broker nothing. "synced": when the disk has it."""
    sync_interval_s: float = Field(0.2, gt=0)
    """Seconds between two syncs to the disk with "written": what a power failure may cost."""
    file_bytes: int = Field(64 << 20, ge=4096, le=1 << 30)
    """Bytes of a file after which the journal goes on in a new one, which begins with a snapshot. A file that
    began with a large snapshot grows to four times the size of that."""
    keep_bytes: int = Field(1 << 30, ge=0)
    """Bytes up to which the journal keeps files that are no longer needed, as a flight record."""
    max_bytes: int = Field(16 << 30, ge=4096)
    """Upper limit of the bytes still needed. Above it, actors get no segment credit until a checkpoint of the
    learner frees files."""
    min_free_bytes: int = Field(64 << 20, ge=0)
    """Free bytes of the disk below which actors get no segment credit. The rest is for commits."""

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.keep_bytes > self.max_bytes:
            raise ValueError(
                f"keep_bytes {self.keep_bytes} is more than max_bytes {self.max_bytes}: files kept for nobody would "
                "stop the run; lower keep_bytes or raise max_bytes"
            )
        return self

    def why_low(self, free: int, nbytes: int) -> str:
        """Say why the journal may take no more segments; "" if it may.

        Args:
            free: free bytes of the disk.
            nbytes: bytes of all files of the journal.

        Example:
            >>> JournalConfig().why_low(free=40_000_000, nbytes=0)
            'the disk has 40.0 MB free, broker.journal.min_free_bytes is 67.1 MB'
        """
        if free < self.min_free_bytes:
            return (
                f"the disk has {free / 1e6:,.1f} MB free, broker.journal.min_free_bytes is "
                f"{self.min_free_bytes / 1e6:,.1f} MB"
            )
        if nbytes > self.max_bytes:
            return f"the journal has {nbytes / 1e6:,.1f} MB, broker.journal.max_bytes is {self.max_bytes / 1e6:,.1f} MB"
        return ""


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


class FleetConfig(Section):
    """`[fleet]`: how long the processes of all hosts wait for what is not there, and how many there shall be."""

    orphan_minutes: float = Field(15.0, ge=0)
    """Minutes without the broker, or without a learner, after which generators and actors end with code 75. 0: they
    wait for ever."""
    no_head_hours: float = Field(72.0, ge=0)
    """Hours for which the starts of a host look for a head that does not answer. Then `offbeat host` ends with code 65,
    and no engine starts it again. 0: for ever."""
    no_capacity_minutes: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Minutes for which the learner waits while tasks are there, but no generator serves or no actor runs. 0: for
    ever. "auto": 0 where other hosts can join (`broker.endpoint` is not loopback, or a count is 0), else 5."""

    auto: bool = False
    """True: the supervisor of the head starts and drains generators and actors as the broker advises, see
    `offbeat status`. False: the advice is only shown."""
    generators: tuple[int, int] | None = Field(None, strict=False)
    """Least and largest number of generators of all hosts together, between which the advice stays. Needed with
    `auto`. Absent: the advice has no bounds."""
    actors: tuple[int, int] | None = Field(None, strict=False)
    """Least and largest number of actors. Absent: with `auto` their number stays as it is."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        for name in ("generators", "actors"):
            bounds = getattr(self, name)
            if bounds is not None and not 1 <= bounds[0] <= bounds[1] <= LARGEST:
                raise ValueError(
                    f"{name} is {list(bounds)}: write [least, largest], from 1 to {LARGEST}, the least first"
                )
        if self.auto and self.generators is None:
            raise ValueError("auto is true without bounds: add generators = [least, largest]")
        return self

    @property
    def bounds(self) -> Bounds:
        """The bounds of the advice."""
        every = Bounds()
        return Bounds(self.generators or every.generators, self.actors or every.actors)

    @property
    def no_head_s(self) -> float:
        """Seconds for which the starts of a host look for the head; infinite for "for ever"."""
        return self.no_head_hours * 3600 or math.inf

    @property
    def orphan_s(self) -> float:
        """Seconds without broker or learner after which generators and actors end; infinite for "never".

        Example:
            >>> FleetConfig().orphan_s, FleetConfig(orphan_minutes=0).orphan_s
            (900.0, inf)
        """
        return self.orphan_minutes * 60 or math.inf
