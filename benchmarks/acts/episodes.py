"""Files of recorded episodes: some learner steps of a job, as its journal has them, with the learner's own numbers.

A file holds the deliveries of a few steps, and for each action token the log-probability under the weights that the
step updated, the entropy there, and the log-probability under the model that the run began with. So lags and ratios are
those of the run, and no model is needed to train on the episodes again.
"""

import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from launch.commands.retrain import configuration, read_recording
from launch.model import prepare
from launch.run_file.load import METHODS_FOLDER
from launch.run_file.sections import RunConfig
from launch.run_folder import JOURNAL
from learner.metrics import Report
from learner.recorded_steps import RecordedStep, RecordedUnit
from learner.retrain import RecordedBatches, Unpublished, train_again
from learner.trainer import Trainer
from learner.trajectory import Trajectory
from learner.update.batch import make_batch
from learner.update.critic import everything
from learner.update.engine import TrainingEngine
from learner.update.micro_batches import ON_CPU, make_micro_batches
from learner.update.policy import FrozenPolicy, load_policy
from learner.update.report import TokenRecorder, UpdateReport
from protocol.arrays import Float32s
from protocol.messages.episodes import Deliver

FOLDER = Path(__file__).parents[2] / "tests" / "fixtures" / "jobs"
"""Folder of the recorded jobs."""
MOST_UNITS = 16
"""Units of a step that are kept, in the order in which they were trained."""


class TokenNumbers(Struct, frozen=True):
    """Numbers of the action tokens of one trajectory, float32 [A] each."""

    logp: bytes
    """Log-probability under the weights that the step updated, in nats."""
    entropy: bytes
    """Entropy at the token under these weights, in nats."""
    reference: bytes
    """Log-probability under the model that the run began with."""

    def arrays(self) -> tuple[Float32s, Float32s, Float32s]:
        """Return the three arrays."""
        logp, entropy, reference = (
            np.frombuffer(b, "<f4") for b in (self.logp, self.entropy, self.reference)
        )
        return logp, entropy, reference


class KeptUnit(Struct, frozen=True):
    """A delivery of the broker."""

    unit_id: str
    segments: int
    complete: bool
    frames: list[bytes]


class KeptStep(Struct, frozen=True):
    """A learner step: the units of its batch, and the numbers of their tokens."""

    step: int
    version: int
    forks: list[tuple[int, int]]
    trained: list[str]
    units: list[KeptUnit]
    numbers: dict[str, TokenNumbers]
    """Numbers by trajectory."""

    def recorded(self) -> RecordedStep:
        """Return the step as `learner.retrain` takes it."""
        units = [
            RecordedUnit(Deliver(unit_id=u.unit_id, segments=u.segments, complete=u.complete), list(u.frames))
            for u in self.units
        ]
        return RecordedStep(
            step=self.step,
            version=self.version,
            units=units,
            trained=self.trained,
            forks=[(a, b) for a, b in self.forks],
        )


class RecordedJob(Struct, frozen=True):
    """Steps of a run of a job."""

    env: dict[str, Any]
    """Settings of the environment that decide what an episode is: name and parameters."""
    model: str
    """What the run began with: a model's name, or "tiny"."""
    group_size: int
    steps: list[KeptStep]

    @property
    def key(self) -> str:
        """What a recipe's job has to share with this one, see `key_of`."""
        return _key(self.env, self.model)


def key_of(config: RunConfig) -> str:
    """Return what says whether episodes of one job serve another: its environment, and the model's name."""
    return _key(_env(config), _model(config))


def _env(config: RunConfig) -> dict[str, Any]:
    return {"name": config.env.name, "params": dict(config.env.params)}


def _model(config: RunConfig) -> str:
    return config.model.path or "tiny"


def _key(env: dict[str, Any], model: str) -> str:
    return msgspec.json.encode([model, env], order="deterministic").decode()


def load_job(path: Path) -> RecordedJob:
    """Read a file of recorded episodes."""
    return msgspec.msgpack.decode(lzma.decompress(path.read_bytes()), type=RecordedJob)


def save_job(path: Path, job: RecordedJob) -> int:
    """Write a file of recorded episodes, and return its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(lzma.compress(msgspec.msgpack.encode(job), preset=9 | lzma.PRESET_EXTREME))


def all_jobs(folder: Path = FOLDER) -> dict[str, RecordedJob]:
    """Return the recorded jobs of a folder by their key."""
    of_recipes = {path.stem for path in METHODS_FOLDER.rglob("*.toml")}
    jobs = [load_job(path) for path in sorted(folder.glob("*.job")) if path.stem not in of_recipes]
    return {job.key: job for job in jobs}


def job_of(recipe: str, config: RunConfig, folder: Path = FOLDER) -> RecordedJob:
    """Return recorded episodes of a recipe's job: those of the recipe itself, or of a run with the same environment.

    Raises:
        LookupError: nobody has recorded them.
    """
    own = folder / f"{recipe}.job"
    if own.is_file() and (job := load_job(own)).key == key_of(config):
        return job
    if (found := all_jobs(folder).get(key_of(config))) is not None:
        return found
    raise LookupError(
        f"{recipe}: no recorded episodes of {key_of(config)}; run the recipe with learner.filter_uniform_groups=false "
        "and keep steps of it with `python -m benchmarks.acts record`"
    )


class ScoringEngine(TrainingEngine):
    """An engine that notes the numbers of the tokens of chosen steps before it trains on them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wanted: set[int] = set()
        self.noted: dict[int, dict[str, TokenNumbers]] = {}
        reference = load_policy(self.model, dtype=torch.float32, lora=self.config.lora)
        self._reference = FrozenPolicy(reference, self.deepspeed.device)

    def update(self, trajectories: Sequence[Trajectory], *, current_version: int) -> UpdateReport:
        if self.updates + 1 in self.wanted:
            self.noted[self.updates + 1] = self._numbers(trajectories, current_version)
        return super().update(trajectories, current_version=current_version)

    @torch.no_grad()
    def _numbers(self, trajectories: Sequence[Trajectory], version: int) -> dict[str, TokenNumbers]:
        batch = make_batch(
            trajectories, everything(trajectories), current_version=version, max_policy_lag=10**6
        )
        micro_batches = make_micro_batches(
            batch,
            np.arange(len(batch.lengths)),
            aggregation="token_mean",
            budget=self.config.micro_batch_tokens,
            rule=ON_CPU,
            rank=0,
            ranks=1,
            width=0,
        )
        recorders = [TokenRecorder(int(batch.seen_mask.sum()), 1) for _ in range(2)]
        references = self._reference.score(batch, micro_batches)
        for micro_batch, reference in zip(micro_batches, references, strict=True):
            outputs = self.updater.forward(micro_batch)
            recorders[0].record_rows(micro_batch, {"logp_current": outputs.logp, "entropy": outputs.entropy})
            recorders[1].record_rows(micro_batch, {"logp_current": reference})
        found = recorders[0].gathered("logp_current", "entropy")
        rows = (
            found["logp_current"],
            found["entropy"],
            recorders[1].gathered("logp_current")["logp_current"],
        )
        numbers, start = {}, 0
        for t in trajectories:
            end = start + int(t.learned_mask.sum())
            numbers[t.trajectory_id] = TokenNumbers(*(row[start:end].astype("<f4").tobytes() for row in rows))
            start = end
        return numbers


def record(run: Path, steps: Sequence[int], scratch: Path) -> RecordedJob:
    """Train a run's recorded steps again, and keep some of them.

    Args:
        run: run folder with a journal that holds all steps up to the last wanted one.
        steps: numbers of the steps to keep, counted from 1.
        scratch: empty folder for what the training writes.

    Raises:
        RecordingError: the journal does not hold these steps.
    """
    config = configuration(run)
    settings = config.learner.model_copy(
        update={
            "max_policy_lag": config.max_policy_lag,
            "checkpoint_every": 0,
            "evaluation_every": 0,
        }
    )
    recording = read_recording(run / JOURNAL)
    engine = ScoringEngine(
        settings, model=str(prepare(config)), total_steps=settings.steps, seed=config.run.seed
    )
    engine.wanted = set(steps)
    scratch.mkdir(parents=True, exist_ok=True)
    report = Report(scratch)
    batches = RecordedBatches(settings)
    trainer = Trainer(settings, scratch, engine, batches, Unpublished(), report, seed=config.run.seed)
    kept = []
    try:
        for recorded in recording.steps(max(steps)):
            train_again(trainer, batches, recorded)
            if recorded.step in engine.wanted:
                kept.append(_kept(recorded, engine.noted[recorded.step]))
    finally:
        report.close()
        engine.close()
    return RecordedJob(_env(config), _model(config), settings.group_size, kept)


def _kept(recorded: RecordedStep, numbers: dict[str, TokenNumbers]) -> KeptStep:
    trained = list(recorded.trained)[:MOST_UNITS]
    units = [unit for unit in recorded.units if unit.deliver.unit_id in trained]
    groups = tuple(trained)
    return KeptStep(
        step=recorded.step,
        version=recorded.version,
        forks=[(a, b) for a, b in recorded.forks],
        trained=trained,
        units=[
            KeptUnit(
                unit.deliver.unit_id,
                unit.deliver.segments,
                unit.deliver.complete,
                [bytes(f) for f in unit.frames],
            )
            for unit in units
        ],
        numbers={name: n for name, n in numbers.items() if name.startswith(groups)},
    )
