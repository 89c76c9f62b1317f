"""What is reported of an update: numbers from what was recorded of each trained token. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from learner.algorithms.ratios import effective_sample_size, importance_ratio
from learner.algorithms.regularisers import kl_k3
from learner.batching import Batch, padding_fraction
from learner.trajectory import Trajectory
from learner.update import Outcome


@dataclass(frozen=True)
class UpdateReport:
    """What an update did."""

    applied: bool
    """The weights moved."""
    metrics: dict[str, float] = field(default_factory=dict)
    """TensorBoard tag -> number; those that are not finite are left out."""
    histograms: dict[str, NDArray[Any]] = field(default_factory=dict)
    """One number per trained token, or per trajectory for lengths."""
    nonfinite: bool = False
    """A step was skipped for a loss or gradient that is not finite."""


def make_report(
    trajectories: Sequence[Trajectory],
    batch: Batch,
    outcome: Outcome,
    *,
    current_version: int,
    seconds: float,
) -> UpdateReport:
    """Metrics and histograms of one update."""
    seen = outcome.tokens["seen"] > 0
    lags = (current_version - np.concatenate([t.policy_version for t in trajectories])[batch.loss_mask])[seen]
    action_tokens = sum(t.action_tokens for t in trajectories)
    metrics = {
        "learner/trained_tokens": float(seen.sum()),
        "learner/stale_token_fraction": 1 - float(batch.loss_mask.sum()) / max(1, action_tokens),
        "learner/padding_fraction": padding_fraction(outcome.filled, outcome.computed),
        "learner/step_seconds": seconds,
    }
    histograms: dict[str, NDArray[Any]] = {
        "policy_lag_versions": lags,
        "length_trained_tokens": batch.trained[batch.trained > 0],
    }
    if seen.any():
        metrics |= _step_metrics(outcome)
        metrics["learner/policy_lag_mean_versions"] = float(lags.mean())
        metrics["learner/policy_lag_max_versions"] = float(lags.max())
        numbers, ratios = _token_metrics(
            {name: torch.from_numpy(row[seen]) for name, row in outcome.tokens.items()},
            torch.from_numpy(batch.logp_behaviour[batch.loss_mask][seen]),
        )
        metrics |= numbers
        histograms |= ratios
    return UpdateReport(
        applied=outcome.applied > 0,
        metrics={name: value for name, value in metrics.items() if np.isfinite(value)},
        histograms=histograms,
        nonfinite=outcome.nonfinite,
    )


def _step_metrics(outcome: Outcome) -> dict[str, float]:
    """Means over the optimizer steps of the update."""
    return {
        "learner/loss": float(outcome.tokens["loss"].sum(dtype=np.float64)) / len(outcome.steps),
        "learner/gradient_norm": float(np.mean([step.gradient_norm for step in outcome.steps])),
        "learner/learning_rate": outcome.learning_rates[-1],
    }


def _token_metrics(
    tokens: dict[str, torch.Tensor], logp_behaviour: torch.Tensor
) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Means over trained tokens, and the ratios themselves."""
    current, proximal = tokens["logp_current"], tokens["logp_proximal"]
    ratios = {
        "ratio_current_proximal": importance_ratio(current, proximal),
        "ratio_proximal_behaviour": importance_ratio(proximal, logp_behaviour),
    }
    metrics = {
        "learner/entropy_nats": float(tokens["entropy"].mean()),
        "learner/kl_current_proximal_nats": float(kl_k3(current, proximal).mean()),
        # in this direction the estimate is unbiased: the tokens were sampled by the behaviour policy
        "learner/kl_proximal_behaviour_nats": float(kl_k3(logp_behaviour, proximal).mean()),
        "learner/clip_fraction": float(tokens["clipped"].mean()),
        "learner/truncated_fraction": float(tokens["truncated"].mean()),
        "learner/effective_sample_size": float(effective_sample_size(ratios["ratio_proximal_behaviour"])),
    }
    for name, ratio in ratios.items():
        metrics[f"learner/{name}_mean"] = float(ratio.mean())
        metrics[f"learner/{name}_max"] = float(ratio.max())
        metrics[f"learner/{name}_min"] = float(ratio.min())
    return metrics, {name: ratio.numpy() for name, ratio in ratios.items()}
