"""`offbeat retrain RUN`: trains a learner again on the steps that the run's journal has recorded."""

import filecmp
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from broker.core.records import AnyEvent, Committed, LearnerJoined, Published, TasksPut, decode_event
from broker.errors import JournalError
from broker.journal.files import numbers, read_place
from broker.journal.opening import records
from broker.journal.writer import Kind, Loss, Place, file_name, unpack_segment
from launch import logs, run_folder
from launch.errors import ConfigError, RecordingError
from launch.processes import role_environment
from launch.run_file.sections import RunConfig
from launch.run_folder import BY_HAND
from learner.recorded_steps import RecordedStep, RecordedUnit
from protocol import names
from protocol.codec import decode_segment
from protocol.messages.episodes import Deliver, Segment, Task
from protocol.messages.peers import Hello
from protocol.names import SegmentKey

if TYPE_CHECKING:
    from launch.commands.tokens import TrainedTokens

Forks = tuple[tuple[int, int], ...]


@dataclass
class RecordedBatch:
    """The units that one step committed."""

    version: int = -1
    """Policy version that the step updated."""
    trained: dict[str, None] = field(default_factory=dict)
    dropped: dict[str, None] = field(default_factory=dict)
    beside: dict[str, None] = field(default_factory=dict)
    """Those of ``dropped`` whose family was trained by the same commit: first groups, and judgements of others."""


@dataclass
class LearnerProcess:
    """A learner process. When it joined, the steps after its checkpoint were undone."""

    began: int
    """Step of its checkpoint."""
    forks: Forks = ()
    """Forks of its line of versions. They do not change while the process lives."""


@dataclass
class Recording:
    """The steps of a run that were not undone, and the places of the segments that they were trained on."""

    folder: Path
    unit: str = "group"
    """Kind of unit that the broker delivered, see `protocol.messages.peers.Hello.deliver`."""
    batches: dict[int, RecordedBatch] = field(default_factory=dict)
    """Batches by step."""
    places: dict[SegmentKey, Place] = field(default_factory=dict)
    """Places of the training segments, in the order in which they arrived."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Number of segments of each trajectory."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """Trajectories of each group, in the order in which they ended."""
    ended: set[str] = field(default_factory=set)
    """Trajectories that have ended."""
    process: tuple[int, int] | None = None
    """Epoch and incarnation of the newest learner process."""
    asked: dict[str, Place] = field(default_factory=dict)
    """Places of the events that put tasks with a note, a prefix or a teacher, by task."""
    processes: list[LearnerProcess] = field(default_factory=list)
    """Learner processes whose steps were not all undone, oldest first."""

    def add_event(self, event: AnyEvent) -> None:
        """Add an event of the journal."""
        match event:
            case LearnerJoined(hello=hello):
                self._joined(hello)
            case Published(line=line):
                if self.processes:
                    self.processes[-1].forks = tuple(line)
            case Committed():
                self._committed(event)

    def add_segment(self, segment: Segment, place: Place) -> None:
        """Add a segment of the journal, unless it is not for training."""
        if segment.purpose != "train":
            return
        name = segment.trajectory_id
        self.places[(name, segment.index)] = place
        self.lengths[name] = segment.index + 1
        if segment.status != "unfinished":
            self.members.setdefault(segment.group_id, []).append(name)
            self.ended.add(name)

    def add_tasks(self, tasks: Sequence[Task], place: Place) -> None:
        """Add where tasks with a note, a prefix or a teacher are. The tasks themselves may be too large to keep."""
        for task in tasks:
            if task.note or task.start is not None or task.policy:
                self.asked.setdefault(task.task_id, place)

    def _joined(self, hello: Hello) -> None:
        """Add a learner process, unless it only joined again, and undo the steps after its checkpoint."""
        self.unit = hello.deliver
        if self.process == (hello.epoch, hello.incarnation):
            return
        self.process = hello.epoch, hello.incarnation
        self.batches = {step: batch for step, batch in self.batches.items() if step <= hello.step}
        stand = [process for process in self.processes if process.began < hello.step]
        self.processes = [*stand, LearnerProcess(hello.step)]

    def _committed(self, event: Committed) -> None:
        """Add a commit. A process may repeat a commit that was lost, its own or an earlier process's."""
        batch = self.batches.setdefault(event.step, RecordedBatch())
        batch.version = max(batch.version, event.version)
        batch.trained |= dict.fromkeys(event.trained)
        batch.dropped |= dict.fromkeys(event.dropped)
        families = set(map(names.family_of, event.trained))
        batch.beside |= dict.fromkeys(unit for unit in event.dropped if names.family_of(unit) in families)

    @property
    def last(self) -> int:
        """Last step that was trained; 0 if there is none."""
        return max((step for step, batch in self.batches.items() if batch.trained), default=0)

    def steps(self, last: int) -> Iterator[RecordedStep]:
        """Yield steps 1 to ``last`` with all units that were delivered for them.

        Raises:
            RecordingError: the journal does not hold all of them.
        """
        for step in range(1, last + 1):
            batch = self.batches.get(step)
            if batch is None or not batch.trained:
                raise RecordingError(f"step {step} is not in the journal {self.folder}")
            if batch.version < 0:
                raise RecordingError(
                    f"the journal {self.folder} does not say which version step {step} updated: it is of an earlier "
                    "offbeat, and can be exported, not replayed"
                )
            units = list(batch.trained)
            # Windows that were dropped are the context of later windows, which were trained.
            if self.unit == "segment":
                units += [unit for unit in batch.dropped if unit not in batch.trained and self._pieces(unit)]
            # Groups of a family that were not trained: later groups are compared with the first, and judgements
            # value the answers.
            units += [unit for unit in batch.beside if unit not in units and self._pieces(unit)]
            keys = {unit: self._pieces(unit) for unit in units}
            if missing := [unit for unit in units if not keys[unit]]:
                raise RecordingError(f"unit {missing[0]} of step {step} is not in the journal {self.folder}")
            came = sorted(units, key=lambda unit, keys=keys: self.places[keys[unit][0]][:2])  # type: ignore[misc]
            yield RecordedStep(
                step=step,
                version=batch.version,
                units=[self._unit(unit, keys[unit]) for unit in came],
                trained=list(batch.trained),
                forks=self._forks(step),
                tasks=self._tasks(keys),
            )

    def _forks(self, step: int) -> Forks:
        """Return the forks of the process that did this step, even if a later process committed it."""
        return next((p.forks for p in reversed(self.processes) if p.began < step), ())

    def _pieces(self, unit_id: str) -> list[SegmentKey]:
        """Return the segments of a unit that are in the journal."""
        window = names.window(unit_id)
        if window is not None:
            return [window] if window in self.places else []
        members = self.members.get(unit_id, [unit_id])
        return [(t, i) for t in members for i in range(self.lengths.get(t, 0)) if (t, i) in self.places]

    def _unit(self, unit_id: str, keys: list[SegmentKey]) -> RecordedUnit:
        name, index = keys[-1]
        complete = name in self.ended and index + 1 == self.lengths[name]
        frames = [frame for key in keys for frame in self._read(self.places[key])]
        return RecordedUnit(Deliver(unit_id=unit_id, segments=len(keys), complete=complete), frames)

    def _tasks(self, units: Mapping[str, Sequence[SegmentKey]]) -> list[Task]:
        """Return the tasks of these units that have a note, a prefix or a teacher."""
        wanted = {names.task_of(name) for keys in units.values() for name, _ in keys} & self.asked.keys()
        found: list[Task] = []
        for place in sorted({self.asked[task_id] for task_id in wanted}):
            event = decode_event(read_place(self.folder, place))
            if isinstance(event, TasksPut):
                found += [task for task in event.tasks if task.task_id in wanted]
        return found

    def _read(self, place: Place) -> tuple[bytes, bytes]:
        with open(self.folder / file_name(place.file), "rb") as file:
            file.seek(place.offset)
            return unpack_segment(file.read(place.nbytes))


def read_recording(folder: Path) -> Recording:
    """Read from a run's journal all that the run was trained on.

    Raises:
        RecordingError: there is no journal, it is damaged, or a part of it was deleted.
    """
    recording = Recording(folder)
    files = numbers(folder)
    if gone := sorted(set(range(1, max(files, default=0) + 1)) - set(files)):
        raise RecordingError(
            f"{folder}: {len(gone)} of {files[-1]} files are gone, {file_name(gone[0])} is the first, and with them "
            "what the first steps were trained on. The broker deletes files that it no longer needs once all are "
            "larger than broker.journal.keep_bytes: raise that before a run that is to be trained again"
        )
    try:
        for record in records(folder):
            match record:
                case Loss(torn=False):
                    raise RecordingError(f"{folder} is damaged, and cannot be replayed: {record}")
                case Loss():
                    pass
                case (Kind.EVENT, payload, place):
                    event = decode_event(payload)
                    recording.add_event(event)
                    if isinstance(event, TasksPut):
                        recording.add_tasks(event.tasks, place)
                case (Kind.SEGMENT, payload, place):
                    recording.add_segment(decode_segment(unpack_segment(payload)[0]), place)
    except JournalError as error:
        raise RecordingError(str(error)) from None
    return recording


DEFAULT_OUT = "retrained"


def retrain(run: Path, *, steps: int | None, out: Path | None, tokens: Path | None = None) -> None:
    """Train again the first ``steps`` steps of a run, or all of them, and write the model to ``out``.

    Args:
        tokens: file that gets the numbers of each trained token, see `launch.commands.tokens`; None: none is written.

    Raises:
        ConfigError: there is no such run, ``out`` is not empty, or the steps cannot be trained again.
        RecordingError: the journal does not hold what was trained.
        LaunchError: the file of tokens cannot be written.
    """
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps}: train at least one step again, or leave it out for all")
    config = configuration(run)
    out = out or run / DEFAULT_OUT
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} holds something already; name another folder with --out")
    env = role_environment(config.learner.threads_used, local_model=config.local_models)
    # Libraries read these variables when they are loaded, so this comes first.
    os.environ.update(env)
    logs.configure("retrain")
    recorded = read_recording(run / run_folder.JOURNAL)
    last = recorded.last if steps is None else min(steps, recorded.last)
    if not last:
        raise ConfigError(f"{run}: its journal holds no trained step; there is nothing to train again")
    if tokens is None:
        train(config, recorded.steps(last), out)
    else:
        from launch.commands.tokens import TrainedTokens, run_words, token_file

        with token_file(tokens) as writer:
            train(config, recorded.steps(last), out, TrainedTokens(writer, run_words(run)))
        sys.stdout.write(f"{tokens}: {writer.rows} tokens\n")
    sys.stdout.write(f"trained {last} of {recorded.last} steps again, the model is in {out}\n")
    if last == recorded.last and (run / "model").is_dir():
        same = (
            "equal to those of the run, bit for bit"
            if same_weights(run / "model", out)
            else "other than the run's"
        )
        sys.stdout.write(f"its weights are {same}\n")


def train(
    config: RunConfig,
    steps: Iterable[RecordedStep],
    out: Path,
    tokens: "TrainedTokens | None" = None,
) -> None:
    """Run the learner on recorded steps and write the model to ``out``.

    Args:
        tokens: gets what the learner made of each token; None: nobody wants it.

    Raises:
        ConfigError: the steps cannot be trained again.
    """
    from launch.conversations import given_of
    from launch.model import prepare, with_teacher
    from learner.errors import CannotRetrain, FormulaError
    from learner.retrain import retrain as train_recorded

    settings = with_teacher(config).model_copy(update={"max_policy_lag": config.max_policy_lag})
    model = prepare(config)
    try:
        train_recorded(
            settings,
            model=str(model),
            seed=config.run.seed,
            steps=steps,
            out=out,
            segment_tokens=config.actor.segment_tokens,
            tokens=tokens,
            given=lambda: given_of(config, model),
        )
    except (CannotRetrain, FormulaError) as error:
        raise ConfigError(str(error)) from None


def configuration(run: Path) -> RunConfig:
    """Return the configuration with which a run was started.

    Raises:
        ConfigError: the folder is no run folder.
    """
    for name in (run_folder.CONFIG, BY_HAND):
        if (run / name).exists():
            config = run_folder.load_config(run / name)
            # A run of an earlier version had no shared rows. Its weights come out bit for bit without them only.
            shared = config.learner.share_prefixes and "share_prefixes" in config.learner.model_fields_set
            # The GPUs of the run need not be those of this host.
            own = {"share_prefixes": shared, "devices": ()}
            return config.model_copy(update={"learner": config.learner.model_copy(update=own)})
    raise ConfigError(f"{run} is no run folder: it has no {run_folder.CONFIG}")


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two model folders hold the same tensor files, byte for byte."""
    names = sorted(path.name for path in one.glob("*.safetensors"))
    if names != sorted(path.name for path in other.glob("*.safetensors")):
        return False
    return bool(names) and not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])
