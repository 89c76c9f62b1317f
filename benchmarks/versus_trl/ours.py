"""Our side of `benchmarks.versus_trl`, run as a process.

Usage: `python -m benchmarks.versus_trl.ours SPEC.json OUT.json`.
"""

import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.real_system import SampledCurriculum, System, running
from benchmarks.versus_trl.runs import Run, Spec
from launch.run_file.load import check
from launch.run_file.sections import RunConfig
from learner.errors import Stopped
from learner.intake.session import BrokerSession
from learner.metrics import Report
from learner.process import join
from learner.publisher import Publisher
from learner.run import TrainingRun
from learner.run_files import next_epoch
from learner.trainer import Trainer
from learner.update.engine import TrainingEngine
from protocol.session import Progress


class TimedTrainer(Trainer):
    """A trainer that notes when each step ended and when each trajectory's reward was known."""

    began: float | None = None

    def begin(self) -> None:
        """Start the clock."""
        self.began = time.monotonic()
        self.ends: list[tuple[float, int]] = []
        self.rewards: list[tuple[float, float]] = []
        self.before = self.totals.wait_seconds, self.totals.update_seconds, self.totals.publish_seconds
        self.batches.intake.take_recent()

    @property
    def clock(self) -> float:
        assert self.began is not None
        return time.monotonic() - self.began

    def record(self, report: Any, *args: Any) -> None:
        """Note the step for the comparison, then record it as every trainer does.

        A trajectory's reward gets the time at which its step ends, as on TRL's side.
        """
        now = self.clock
        self.ends.append((now, int(report.metrics["learner/trained_tokens"])))
        arrived = [t for t in self.batches.intake.recent if t.status != "failed"]
        self.rewards += [(now, t.return_) for t in arrived]
        super().record(report, *args)


def train(system: System, config: RunConfig, spec: Spec, started: float) -> Run:
    """Run one learner from the first weights to the last step, or until its time is up."""
    settings = config.learner.model_copy(
        update={"max_policy_lag": config.max_policy_lag, "steps": spec.steps, "threads": spec.threads}
    )
    engine = TrainingEngine(settings, model=system.model, total_steps=spec.steps, seed=config.run.seed)
    epoch = next_epoch(system.folder)
    link = join(settings, system.config.broker.endpoint, system.folder.name, epoch=epoch, progress=Progress)
    report = Report(system.folder)
    publisher = Publisher(system.folder.name, system.folder, epoch=epoch, keep=settings.keep_versions)
    deadline = float("inf")
    try:
        session = BrokerSession(
            link,
            SampledCurriculum(config.env.name, settings, epoch, next_index=config.run.seed * 1_000_000),
            settings,
            lockstep=config.run.mode == "sync",
            stop_reason=lambda: system.stop_reason(deadline),
        )
        trainer = TimedTrainer(
            settings, system.folder, engine, session, publisher, report, seed=config.run.seed
        )
        run = TrainingRun(trainer, session)
        trainer.take_over(always=True)
        run.evaluate("before")
        startup = time.monotonic() - started
        trainer.begin()
        deadline = time.monotonic() + spec.seconds
        try:
            while trainer.step < spec.steps and not spec.over(trainer.rewards):
                run.learn()
        except Stopped:
            pass
    finally:
        link.close("done")
        report.close()
        publisher.close()
        engine.release()
    return outcome(trainer, run.evaluations.records, startup)


def outcome(trainer: TimedTrainer, evaluations: list[dict[str, Any]], startup: float) -> Run:
    """Return the result of a run from the trainer's notes and metrics."""
    lines = (trainer.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    reported = [line for line in map(json.loads, lines) if "learner/step_seconds" in line]

    def mean(name: str) -> float:
        values = [line[name] for line in reported if name in line]
        return float(sum(values) / max(1, len(values)))

    steps = max(1, len(trainer.ends))
    totals = trainer.totals
    now = totals.wait_seconds, totals.update_seconds, totals.publish_seconds
    waited, updated, published = ((b - a) / steps for a, b in zip(trainer.before, now, strict=True))
    lags = {int(lag): count for lag, count in totals.lag_counts.items()}
    return Run(
        startup=startup,
        steps=trainer.ends,
        rewards=trainer.rewards,
        phases={
            "waiting for the batch": waited,
            "update": updated,
            "publishing": published,
            "generator paused": mean("generator/update_pause_seconds"),
        },
        notes={
            "lag_mean": sum(lag * n for lag, n in lags.items()) / max(1, sum(lags.values())),
            "lag_max": max(lags, default=0),
            "idle_learner": mean("learner/idle_share"),
            "idle_generator": mean("generator/idle_share"),
            "start": evaluations[0]["return_mean"] if evaluations else None,
        },
    )


def main() -> None:
    started = time.monotonic()
    logging.basicConfig(level=logging.WARNING)
    # Exit through Python on SIGTERM, so that the roles are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
    spec = Spec.read(Path(sys.argv[1]))
    config = check(spec.config, sys.argv[1])
    with running(config) as system:
        train(system, config, spec, started).write(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
