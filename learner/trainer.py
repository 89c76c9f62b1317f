"""One learner step: take a batch, update, publish a version, commit, report."""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.replay import self_imitation_weight
from learner.errors import Diverged
from learner.given import GivenConversations, TaughtAnswers, TaughtMembers
from learner.idle_parts import IdleParts, named_parts
from learner.intake.intake import Intake
from learner.metrics import Report, return_histograms, rollout_metrics
from learner.process import SharedGpu
from learner.replay.batch import batch_metrics, mix, remember
from learner.replay.table import ReplayTable
from learner.rewards import mode_metrics, never_given
from learner.run_files import PublishedVersion
from learner.sample_log import SampleLog
from learner.settings.learner import LearnerConfig
from learner.trajectory import FOREIGN, RECOMMITTED, Trajectory, Unit
from learner.update.engine import TrainingEngine
from learner.update.report import UpdateReport, check_sampler, missing_routes
from learner.update.token_numbers import TokenNumbers
from learner.weight_copy import OutgoingWeights
from protocol.arrays import ROUTED_EXPERTS, ROUTED_TOKEN, TOKEN_ARRAYS
from protocol.messages.peers import PublishWeights
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Running totals, for the summary and the checkpoint. Replayed tokens are counted separately."""

    trained_tokens: int = 0
    replayed_tokens: int = 0
    given_tokens: int = 0
    """Tokens that somebody else wrote: given conversations, and answers of teachers."""
    taken_tokens: int = 0
    """Action tokens of what was trained for the first time, those that a mask left out included."""
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
        sampled = int(report.metrics["learner/trained_tokens"]) - report.taught_tokens
        self.trained_tokens += sampled - report.replayed_tokens
        self.replayed_tokens += report.replayed_tokens
        self.given_tokens += report.given_tokens + report.taught_tokens
        self.trained_trajectories += trajectories
        lags, counts = np.unique(report.histograms["policy_lag_versions"], return_counts=True)
        for lag, count in zip(lags.astype(int).tolist(), counts.tolist(), strict=True):
            self.lag_counts[str(lag)] = self.lag_counts.get(str(lag), 0) + count


class Batches(Protocol):
    """Source of batches, which also takes commits and announcements: the broker, or a recording."""

    intake: Intake

    @property
    def in_step(self) -> bool: ...
    @property
    def awaits_versions(self) -> bool: ...
    @property
    def version_before(self) -> int: ...
    def collect(self, *, step: int, version: int) -> list[Unit]: ...
    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None: ...
    def trained(self, *, update_s: float, step_s: float) -> None: ...
    def refill(self, *, step: int, version: int) -> None: ...
    def announce(self, message: PublishWeights) -> None: ...


class Versions(Protocol):
    """Destination of new policy versions: generators, or nowhere."""

    stood_s: float
    """Seconds that the learner stood for the newest version."""
    announced_s: float | None
    """Seconds from the beginning of a publication until the announcement, for the newest announced version."""
    announced: int
    """Newest version that this process has announced."""
    published: PublishedVersion
    pinned: int | None
    """Version that an evaluation under way needs, so that it is kept; None: no one does."""

    def publish(
        self,
        version: int,
        weights: OutgoingWeights,
        *,
        announce: Callable[[PublishWeights], None],
        line: Sequence[tuple[int, int]] = (),
    ) -> None: ...
    def settle(self) -> None: ...
    def check(self) -> None: ...


class TokenSink(Protocol):
    """Destination of what the learner made of each token: `learner.annotations.AnnotationLog`, or an export."""

    def step(
        self,
        step: int,
        version: int,
        trajectories: Sequence[Trajectory],
        numbers: TokenNumbers,
        *,
        applied: bool,
        untrained: Mapping[str, list[str]],
    ) -> None: ...
    def settle(self) -> bool: ...
    def rewind(self, step: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class Trainer:
    """The parts that a learner step needs, and the position of training."""

    config: LearnerConfig
    run_dir: Path
    engine: TrainingEngine
    batches: Batches
    publisher: Versions
    report: Report
    replay: ReplayTable[Any] | None = None
    given: GivenConversations | None = None
    """Conversations that somebody else wrote, a part of each batch; None: there are none."""
    taught: TaughtAnswers | TaughtMembers | None = None
    """Answers of teachers for groups that nobody solved; None: there are none."""
    samples: SampleLog | None = None
    """Writes what the model wrote; None: nobody wants to see it, because it was seen before."""
    annotations: TokenSink | None = None
    """Writes what the learner made of each token; None: nothing does."""
    seed: int = 0
    step: int = 0
    version: int = 0
    skipped_in_a_row: int = 0
    unpublished: int = 0
    """Updates since the last publication."""
    totals: Totals = field(default_factory=Totals)
    pace: tuple[tuple[str, float], ...] = ()
    """What heartbeats say of all steps so far, from which the broker knows how many generators are needed."""
    gpu: SharedGpu = field(default_factory=lambda: SharedGpu(None, 0.0))
    names_checked: bool = False
    """True if this process has compared the names in the settings with what episodes have."""
    first_group_written: bool = False
    """True if samples of the first group that ended are written."""
    sampler_limit: float = math.inf
    """Largest mean difference between the log-probabilities of generators and learner, in nats."""
    idle_parts: IdleParts | None = None
    """Counts the steps in which the part that the method is named for did nothing; made at the first step."""
    routes_checked: bool = False
    """True once this process has looked how many tokens of a batch have experts of their generators."""

    def learn(self) -> None:
        """Do one learner step."""
        started = time.monotonic()
        updated = self.version
        units = self.batches.collect(step=self.step, version=updated)
        waited = time.monotonic() - started
        trajectories = self.batch(units)
        with self.gpu.alone():
            report = self.engine.update(trajectories, current_version=updated)
        self.compare_with_sampler(report, updated)
        self.step += 1
        taken = (t for unit in units for part in unit.parts for t in part.trained if t.origin not in FOREIGN)
        self.totals.taken_tokens += sum(t.window_tokens for t in taken)
        if report.applied:
            self.applied(report, units)
        elif self.batches.in_step:
            # Publish the same weights, because trajectories wait for a version at the end of their windows.
            self.next_version()
        if report.nonfinite:
            self.skipped(trajectories)
        else:
            self.skipped_in_a_row = 0
        self.batches.commit(units, step=self.step, version=updated, replayed_tokens=report.replayed_tokens)
        spent = time.monotonic() - started
        self.batches.trained(update_s=spent - waited, step_s=spent)
        if self.step < self.config.steps:
            self.batches.refill(step=self.step, version=self.version)
        self.batches.intake.check()
        self.record(report, trajectories, updated, waited, time.monotonic() - started)

    def compare_with_sampler(self, report: UpdateReport, updated: int) -> None:
        """Compare, in the first step of a run, the generators' log-probabilities with the learner's own.

        The first update has computed the learner's ones before its first optimizer step, and nothing of it has left
        the process yet: no version, no commit, no checkpoint.

        Args:
            updated: policy version that the step updated.

        Raises:
            SamplerDiffers: they are further apart than rounding explains.
        """
        # Behind the first version, running answers may have a KV cache of an earlier one, which differs by more. A run
        # that begins again without a checkpoint is at its first step, but not at its first version.
        if self.step or updated or report.nonfinite or report.sampler is None:
            return
        check_sampler(report.sampler, self.sampler_limit)
        log.info(
            "log-probabilities of generators and learner: %.2g nats apart in the mean of %d tokens, %.2g at most",
            report.sampler.mean,
            report.sampler.tokens,
            report.sampler.worst,
        )

    def batch(self, units: Sequence[Unit]) -> list[Trajectory]:
        """Return the trajectories to train on: those of the units, and replayed, taught or given ones."""
        fresh = [t for unit in units for t in unit.trajectories]
        if self.taught is not None:
            return self.taught.teach(units, self.engine.mean_logp)
        if self.given is not None:
            return fresh + self.given.of_step(self.step)
        if self.replay is None:
            return fresh
        weight = self_imitation_weight(self.step, warmup_steps=self.replay.config.warmup_steps)
        if not weight:
            return fresh
        # Seeded by the step, so that a restart draws the same items.
        rng = np.random.default_rng([self.seed, self.step])
        return mix(
            self.replay,
            units,
            step=self.step,
            version=self.version,
            rng=rng,
            weight=weight,
            compose=lambda members: self.batches.intake.compose_rewards(self.config.reward, members),
        )

    def applied(self, report: UpdateReport, units: Sequence[Unit]) -> None:
        """After a change of the weights: count it, keep the batch for replay, and publish if due."""
        self.unpublished += 1
        self.batches.intake.curriculum.entropy = report.metrics.get("learner/entropy_nats")
        self.totals.add(report, sum(len(unit.trajectories) for unit in units))
        if self.replay is not None and not report.nonfinite:
            remember(self.replay, units, step=self.step - 1)
        if self.unpublished >= self.config.publish_every:
            self.next_version()

    def next_version(self) -> None:
        """Publish the current weights under the next version number."""
        self.version += 1
        self.publish()

    def publish(self) -> None:
        """Copy the current weights as the newest version, which is announced behind the next step."""
        self.publisher.publish(
            self.version,
            self.engine.weights(),
            announce=self.batches.announce,
            line=self.batches.intake.line.forks,
        )
        self.unpublished = 0
        self.totals.publish_seconds += self.publisher.stood_s
        if self.batches.awaits_versions:
            self.settle()

    def take_over(self, *, always: bool) -> None:
        """Publish the present weights under a version above all that an earlier learner published.

        The line of versions records that the new version continues the version of the checkpoint. That holds
        even if the weights are some unpublished updates ahead of it.

        Args:
            always: whether to publish also where no higher number is needed.
        """
        published, continued = self.publisher.published, self.version
        before = max(self.batches.version_before, published.version)
        # If a learner died before its first checkpoint, the published line is longer than that of our checkpoint.
        if published.line:
            self.batches.intake.line = VersionLine(published.line)
        if before > continued or self.unpublished:
            self.version = max(before, continued) + 1
            self.batches.intake.line.fork(continued, self.version)
        elif not always:
            return
        self.publish()
        self.settle()

    def settle(self) -> None:
        """Wait until the newest version is announced; the learner stands meanwhile."""
        started = time.perf_counter()
        self.publisher.settle()
        waited = time.perf_counter() - started
        self.publisher.stood_s += waited
        self.totals.publish_seconds += waited

    def skipped(self, trajectories: Sequence[Trajectory]) -> None:
        """Count a step whose loss or gradient was not finite, and save its trajectories for inspection.

        The engine skipped that optimizer step and the rest of the batch.

        Raises:
            Diverged: too many consecutive steps were skipped.
        """
        self.totals.skipped_steps += 1
        self.skipped_in_a_row += 1
        path = save_trajectories(self.run_dir / "nonfinite", self.step, trajectories)
        log.error("step %d skipped, loss or gradient not finite; its trajectories are in %s", self.step, path)
        if self.skipped_in_a_row >= self.config.max_nonfinite_steps:
            raise Diverged(
                f"{self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite; their "
                f"trajectories are in {path.parent}. Lower learner.optimizer.lr, or look for a reward or "
                "log-probability out of range there"
            )

    def record(
        self, report: UpdateReport, trained: Sequence[Trajectory], updated: int, waited: float, wall: float
    ) -> None:
        """Report a step to TensorBoard and metrics.jsonl.

        Args:
            report: what the update did.
            trained: trajectories of the batch.
            updated: policy version that the step updated.
            waited: seconds spent waiting for the batch.
            wall: seconds of the whole step.
        """
        intake = self.batches.intake
        self.totals.wait_seconds += waited
        busy_s = self.totals.step_seconds + wall - self.totals.wait_seconds
        # Invariant: the link's thread reads this, so it is replaced as a whole.
        self.pace = (
            ("trained_tokens_total", float(self.totals.trained_tokens)),
            ("busy_seconds_total", busy_s),
            ("idle_seconds_total", self.totals.wait_seconds),
        )
        self.totals.update_seconds += report.metrics["learner/step_seconds"]
        arrived = intake.take_recent()
        scalars = {
            **report.metrics,
            **rollout_metrics(arrived, trained),
            **mode_metrics(self.config.reward, arrived),
            **self.replay_metrics(trained, updated),
            **self.family_metrics(trained, updated),
            **intake.curriculum.selection_metrics(),
            "rollout/failed_trajectories": float(intake.counts.total("failed", "rejected", "broken")),
            "rollout/uniform_trajectories": float(intake.counts.total("uniform")),
            "rollout/stale_trajectories": float(intake.counts.total("stale", "dropped_stale")),
            "rollout/recommitted_trajectories": float(intake.counts.total(RECOMMITTED)),
            "learner/wait_seconds": waited,
            "learner/publish_seconds": self.publisher.stood_s,
            "learner/idle_share": waited / wall,
            "learner/trained_tokens_per_second": report.metrics["learner/trained_tokens"] / wall,
            "learner/tokens_trained_total": float(self.totals.trained_tokens),
            "learner/tokens_replayed_total": float(self.totals.replayed_tokens),
            "learner/policy_version": float(self.version),
            "learner/skipped_steps": float(self.totals.skipped_steps),
        }
        perhaps = {
            "learner/announce_seconds": self.publisher.announced_s,
            "learner/gpu_wait_seconds": self.gpu.waited_s,
            "learner/under_way_wanted": intake.curriculum.wanted_trajectories,
        }
        scalars |= {name: seconds for name, seconds in perhaps.items() if seconds is not None}
        self.report.write(self.step, scalars, step_histograms(report, arrived), passed_on=intake.gauges)
        self.report.write_failures(self.step, intake.signal.failures)
        self.note_unknown_weights(arrived)
        self.note_missing_routes(report)
        self.note_idle_parts(scalars)
        if self.samples is not None:
            own = [i for i, t in enumerate(trained) if t.origin not in FOREIGN]
            advantages = None if report.advantages is None else report.advantages[own]
            self.samples.step(self.step, updated, [trained[i] for i in own], arrived, advantages)
        untrained = intake.counts.take_newest()
        if self.annotations is not None and report.tokens is not None:
            self.annotations.step(
                self.step, updated, trained, report.tokens, applied=report.applied, untrained=untrained
            )

    def write_first_group(self) -> None:
        """Write samples of the first group that ends before the first step, whatever its returns are."""
        if self.samples is None or self.step or self.first_group_written:
            return
        self.first_group_written = self.samples.first_group(self.version, self.batches.intake.recent)

    def report_untrained(self) -> None:
        """Report the trajectories of a run in which there is nothing to learn, because no step reports them."""
        arrived = self.batches.intake.take_recent()
        self.report.write(self.step, rollout_metrics(arrived, []))
        if self.samples is not None:
            self.samples.untrained(self.step, self.version, arrived)
        self.report.write_failures(self.step, self.batches.intake.signal.failures)

    def note_unknown_weights(self, arrived: Sequence[Trajectory]) -> None:
        """Tell after the first step which named rewards and marks have not occurred, perhaps misspelt."""
        if self.names_checked or not any(t.rewards for t in arrived):
            return
        self.names_checked = True
        for text in never_given(self.config, arrived):
            log.warning("%s", text)
            self.report.note(self.step, text)

    def note_idle_parts(self, scalars: Mapping[str, float]) -> None:
        """Warn once the part that the method is named for has done nothing for many steps."""
        if self.idle_parts is None:
            self.idle_parts = IdleParts(named_parts(self.config))
        for text in self.idle_parts.look(scalars):
            log.warning("%s", text)
            self.report.note(self.step, text)

    def note_missing_routes(self, report: UpdateReport) -> None:
        """Warn after the first step if most tokens have no experts of their generators, which are to be replayed."""
        if self.routes_checked or "learner/routes_known_share" not in report.metrics:
            return
        self.routes_checked = True
        if text := missing_routes(report.metrics):
            log.warning("%s", text)
            self.report.note(self.step, text)

    def replay_metrics(self, trained: Sequence[Trajectory], updated: int) -> dict[str, float]:
        """Return metrics of the replay table and of the replayed part of the batch; empty without a table."""
        if self.replay is None:
            return {}
        return self.replay.metrics() | batch_metrics(trained, version=updated)

    def family_metrics(self, trained: Sequence[Trajectory], updated: int) -> dict[str, float]:
        """Return metrics of the families, and of their tokens that are too old; empty without families."""
        families = self.batches.intake.families
        if families is None:
            return {}
        return families.metrics(trained, version=updated, max_policy_lag=self.config.lag_bound)


def step_histograms(report: UpdateReport, arrived: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Return the histograms of a step, by name.

    Args:
        arrived: trajectories that came since the last step.
    """
    histograms = {
        **report.histograms,
        "length_generated_tokens": np.array([t.action_tokens for t in arrived]),
        **return_histograms(arrived),
    }
    if report.advantages is not None:
        histograms["advantage_trained"] = report.advantages
    return histograms


def save_trajectories(folder: Path, step: int, trajectories: Sequence[Trajectory]) -> Path:
    """Write the trajectories of a step whose loss or gradient was not finite.

    The arrays go to ``step-N.npz`` and the rest to ``step-N.json``.

    Returns:
        Path of the npz file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for i, t in enumerate(trajectories):
        routes = (ROUTED_TOKEN, ROUTED_EXPERTS) if len(t.routed_token) else ()
        for name in (*TOKEN_ARRAYS, *routes):
            arrays[f"{i}.{name}"] = getattr(t, name)
    path = folder / f"step-{step:06d}.npz"
    np.savez_compressed(path, **arrays)
    headers = [
        {"trajectory_id": t.trajectory_id, "group_id": t.group_id, "status": t.status, "return": t.return_}
        for t in trajectories
    ]
    path.with_suffix(".json").write_text(json.dumps(headers, indent=1), encoding="utf-8")
    return path
