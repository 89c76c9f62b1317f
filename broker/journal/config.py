"""Settings of the journal."""

from typing import Literal, Self

from pydantic import Field, model_validator

from protocol.section import Section


class JournalConfig(Section):
    """The broker's journal, in the run folder: what makes a killed broker go on where it stopped."""

    durability: Literal["written", "synced"] = "written"
    """When the broker answers for what it was given. "written": when the system has it, which survives the death of
    the broker, and a power failure but for the last `sync_interval_s`. "synced": when the disk has it."""
    sync_interval_s: float = Field(0.2, gt=0)
    """With "written", the disk gets it at least so often: what a power failure may cost."""
    file_bytes: int = Field(64 << 20, ge=4096, le=1 << 30)
    """A file that has grown to so much is followed by the next, which begins with a snapshot."""
    keep_bytes: int = Field(1 << 30, ge=0)
    """Files no longer needed stay, as flight record, while the journal is no larger than this."""
    max_bytes: int = Field(16 << 30, ge=4096)
    """With more than this still needed, no segments are let in until a checkpoint of the learner frees some."""
    min_free_bytes: int = Field(64 << 20, ge=0)
    """With less than this free on the disk, no segments are let in; the rest is for commits."""

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.keep_bytes > self.max_bytes:
            raise ValueError(
                f"keep_bytes {self.keep_bytes} is more than max_bytes {self.max_bytes}: files kept for nobody would "
                "stop the run; lower keep_bytes or raise max_bytes"
            )
        return self
