"""Settings of the journal."""

from typing import Literal, Self

from pydantic import Field, model_validator

from protocol.section import Section


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
