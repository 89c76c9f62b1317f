"""What a run was trained on, step by step, as its broker's journal has it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from broker.core.events import AnyEvent, Committed, LearnerJoined, Published, decode_event
from broker.errors import JournalError
from broker.journal.files import numbers, records
from broker.journal.records import Kind, Loss, Place, file_name, unpack_segment
from launch.errors import RecordingError
from learner.retrain.recorded import RecordedStep, RecordedUnit
from protocol import names
from protocol.codec import decode_segment
from protocol.messages import Deliver, Hello, Segment
from protocol.names import SegmentKey

Forks = tuple[tuple[int, int], ...]


@dataclass
class RecordedBatch:
    """What one step committed."""

    version: int = -1
    """Policy version that the step updated."""
    trained: dict[str, None] = field(default_factory=dict)
    dropped: dict[str, None] = field(default_factory=dict)


@dataclass
class Process:
    """A learner process: what came after its checkpoint was undone when it joined."""

    began: int
    """Step of its checkpoint."""
    forks: Forks = ()
    """Of its line of versions: the same as long as it lives."""


@dataclass
class Recording:
    """The steps that the run's checkpoints stand on, and where the segments are that they were trained on."""

    folder: Path
    unit: str = "group"
    """What was delivered as a whole."""
    batches: dict[int, RecordedBatch] = field(default_factory=dict)
    places: dict[SegmentKey, Place] = field(default_factory=dict)
    """In the order in which they came."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Segments of each trajectory."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """Trajectories of each group in the order in which they ended."""
    ended: set[str] = field(default_factory=set)
    process: tuple[int, int] | None = None
    processes: list[Process] = field(default_factory=list)
    """Those that steps which stand were done by, oldest first."""

    def happened(self, event: AnyEvent) -> None:
        match event:
            case LearnerJoined(hello=hello):
                self._joined(hello)
            case Published(line=line):
                if self.processes:
                    self.processes[-1].forks = tuple(line)
            case Committed():
                self._committed(event)

    def arrived(self, segment: Segment, place: Place) -> None:
        if segment.purpose != "train":
            return
        name = segment.trajectory_id
        self.places[(name, segment.index)] = place
        self.lengths[name] = segment.index + 1
        if segment.status != "unfinished":
            self.members.setdefault(segment.group_id, []).append(name)
            self.ended.add(name)

    def _joined(self, hello: Hello) -> None:
        """Another process: what came after its checkpoint was undone."""
        self.unit = hello.deliver
        if self.process == (hello.epoch, hello.incarnation):
            return
        self.process = hello.epoch, hello.incarnation
        self.batches = {step: batch for step, batch in self.batches.items() if step <= hello.step}
        stand = [process for process in self.processes if process.began < hello.step]
        self.processes = [*stand, Process(hello.step)]

    def _committed(self, event: Committed) -> None:
        """Also one that was lost and is said again, by its own process or by a later one."""
        batch = self.batches.setdefault(event.step, RecordedBatch())
        batch.version = max(batch.version, event.version)
        batch.trained |= dict.fromkeys(event.trained)
        batch.dropped |= dict.fromkeys(event.dropped)

    @property
    def last(self) -> int:
        """The last step that was trained."""
        return max((step for step, batch in self.batches.items() if batch.trained), default=0)

    def steps(self, last: int) -> Iterator[RecordedStep]:
        """Steps 1 to ``last`` with all that was delivered for them.

        Raises:
            RecordingError: something of it is not in the journal any more.
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
            if self.unit == "segment":  # what was dropped is context of what was trained
                units += [unit for unit in batch.dropped if unit not in batch.trained and self._pieces(unit)]
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
            )

    def _forks(self, step: int) -> Forks:
        """Known to the process that did this step, whoever committed it."""
        return next((p.forks for p in reversed(self.processes) if p.began < step), ())

    def _pieces(self, unit_id: str) -> list[SegmentKey]:
        """The segments of a unit."""
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

    def _read(self, place: Place) -> tuple[bytes, bytes]:
        with open(self.folder / file_name(place.file), "rb") as file:
            file.seek(place.offset)
            return unpack_segment(file.read(place.nbytes))


def read(folder: Path) -> Recording:
    """All that the journal of a run says of its training.

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
                case (Kind.EVENT, payload, _):
                    recording.happened(decode_event(payload))
                case (Kind.SEGMENT, payload, place):
                    recording.arrived(decode_segment(unpack_segment(payload)[0]), place)
    except JournalError as error:
        raise RecordingError(str(error)) from None
    return recording
