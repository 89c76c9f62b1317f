"""Every number the learner reports: one table of names, TensorBoard, and a line of JSON per step.

docs/metrics.md explains the same names; a test holds the two lists equal.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.trajectory import Trajectory
from protocol.whole_files import write_whole

SCALARS: dict[str, str] = {
    "rollout/reward_mean": "mean reward per action turn of the trajectories that arrived",
    "rollout/return_mean": "mean return (sum of rewards) of the trajectories that arrived",
    "rollout/return_std": "its standard deviation",
    "rollout/correct_share": "share of arrived trajectories that solved the task exactly",
    "rollout/failed_trajectories": "episodes that failed or could not be read (recorded, not trained), in all",
    "rollout/uniform_trajectories": "trajectories left out because their group's returns are equal, in all",
    "rollout/stale_trajectories": "trajectories dropped as too stale, by the broker or here, in all",
    "rollout/recommitted_trajectories": "trajectories that came again after their commit and were not trained again",
    "rollout/length_mean_tokens": "mean action tokens of the trajectories that arrived",
    "rollout/length_trained_mean_tokens": "mean action tokens of the trajectories, or windows, trained",
    "rollout/turns_mean": "mean action turns of the trajectories that arrived",
    "learner/loss": "loss of the step, global token mean",
    "learner/gradient_norm": "norm of the gradient before clipping",
    "learner/learning_rate": "learning rate of the step",
    "learner/entropy_nats": "mean entropy of the current policy on trained tokens",
    "learner/kl_current_proximal_nats": "k3 estimate of KL(current || proximal): what the update itself moved",
    "learner/kl_proximal_behaviour_nats": "k3 estimate between proximal and behaviour: staleness and engine mismatch",
    "learner/clip_fraction": "share of trained tokens whose gradient the clip cut off",
    "learner/ratio_current_proximal_mean": "importance ratio current/proximal, mean over trained tokens",
    "learner/ratio_current_proximal_min": "its minimum",
    "learner/ratio_current_proximal_max": "its maximum",
    "learner/ratio_proximal_behaviour_mean": "importance ratio proximal/behaviour, mean over trained tokens",
    "learner/ratio_proximal_behaviour_min": "its minimum",
    "learner/ratio_proximal_behaviour_max": "its maximum",
    "learner/truncated_fraction": "share of trained tokens whose correction weight sits at the ceiling",
    "learner/effective_sample_size": "effective share of the tokens under the proximal/behaviour weights, 0 to 1",
    "learner/correction_mean": "mean correction weight of trained tokens",
    "learner/ratio_variance": "mean of (current/behaviour - 1)² over trained tokens",
    "learner/clip_low": "lower bound of the ratio that balancing chose, mean over the optimizer steps",
    "learner/clip_high": "upper bound of the ratio that balancing chose",
    "learner/positive_share": "share of tokens with positive advantage in the surrogate, under those bounds",
    "learner/clip_moves": "how often balancing moved a bound",
    "learner/dual_variable": "factor of the penalty on the ratio's variance",
    "learner/entropy_coefficient": "coefficient of the entropy bonus",
    "learner/entropy_change": "entropy gained per unit of learning rate, predicted from unclipped tokens",
    "learner/entropy_change_low_positive": "part of it from unlikely tokens with positive advantage",
    "learner/entropy_change_high_positive": "part of it from likely tokens with positive advantage",
    "learner/entropy_change_low_negative": "part of it from unlikely tokens with negative advantage",
    "learner/entropy_change_high_negative": "part of it from likely tokens with negative advantage",
    "learner/policy_lag_mean_versions": "mean lag of trained tokens",
    "learner/policy_lag_max_versions": "largest lag of a trained token",
    "learner/stale_token_fraction": "share of action tokens masked out as older than the lag bound",
    "learner/trained_tokens": "action tokens that carried gradient in the step",
    "learner/replayed_tokens": "of these, tokens that were trained before",
    "learner/padding_fraction": "share of computed positions that were padding",
    "learner/step_seconds": "time of the update",
    "learner/wait_seconds": "time waited for a full batch before the update",
    "learner/publish_seconds": "time to write and announce the new version",
    "learner/idle_share": "share of wall time since the last step spent waiting",
    "learner/trained_tokens_per_second": "trained action tokens over wall time since the last step",
    "learner/tokens_trained_total": "action tokens trained so far",
    "learner/tokens_replayed_total": "action tokens trained again so far",
    "learner/policy_version": "newest published version",
    "learner/skipped_steps": "steps skipped for a loss or gradient that is not finite, in all",
    "critic/loss": "half the mean squared distance of values to their targets, before the update",
    "critic/value_mean": "mean value of the tokens the critic learned from",
    "critic/explained_variance": "share of the targets' variance that the values explain; 1 is perfect",
    "critic/tokens": "tokens the critic learned from",
    "critic/gradient_norm": "norm of a separate critic's gradient before clipping",
    "replay/items": "items in the replay table",
    "replay/inserted": "items inserted, in all",
    "replay/sampled": "items drawn, in all",
    "replay/evicted": "items thrown away, in all",
    "replay/share": "share of the batch's trajectories that were replayed",
    "replay/age_mean_versions": "mean lag of replayed tokens",
    "generator/tokens_total": "action tokens sampled by all generators",
    "generator/tokens_per_second": "their present rate",
    "generator/running_requests": "requests under way",
    "generator/waiting_requests": "of these, waiting for a place in vLLM",
    "generator/kv_cache_share": "share of the KV cache in use; near 1 with requests that wait, it is too small",
    "generator/prefix_hit_share": "share of new prompts' tokens whose keys and values were in the cache",
    "generator/recomputed_total": "requests computed again from the start, for new weights or for want of room, in all",
    "generator/idle_share": "share of wall time without a running request",
    "generator/idle_seconds_total": "seconds without a running request, of all generators",
    "generator/serving_seconds_total": "seconds they have served, requests or not",
    "generator/update_pause_seconds": "generation paused for the last weight update",
    "generator/updates_applied_total": "weight updates loaded, in all",
    "generator/updates_refused_total": "weight updates refused by verification, in all",
    "generator/policy_version": "mean version in service",
    "actor/episodes_running": "episodes under way",
    "actor/episodes_finished_total": "episodes ended, in all",
    "actor/episodes_failed_total": "episodes that failed, in all",
    "actor/env_seconds": "mean time that an episode spends in its environment",
    "actor/scorer_timeouts_total": "answers whose scoring hit the time limit, in all",
    "broker/queue_depth_segments": "segments held for the learner",
    "broker/queued_bytes": "their size",
    "broker/tasks_queued": "tasks waiting for an actor",
    "broker/tasks_leased": "tasks under way",
    "broker/units_ready": "deliveries ready",
    "broker/units_leased": "deliveries with the learner",
    "broker/units_committed": "deliveries committed and in no checkpoint yet",
    "broker/journal_aside_bytes": "their size in the journal",
    "broker/ledger_stored_tokens": "tokens stored, in all",
    "broker/ledger_held_tokens": "of these, held now",
    "broker/ledger_rolled_back_tokens": "tokens that came back because a checkpoint did not cover them, in all",
    "broker/ledger_trained_tokens": "tokens that entered a gradient",
    "broker/ledger_dropped_tokens": "tokens the learner filtered out or evaluated",
    "broker/ledger_stale_tokens": "tokens too old when delivery was due",
    "broker/ledger_superseded_tokens": "tokens of attempts, or lineages, that others took the place of",
    "broker/ledger_late_tokens": "tokens of trajectories that missed their group's deadline",
    "broker/ledger_given_up_tokens": "tokens of groups of which too few members ended",
    "broker/ledger_too_large_tokens": "tokens of units too large for a message",
    "broker/ledger_damaged_tokens": "tokens of units whose bytes in the journal cannot be read any more",
    "broker/length_bias_tokens": "mean length of trajectories trained minus that of all that ended",
    "broker/length_distance_tokens": "Wasserstein-1 distance of their lengths to those of all that ended",
    "broker/ledger_poison_tokens": "tokens of units that several learner processes did not survive",
    "evaluation/accuracy": "share of held-out tasks solved exactly, greedy",
    "evaluation/return_mean": "mean return on them",
}

HISTOGRAMS: dict[str, str] = {
    "policy_lag_versions": "lag of trained tokens",
    "length_generated_tokens": "action tokens of the trajectories that arrived",
    "length_trained_tokens": "action tokens of the trajectories trained",
    "ratio_proximal_behaviour": "importance ratio proximal/behaviour of trained tokens",
    "ratio_current_proximal": "importance ratio current/proximal of trained tokens",
}


def rollout_metrics(arrived: Sequence[Trajectory], trained: Sequence[Trajectory]) -> dict[str, float]:
    """Scalars of the trajectories that arrived since the last step, and of those trained in it."""
    finished = [t for t in arrived if t.status != "failed"]
    if not finished:
        return {}
    returns = np.array([t.return_ for t in finished])
    turns = np.array([t.action_turns for t in finished])
    return {
        "rollout/reward_mean": float(returns.sum() / max(1, turns.sum())),
        "rollout/return_mean": float(returns.mean()),
        "rollout/return_std": float(returns.std()),
        "rollout/correct_share": float(np.mean([t.correct is True for t in finished])),
        "rollout/length_mean_tokens": float(np.mean([t.action_tokens for t in finished])),
        "rollout/length_trained_mean_tokens": float(np.mean([t.window_tokens for t in trained] or [0])),
        "rollout/turns_mean": float(turns.mean()),
    }


class Report:
    """Writes TensorBoard events below ``run_dir/tb`` and lines of ``run_dir/metrics.jsonl``.

    Raises:
        KeyError: for a name that is not in the tables above, so that no metric goes undocumented.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "tb"
        self._path = run_dir / "metrics.jsonl"
        self._open(purge_step=None)

    def rewind(self, step: int) -> None:
        """Forget what was reported after ``step``: a run that goes on from a checkpoint reports it again."""
        self.close()
        kept = [line for line in self._path.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
        # Whole, because a crash in the middle must not lose the lines before.
        write_whole(self._path, "".join(line + "\n" for line in kept))
        self._open(purge_step=step + 1)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self._folder), purge_step=purge_step)
        self._lines = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Record one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name in scalars:
            SCALARS[name]
        row = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.file_writer.add_summary(Summary(value=row), step)  # one event, not one a scalar
        for name, values in (histograms or {}).items():
            HISTOGRAMS[name]
            values = values[np.isfinite(values)]
            if values.size:
                self._writer.add_histogram("histogram/" + name, values, step)
        self._writer.flush()
        self._lines.write(json.dumps({"step": step, **scalars}) + "\n")
        self._lines.flush()

    def close(self) -> None:
        self._writer.close()
        self._lines.close()


def _step(line: str) -> float:
    """Step of a line of metrics.jsonl; infinite if the line was cut by a crash."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
