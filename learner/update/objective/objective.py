"""The objective, put together from the config: corrections of staleness x surrogate, minus regularisers.

    loss = Σ_t weight_t · ( - c_t · surrogate_t - entropy_coefficient · H_t  +  kl_coefficient · KL_t )

All tensors are flat, [N]: one element per token that carries policy gradient, from any trajectory.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from torch import Tensor

from learner.algorithms.ratios import interpolated_proximal
from learner.algorithms.regularisers import entropy_band_penalty, kl_convex, kl_estimate
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.regularisers import KlConfig, KlConvex, KlPenalty
from learner.update.objective.corrections import make_corrections
from learner.update.objective.surrogate import make_surrogate
from learner.update.objective.tokens import Adaptive, Diagnostics, Tokens, View

Objective = Callable[[Tokens, Adaptive, Tensor, Tensor], tuple[Tensor, Diagnostics]]
Kl = Callable[[View], Tensor]


def make_objective(config: AlgorithmConfig) -> Objective:
    """Make the objective, a function that returns (loss, diagnostics).

    Its arguments are (tokens, adaptive, logp_current [N] with gradient, entropy [N]).

    Example:
        >>> import torch
        >>> lp, row = torch.tensor([-1.0, -2.0], requires_grad=True), torch.zeros(2, dtype=torch.int64)
        >>> tokens = Tokens(lp.detach(), advantage=torch.tensor([1.0, -1.0]), weight=torch.tensor([0.5, 0.5]),
        ...     lag=torch.zeros(2), sequence=row, turn=row)
        >>> loss, _ = make_objective(AlgorithmConfig())(tokens, Adaptive(), lp, torch.zeros(2))
        >>> loss.backward(); lp.grad
        tensor([-0.5000,  0.5000])
    """
    correct = make_corrections(config.corrections)
    surrogate = make_surrogate(config.surrogate)
    kl = make_kl(config.kl) if config.kl else None

    def objective(
        tokens: Tokens, adaptive: Adaptive, logp_current: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Diagnostics]:
        if tokens.entropy_multiplier is not None:
            tokens = replace(tokens, advantage=tokens.advantage * tokens.entropy_multiplier)
        view = View(tokens, adaptive, logp_current, proximal_logp(config, tokens, logp_current))
        correction, truncated = correct(tokens, view.logp_proximal)
        value, clipped = surrogate(view)
        if tokens.kept is not None:
            value, clipped = value * tokens.kept, clipped | (tokens.kept == 0)
        per_token = -correction * value
        if adaptive.entropy_coefficient:
            per_token = per_token - adaptive.entropy_coefficient * entropy
        if config.entropy.band is not None and adaptive.band_coefficient:
            low, high = config.entropy.band.low, config.entropy.band.high
            outside = entropy_band_penalty(entropy, mean=adaptive.entropy_mean, low=low, high=high)
            per_token = per_token + adaptive.band_coefficient * outside
        if kl is not None:
            per_token = per_token + kl(view)
        parts = tokens.weight * per_token
        return parts.sum(), Diagnostics(
            logp_current=logp_current.detach(),
            logp_proximal=view.logp_proximal,
            logp_behaviour=tokens.logp_behaviour,
            entropy=entropy.detach(),
            loss=parts.detach(),
            clipped=clipped,
            truncated=truncated,
            correction=correction,
        )

    return objective


def proximal_logp(config: AlgorithmConfig, tokens: Tokens, logp_current: Tensor) -> Tensor:
    """Return the log-probabilities [N] under the proximal policy, without gradient."""
    match config.proximal:
        case "behaviour":
            return tokens.logp_behaviour
        case "interpolated":
            # After the first step on a batch, the current policy is no longer a centre for fresh tokens.
            several = config.updates_per_batch * config.passes > 1
            return interpolated_proximal(
                tokens.logp_behaviour, logp_current, tokens.lag, fresh="behaviour" if several else "current"
            )
        case "recomputed":
            return logp_current.detach() if tokens.logp_proximal is None else tokens.logp_proximal
        case _:
            assert_never(config.proximal)


def make_kl(config: KlConfig) -> Kl:
    """Make the function of a `View` that returns the penalty [N], its coefficient included."""
    match config:
        case KlPenalty(coefficient=coefficient, to=to, estimator=estimator):

            def penalty(view: View) -> Tensor:
                other = view.logp_proximal if to == "proximal" else view.tokens.logp_reference
                assert other is not None
                return coefficient * kl_estimate(view.logp_current, other, estimator=estimator)

            return penalty
        case KlConvex(coefficient=coefficient, estimator=estimator):

            def convex(view: View) -> Tensor:
                base, predecessor = view.tokens.logp_reference, view.tokens.logp_predecessor
                assert base is not None
                assert predecessor is not None
                return coefficient * kl_convex(
                    view.logp_current,
                    base,
                    predecessor,
                    base_share=view.adaptive.base_share,
                    estimator=estimator,
                )

            return convex
        case _:
            assert_never(config)
