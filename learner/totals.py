"""Running totals of what a run has trained."""

from dataclasses import dataclass, field

import numpy as np

from learner.update.report import UpdateReport


@dataclass
class Totals:
    """Running totals, for the summary and the checkpoint. Replayed tokens are counted separately."""

    trained_tokens: int = 0
    replayed_tokens: int = 0
    trained_trajectories: int = 0
    step_seconds: float = 0.0
    """Wall time of learner steps, waiting and checkpoints included, evaluations excluded."""
    wait_seconds: float = 0.0
    update_seconds: float = 0.0
    publish_seconds: float = 0.0
    """Seconds that the learner stood for publications."""
    skipped_steps: int = 0
    lag_counts: dict[str, int] = field(default_factory=dict)

    def add(self, report: UpdateReport, trajectories: int) -> None:
        self.trained_tokens += int(report.metrics["learner/trained_tokens"]) - report.replayed_tokens
        self.replayed_tokens += report.replayed_tokens
        self.trained_trajectories += trajectories
        lags, counts = np.unique(report.histograms["policy_lag_versions"], return_counts=True)
        for lag, count in zip(lags.astype(int).tolist(), counts.tolist(), strict=True):
            self.lag_counts[str(lag)] = self.lag_counts.get(str(lag), 0) + count
