"""`[[learner.algorithm.by_origin]]`: the loss of a token by who wrote it."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from learner.settings.corrections import ShippedCorrection
from learner.settings.surrogates import (
    ChunkSurrogate,
    ClipSurrogate,
    MiniRlSurrogate,
    ShapedSurrogate,
    TripletSurrogate,
    WeightedSurrogate,
    has_own_ratio,
)
from learner.trajectory import FOREIGN, Origin, Trajectory
from protocol.section import Section

OriginSurrogate = Annotated[
    ClipSurrogate | WeightedSurrogate | MiniRlSurrogate | TripletSurrogate | ChunkSurrogate | ShapedSurrogate,
    Field(discriminator="kind"),
]
"""Surrogates that ask for nothing but a token's own probabilities, so that a part of a batch can have them."""


class OriginLoss(Section):
    """The loss of trajectories of one origin, in place of the algorithm's own. The first entry that fits decides;
    without one the algorithm's surrogate and corrections stay. Penalties and bonuses of the algorithm apply to all
    tokens."""

    origin: Origin
    """Who wrote the tokens. "own": the policy, for this batch. "replayed": the policy, for an earlier batch
    (`[learner.replay]`). "guided": the policy behind a note, trained behind the prompt without it (`[learner.family]`
    of kind "steered", or "retry" with `clean`). "taught": a teacher (`[learner.taught]`). "given":
    the conversations of `[learner.given]`."""
    only: Literal["all", "success", "failure"] = "all"
    """Trajectories of this origin that are meant. "success": those that the environment calls right, or, if it says
    nothing, those with a return above 0; "failure": the others."""
    surrogate: OriginSurrogate | None = None
    """Objective of a token. Absent: the algorithm's, with its corrections."""
    corrections: tuple[ShippedCorrection, ...] | None = Field(None, strict=False)
    """Weights of a token from its ratio proximal / behaviour. Absent: none, or, if `surrogate` is absent, too, the
    algorithm's."""
    weight: float = Field(1.0, ge=0)
    """Factor of the objective of these tokens. At least 0."""

    def fits(self, t: Trajectory) -> bool:
        """Return whether a trajectory has this loss."""
        return self.origin == t.origin and self.only in ("all", "success" if t.solved else "failure")

    def contradictions(self, field: str) -> Iterator[str]:
        surrogate, corrections = self.surrogate, self.corrections or ()
        if surrogate is None and self.corrections is not None:
            yield (
                f"{field} has corrections but no surrogate; write its surrogate, or take corrections out for the "
                "algorithm's own"
            )
        if any(c.level == "group" for c in corrections):
            yield f'{field}.corrections have level "group", over tokens of several losses; use "sequence" or "token"'
        if self.origin == "given" and self.only != "all":
            yield f'{field}.only is "{self.only}", but nobody says whether what was given is right; use "all"'
        if self.origin in FOREIGN:
            yield from self._foreign(field)
            return
        weights = [c.kind for c in corrections if getattr(c, "weight", True)]
        if surrogate is not None and weights and has_own_ratio(surrogate):
            yield (
                f'{field}.surrogate of kind "{surrogate.kind}" has the ratio current / behaviour in it, and '
                f"{field}.corrections ({', '.join(weights)}) would weigh staleness a second time; take them out"
            )

    def _foreign(self, field: str) -> Iterator[str]:
        """Yield the refusal of a ratio to a behaviour policy that nobody knows."""
        cure = f'{self.origin} tokens have no behaviour probability; use surrogate = {{ kind = "shaped" }}'
        if self.corrections:
            yield f"{field}.corrections are ratios proximal / behaviour, but {cure}, and take corrections out"
        if self.origin == "given":
            if not isinstance(self.surrogate, ShapedSurrogate):
                yield f"{field}.surrogate of {self.origin} tokens is not shaped, but {cure}"
        elif self.surrogate is None or has_own_ratio(self.surrogate):
            yield f"{field}.surrogate has the ratio current / behaviour, but {cure}"


def loss_number(losses: Sequence[OriginLoss], t: Trajectory) -> int:
    """Return the place of the first loss that fits a trajectory, from 1; 0 if it has the algorithm's own."""
    return next((number for number, loss in enumerate(losses, start=1) if loss.fits(t)), 0)


def unreachable(losses: Sequence[OriginLoss], field: str) -> Iterator[str]:
    """Yield a line for each loss that never decides, because those before it fit everything that it fits."""
    for place, loss in enumerate(losses):
        before = {each.only for each in losses[:place] if each.origin == loss.origin}
        if "all" in before or loss.only in before or {"success", "failure"} <= before:
            yield (
                f'{field}.{place} of origin "{loss.origin}" is never reached: an entry before it fits these '
                "trajectories; take it out, or put it first"
            )
