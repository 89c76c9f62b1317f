"""Report of an update: metrics from the numbers recorded for each trained token, by pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from learner.algorithms.entropy.change import entropy_change, entropy_quadrants
from learner.algorithms.ratios import effective_sample_size, importance_ratio
from learner.algorithms.regularisers import kl_k3
from learner.algorithms.values import explained_variance
from learner.trajectory import Trajectory
from learner.update.batching.batch import Batch
from learner.update.batching.packing import padding_fraction
from learner.update.outcome import UpdateOutcome

LEAST_KNOWN = 0.5
"""Share of input tokens with experts of their generators below which some process does not send them."""


@dataclass(frozen=True)
class UpdateReport:
    """Report of one update."""

    applied: bool
    """True if the policy's weights moved."""
    metrics: dict[str, float] = field(default_factory=dict)
    """TensorBoard tag -> number; numbers that are not finite are left out."""
    histograms: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Name -> numbers: one per trained token, or per trajectory for lengths."""
    nonfinite: bool = False
    """True if a step was skipped because an estimate, a loss or a gradient was not finite."""
    replayed_tokens: int = 0
    """Number of trained tokens that come from replayed trajectories."""
    advantages: NDArray[np.float64] | None = None
    """Mean advantage of each trajectory's tokens that carry policy gradient, [S]; NaN where none does."""


def make_report(
    trajectories: Sequence[Trajectory],
    batch: Batch,
    outcome: UpdateOutcome,
    *,
    current_version: int,
    seconds: float,
) -> UpdateReport:
    """Compute the metrics and histograms of one update."""
    seen = outcome.tokens["seen"] > 0
    columns = {name: column[batch.seen_mask] for name, column in batch.columns.items()}
    lags = columns["lag"][seen]
    replayed = np.repeat([t.replayed for t in trajectories], batch.lengths)[batch.seen_mask][seen]
    offered = sum(int(t.learned_mask[t.window_start :].sum()) for t in trajectories if not t.baseline)
    metrics = {
        "learner/trained_tokens": float(seen.sum()),
        "learner/replayed_tokens": float(replayed.sum()),
        "learner/stale_token_fraction": 1 - float(batch.columns["fresh"].sum()) / max(1, offered),
        "learner/padding_fraction": padding_fraction(outcome.filled, outcome.computed),
        "learner/shared_fraction": padding_fraction(outcome.filled, outcome.inputs),
        "learner/step_seconds": seconds,
    }
    histograms: dict[str, NDArray[Any]] = {
        "policy_lag_versions": lags[~replayed],
        "length_trained_tokens": batch.trained[batch.trained > 0],
    }
    if seen.any():
        metrics |= _step_metrics(outcome) | _lag_metrics(lags)
        tokens = {name: torch.from_numpy(row[seen]) for name, row in outcome.tokens.items()}
        numbers, ratios = _token_metrics(tokens)
        metrics |= numbers | _clip_metrics(tokens, torch.from_numpy(columns["advantage"][seen]))
        histograms |= ratios
    metrics |= _critic_metrics(outcome, columns)
    return UpdateReport(
        applied=outcome.applied > 0 and not outcome.critic_only,
        metrics={name: value for name, value in metrics.items() if np.isfinite(value)},
        histograms=histograms,
        nonfinite=outcome.nonfinite,
        replayed_tokens=int(replayed.sum()),
        advantages=mean_advantages(batch),
    )


def missing_routes(metrics: Mapping[str, float]) -> str:
    """Return a warning if fewer than half of the input tokens came with experts of their generators, else "".

    Example:
        >>> missing_routes({"learner/routes_known_share": 0.98}), missing_routes({})
        ('', '')
    """
    share = metrics.get("learner/routes_known_share", 1.0)
    if share >= LEAST_KNOWN:
        return ""
    return (
        f'learner.algorithm.routes is "behaviour", but only {share:.0%} of the input tokens of this batch have experts '
        "that a generator sent (learner/routes_known_share). The others are trained with the experts that the routers "
        "choose now, as without replay. Actors and generators of an earlier version send none, nor does a generator "
        "with generator.routes = false: give all of them this installation and this run file"
    )


def mean_advantages(batch: Batch) -> NDArray[np.float64]:
    """Return the mean advantage of each trajectory's tokens that carry policy gradient, [S]; NaN without any."""
    rows = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[batch.loss_mask]
    sums = np.bincount(
        rows, weights=batch.columns["advantage"][batch.loss_mask], minlength=len(batch.lengths)
    )
    return np.where(batch.trained > 0, sums / np.maximum(1, batch.trained), np.nan)


def _step_metrics(outcome: UpdateOutcome) -> dict[str, float]:
    """Compute means over the optimizer steps of the update."""
    metrics = {"learner/loss": float(outcome.tokens["loss"].sum(dtype=np.float64)) / outcome.mini_batches}
    if outcome.steps:
        metrics["learner/gradient_norm"] = float(np.mean([step.gradient_norm for step in outcome.steps]))
        metrics["learner/learning_rate"] = outcome.learning_rates[-1]
    if outcome.bounds:
        metrics |= {
            "learner/clip_low": float(np.mean([b.low for b in outcome.bounds])),
            "learner/clip_high": float(np.mean([b.high for b in outcome.bounds])),
            "learner/positive_share": float(np.mean([b.share for b in outcome.bounds])),
            "learner/clip_moves": float(np.mean([b.moves for b in outcome.bounds])),
        }
    if outcome.routes:
        metrics["learner/rerouted_share"] = outcome.rerouted / outcome.routes
    if outcome.route_inputs:
        metrics["learner/routes_known_share"] = outcome.routed_inputs / outcome.route_inputs
    if outcome.state is not None:
        metrics["learner/dual_variable"] = outcome.state.dual
        metrics["learner/entropy_coefficient"] = outcome.state.entropy_coefficient
    return metrics


def _lag_metrics(lags: NDArray[Any]) -> dict[str, float]:
    return {
        "learner/policy_lag_mean_versions": float(lags.mean()),
        "learner/policy_lag_max_versions": float(lags.max()),
    }


def _token_metrics(tokens: dict[str, torch.Tensor]) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Compute means over trained tokens, and the ratios themselves."""
    current, proximal, behaviour = (
        tokens["logp_current"],
        tokens["logp_proximal"],
        tokens["logp_behaviour"],
    )
    ratios = {
        "ratio_current_proximal": importance_ratio(current, proximal),
        "ratio_proximal_behaviour": importance_ratio(proximal, behaviour),
    }
    metrics = {
        "learner/entropy_nats": float(tokens["entropy"].mean()),
        "learner/kl_current_proximal_nats": float(kl_k3(current, proximal).mean()),
        # In this direction the estimate is unbiased, because the behaviour policy sampled the tokens.
        "learner/kl_proximal_behaviour_nats": float(kl_k3(behaviour, proximal).mean()),
        "learner/clip_fraction": float(tokens["clipped"].mean()),
        "learner/truncated_fraction": float(tokens["truncated"].mean()),
        "learner/correction_mean": float(tokens["correction"].mean()),
        "learner/effective_sample_size": float(effective_sample_size(ratios["ratio_proximal_behaviour"])),
        "learner/ratio_variance": float((importance_ratio(current, behaviour) - 1).square().mean()),
    }
    for name, ratio in ratios.items():
        metrics[f"learner/{name}_mean"] = float(ratio.mean())
        metrics[f"learner/{name}_max"] = float(ratio.max())
        metrics[f"learner/{name}_min"] = float(ratio.min())
    return metrics, {name: ratio.numpy() for name, ratio in ratios.items()}


def _clip_metrics(tokens: dict[str, torch.Tensor], advantage: torch.Tensor) -> dict[str, float]:
    """Predict what the unclipped tokens do to the entropy (BAPO, arXiv:2510.18927, entropy-clip rule)."""
    active = (tokens["clipped"] == 0) & (tokens["correction"] != 0)
    logp = tokens["logp_current"]
    metrics = {"learner/entropy_change": float(entropy_change(logp, advantage, active))}
    for name, value in entropy_quadrants(logp, advantage, active)._asdict().items():
        metrics[f"learner/entropy_change_{name}"] = float(value)
    return metrics


def _critic_metrics(outcome: UpdateOutcome, columns: dict[str, NDArray[Any]]) -> dict[str, float]:
    learned = columns["value_mask"] > 0
    if not learned.any():
        return {}
    targets, values = columns["value_target"][learned], outcome.tokens["value"][learned]
    metrics = {
        "critic/loss": float(np.mean((values - targets) ** 2) / 2),
        "critic/value_mean": float(values.mean()),
        "critic/explained_variance": explained_variance(targets, values),
        "critic/tokens": float(learned.sum()),
    }
    if outcome.critic_steps:
        metrics["critic/gradient_norm"] = float(np.mean([s.gradient_norm for s in outcome.critic_steps]))
    return metrics
