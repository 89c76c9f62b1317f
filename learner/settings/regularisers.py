"""Penalties on the KL divergence, the entropy bonus, and tokens that are left out for the sake of the entropy.

These are `[learner.algorithm.kl]`, `[learner.algorithm.entropy]` and `[learner.algorithm.covariance]`.
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol.section import Section


class KlPenalty(Section):
    """Penalty on KL(current || other policy), estimated per token."""

    kind: Literal["penalty"] = "penalty"
    coefficient: float = Field(0.001, gt=0)
    """Factor of the penalty in the loss. Above 0."""
    to: Literal["proximal", "reference"] = "reference"
    """The other policy. "reference": the model that training began with, which costs memory for a copy and a
    forward pass; "proximal": the proximal policy, which needs several optimizer steps per batch to act."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL, with d = log other - log current. "k1": -d, whose gradient is zero on average, so
    it regularises nothing; "k2": d^2 / 2, whose gradient is that of the KL; "k3": exp(d) - 1 - d, the one of
    GRPO, cut at 10: a token with d above 2.61 is not pulled back, so use "k2" where the policy may go far."""


class KlConvex(Section):
    """Penalty on a convex mixture of the KL to the base policy and the KL to the predecessor, the policy
    before the last update. The share of the base policy falls during training (ReMix, arXiv:2507.06892). It
    costs two copies of the model."""

    kind: Literal["convex"] = "convex"
    coefficient: float = Field(0.001, gt=0)
    """Factor of the penalty in the loss. Above 0."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of both KLs: see `estimator` of kind "penalty"."""
    hold: int = Field(50, ge=0)
    """Learner steps in which the share of the base policy is 1. At least 0."""
    every: int = Field(10, ge=1)
    """Learner steps between two drops of that share. At least 1."""
    drop: float = Field(0.1, ge=0, le=1)
    """Amount by which the share falls at each drop. 0 to 1."""
    floor: float = Field(0.5, ge=0, le=1)
    """Smallest share of the base policy. 0 to 1."""


KlConfig = Annotated[KlPenalty | KlConvex, Field(discriminator="kind")]


class EntropyBand(Section):
    """A band around the mean entropy of all earlier updates; the bonus is reduced by a penalty on tokens outside it
    (EPO, arXiv:2509.22576). It acts from the second update on, with the coefficient of the bonus."""

    low: float = Field(0.8, ge=0, le=1)
    """Lower edge of the band, as a share of the mean. 0: none. 0 to 1."""
    high: float = Field(1.2, ge=1)
    """Upper edge of the band, as a share of the mean. At least 1."""
    coefficient: float = Field(0.1, gt=0)
    """Factor of the distance from the band, in nats. Above 0."""
    growth: float = Field(1.0, ge=0)
    """The penalty's weight falls from 2 to 1 + exp(-2 growth) over the run. At least 0."""


class EntropyBonus(Section):
    """Entropy bonus in the loss; its coefficient is fixed, or steered towards a target entropy
    (arXiv:2505.22312)."""

    coefficient: float = Field(0.0, ge=0)
    """Factor of the entropy at the first step. At least 0; 0 without a `target`: no bonus."""
    target: float = Field(0.0, ge=0)
    """Mean entropy per token, in nats, that the coefficient is steered to: it rises while the entropy is
    below the target, else it falls. 0: the coefficient is fixed."""
    change: float = Field(1e-4, gt=0)
    """Amount by which the coefficient rises or falls per learner step. Above 0."""
    maximum: float = Field(0.02, gt=0)
    """Largest coefficient when it is steered. Above 0."""
    band: EntropyBand | None = None
    """Band that the entropy is held in. Absent: none."""


class CovarianceMask(Section):
    """Some tokens whose probability and advantage go together get no gradient, because they lower the entropy most
    (SPEAR, arXiv:2509.22601). The covariance is (A - mean A)(log pi - mean log pi) over the batch's trained tokens."""

    low: float = 1.0
    """Covariance above which a token may be left out."""
    high: float = 40.0
    """Covariance below which a token may be left out. Above `low`."""
    share: float = Field(0.02, gt=0, le=1)
    """Share of all tokens that is left out at most, drawn at random. Above 0, at most 1."""
