"""`[learner.selection]`: which task comes next."""

from typing import Annotated, Literal

from pydantic import Field

from protocol.section import Section


class SequentialSelection(Section):
    """Tasks are dealt in the order of their numbers: 0, 1, 2, and so on. Each is dealt once."""

    kind: Literal["sequential"] = "sequential"


class EpochsSelection(Section):
    """The tasks 0 to `tasks` - 1 are dealt again and again. Each epoch deals every one of them once, in an order of its
    own, which the seed of the run decides."""

    kind: Literal["epochs"] = "epochs"
    tasks: int = Field(128, ge=1)
    """Tasks of the list. At least 1."""


SelectionConfig = Annotated[SequentialSelection | EpochsSelection, Field(discriminator="kind")]
