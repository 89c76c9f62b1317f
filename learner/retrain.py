"""Trains recorded steps again: the same units in the same steps, through the same code, without a broker."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from learner.curriculum import Curriculum
from learner.errors import CannotRetrain
from learner.families.notes import AnswerText
from learner.families.reactions import joined
from learner.given import Conversation, given_conversations, taught_answers
from learner.intake.intake import Intake
from learner.intake.waiting_families import decoder_of_judgements
from learner.metrics import Report
from learner.recorded_steps import RecordedStep
from learner.replay.table import replay_table
from learner.run_files import PublishedVersion
from learner.settings.learner import LearnerConfig
from learner.trainer import TokenSink, Trainer
from learner.trajectory import Unit
from learner.update.engine import TrainingEngine
from learner.weight_copy import OutgoingWeights
from protocol.messages.episodes import Task
from protocol.messages.peers import PublishWeights
from protocol.version_line import VersionLine

log = logging.getLogger(__name__)


class OwnsEveryTask(Curriculum):
    """A curriculum that owns every task, because every recorded task was dealt out by the recorded run."""

    def owns(self, group_id: str) -> bool:
        return True

    def awaits(self, group_id: str, task_id: str) -> bool:
        return True


class RecordedBatches:
    """`learner.trainer.Batches` that returns the recorded batches and sends nothing."""

    in_step = awaits_versions = False
    version_before = 0

    def __init__(self, config: LearnerConfig, decode: AnswerText | None = None) -> None:
        self._decode = decode
        curriculum = OwnsEveryTask("", config)
        # The recording does not contain units that the filter dropped, so the filter is off.
        self.intake = Intake(curriculum, filter_uniform=False, windows=config.train_on == "windows")
        self._batch: Sequence[str] = ()
        self._tasks: Sequence[Task] = ()
        self._step = 0

    def load(self, recorded: RecordedStep) -> None:
        """Receive the recorded deliveries of a step."""
        self._batch, self._tasks, self._step = recorded.trained, recorded.tasks, recorded.step
        for unit in recorded.units:
            self.intake.receive(unit.deliver, unit.frames)

    def collect(self, *, step: int, version: int) -> list[Unit]:
        """Return the recorded batch.

        Raises:
            CannotRetrain: a unit of the batch cannot be trained.
        """
        ready = {unit.unit_id: unit for unit in self.intake.ready}
        if missing := [unit_id for unit_id in self._batch if unit_id not in ready]:
            raise CannotRetrain(
                f"step {self._step}: {len(missing)} of the {len(self._batch)} units that were trained cannot be, "
                f"{missing[0]!r} is the first; with another version of the program, or other settings?"
            )
        batch = [ready.pop(unit_id) for unit_id in self._batch]
        others = list(ready.values())
        family = self.intake.curriculum.config.family
        units = batch
        if family is not None:
            units = joined(family, batch, others=others, tasks=self._tasks, decode=self._decode)
        # Judgements are committed with their family.
        held = {part.unit_id for unit in units for part in unit.parts}
        self.intake.drop_units([unit for unit in others if unit.unit_id not in held], "not_trained")
        self.intake.ready.clear()
        return units

    def commit(
        self, trained: Sequence[Unit], *, step: int, version: int = -1, replayed_tokens: int = 0
    ) -> None:
        """Count the units as trained; no commit is sent."""
        self.intake.commit(0, step, trained, replayed_tokens, version)

    def trained(self, *, update_s: float, step_s: float) -> None:
        """Note nothing, because no work is under way."""

    def refill(self, *, step: int, version: int) -> None:
        """Put no tasks, because there are no batches beyond the recorded ones."""

    def announce(self, message: PublishWeights) -> None:
        """Announce nothing, because there are no generators."""


class Unpublished:
    """`learner.trainer.Versions` that writes no versions."""

    def __init__(self) -> None:
        self.stood_s, self.announced, self.published = 0.0, 0, PublishedVersion()
        self.announced_s: float | None = None
        self.pinned: int | None = None

    def publish(
        self,
        version: int,
        weights: OutgoingWeights,
        *,
        announce: Callable[[PublishWeights], None],
        line: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Announce a version that nobody can fetch."""
        announce(PublishWeights(epoch=0, version=version, manifest="-", line=list(line)))
        self.announced = version

    def settle(self) -> None:
        """Return at once, because nothing is under way."""

    def check(self) -> None:
        """Return, because nothing can fail."""


def retrain(
    config: LearnerConfig,
    *,
    model: str,
    seed: int,
    steps: Iterable[RecordedStep],
    out: Path,
    segment_tokens: int | None = None,
    tokens: TokenSink | None = None,
    given: Callable[[], Sequence[Conversation]] = tuple,
) -> int:
    """Train a model on recorded steps and return their number.

    With dtype float32 the result depends on nothing but the arguments; one process trains, whatever
    ``config.ranks`` is.

    Args:
        config: settings of the recorded run.
        model: Hugging Face name or folder of the initial model.
        seed: seed of the recorded run.
        steps: recorded steps, from step 1 on, without gaps.
        out: folder for the trained model, as a Hugging Face folder, and for metrics, as in a run folder.
        segment_tokens: most tokens of a segment in the recorded run; see `TrainingEngine`.
        tokens: gets what the learner made of each token; None: nobody wants it.
        given: reads the conversations of ``config.conversations``.

    Raises:
        CannotRetrain: a step is missing, or a unit of its batch cannot be trained.
    """
    alone = {"processes": 1, "nodes": 1, "rendezvous": ""}
    settings = config.model_copy(update={**alone, "checkpoint_every": 0, "evaluation_every": 0})
    out.mkdir(parents=True, exist_ok=True)
    engine = TrainingEngine(
        settings, model=model, total_steps=config.steps, seed=seed, segment_tokens=segment_tokens
    )
    report = Report(out)
    batches = RecordedBatches(settings, decoder_of_judgements(settings, engine.model))
    batches.intake.route_layers = engine.route_layers
    trainer = Trainer(
        settings,
        out,
        engine,
        batches,
        Unpublished(),
        report,
        replay=replay_table(settings),
        given=given_conversations(settings, given, seed=seed),
        taught=taught_answers(settings, given),
        seed=seed,
        annotations=tokens,
    )
    try:
        for recorded in steps:
            train_again(trainer, batches, recorded)
        engine.save_pretrained(out)
    finally:
        report.close()
        engine.close()
    return trainer.step


def train_again(trainer: Trainer, batches: RecordedBatches, recorded: RecordedStep) -> None:
    """Train one recorded step again.

    Raises:
        CannotRetrain: it is not the next step, or a unit of its batch cannot be trained.
    """
    if recorded.step != trainer.step + 1:
        raise CannotRetrain(
            f"step {trainer.step + 1} is not recorded, the next one that is is {recorded.step}"
        )
    batches.intake.line = VersionLine(recorded.forks)
    batches.load(recorded)
    trainer.version = recorded.version
    trainer.learn()
    log.info("step %d: %d units", recorded.step, len(recorded.trained))
