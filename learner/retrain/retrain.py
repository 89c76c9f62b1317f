"""Training again from what was recorded: the same units in the same steps, through the same code; nobody is told."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from learner.config import LearnerConfig
from learner.errors import CannotRetrain
from learner.intake.curriculum import Curriculum
from learner.intake.exchange import Exchange
from learner.intake.intake import Intake
from learner.loop import Learner
from learner.metrics import Report
from learner.publisher import Publisher
from learner.replay.table import replay_table
from learner.retrain.recorded import RecordedStep
from learner.run_files import PublishedVersion
from learner.units import Unit
from learner.update.engine import TrainingEngine
from protocol.link import ThreadLink
from protocol.messages import PublishWeights
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)


def rerun(config: LearnerConfig, *, model: str, seed: int, steps: Iterable[RecordedStep], out: Path) -> int:
    """Train a model on recorded steps; returns how many they were.

    On one process and fp32 the outcome depends on nothing but the arguments. ``out`` gets the model as a Hugging
    Face folder, and metrics as in a run folder.

    Raises:
        CannotRetrain: a step is missing, or a unit of its batch cannot be trained.
    """
    settings = config.model_copy(update={"processes": 1, "checkpoint_every": 0, "evaluation_every": 0})
    out.mkdir(parents=True, exist_ok=True)
    engine = TrainingEngine(settings, model=model, total_steps=config.steps, seed=seed)
    report = Report(out)
    learner = Learner(
        settings,
        out,
        engine,
        Recording(settings),
        Unpublished(),
        report,
        replay=replay_table(settings),
        seed=seed,
    )
    try:
        for recorded in steps:
            again(learner, recorded)
        engine.save_pretrained(out)
    finally:
        report.close()
        engine.close()
    return learner.step


def again(learner: Learner, recorded: RecordedStep) -> None:
    """One step."""
    if recorded.step != learner.step + 1:
        raise CannotRetrain(
            f"step {learner.step + 1} is not recorded, the next one that is is {recorded.step}"
        )
    assert isinstance(learner.exchange, Recording)
    learner.exchange.inlet.line = VersionLine(recorded.forks)
    learner.exchange.load(recorded)
    learner.version = recorded.version
    learner.learn()
    log.info("step %d: %d units", recorded.step, len(recorded.trained))


class AllOurs(Curriculum):
    """Every task that was recorded had been dealt out."""

    def owns(self, group_id: str) -> bool:
        return True

    def awaits(self, group_id: str, task_id: str) -> bool:
        return True


class Nobody(ThreadLink):
    """A link to no broker."""

    def __init__(self) -> None:
        pass

    def send(self, message: object, body: bytes | None = None, *, join: int | None = None) -> None:
        """Goes nowhere."""


class Recording(Exchange):
    """Gives the batches that were recorded, and tells nobody."""

    def __init__(self, config: LearnerConfig) -> None:
        super().__init__(Nobody(), AllOurs("", config), config, lockstep=False, stop_reason=lambda: "")
        # what was filtered out is not in the recording
        self.inlet = Intake(self.curriculum, filter_uniform=False, windows=config.train_on == "windows")
        self._batch: Sequence[str] = ()
        self._step = 0

    def load(self, recorded: RecordedStep) -> None:
        """Take in what was delivered for a step."""
        self._batch, self._step = recorded.trained, recorded.step
        for unit in recorded.units:
            self.inlet.received(unit.deliver, unit.frames)

    def collect(self, *, step: int, version: int) -> list[Unit]:
        ready = {group.unit_id: group for group in self.inlet.ready}
        if missing := [unit_id for unit_id in self._batch if unit_id not in ready]:
            raise CannotRetrain(
                f"step {self._step}: {len(missing)} of the {len(self._batch)} units that were trained cannot be, "
                f"{missing[0]!r} is the first; with another version of the program, or other settings?"
            )
        batch = [ready.pop(unit_id) for unit_id in self._batch]
        self.inlet.let_go(list(ready.values()), "not_trained")
        for group in batch:
            self.inlet.ready.remove(group)
        return batch

    def refill(self, *, step: int, version: int) -> None:
        """No more than what was recorded."""

    def announce(self, message: PublishWeights) -> None:
        """Nobody is there to serve it."""


class Unpublished(Publisher):
    """Counts versions and writes none."""

    def __init__(self) -> None:
        self.seconds, self.published = 0.0, PublishedVersion()

    def publish(
        self, version: int, shapes: object, tensors: object, *, line: Sequence[tuple[int, int]] = ()
    ) -> PublishWeights:
        return PublishWeights(epoch=0, version=version, manifest="-", line=list(line))
