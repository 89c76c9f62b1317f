"""Audit of a campaign's journal: apply all of its records to one `BrokerState` that never dies.

In the campaign, each killed broker recovered its state from the newest snapshot of the journal. The audit
applies all files of the journal, from the first record on, to a single state. It compares that state with
each snapshot, and so finds what a broker lost or doubled when it died. Then it compares the learner's own
reports (metrics, log and newest checkpoint) with the commits in the journal.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from broker.config import BrokerConfig
from broker.core.records import AnyEvent, Committed, Counted, LearnerJoined, decode_event
from broker.core.state import BrokerState
from broker.core.units import process_of
from broker.errors import BrokerError
from broker.journal.files import numbers
from broker.journal.opening import records
from broker.journal.writer import Kind, Loss, Record, unpack_segment
from broker.output_commit import Snapshot
from learner.checkpoint_files import latest_name
from learner.run_files import CHECKPOINTS
from protocol import names
from protocol.codec import decode_segment
from protocol.names import SegmentKey

SAID = re.compile(r"step (\d+) trained (\S.*)")
SHOWN = 10


def by_metrics(tokens: dict[int, int], path: Path) -> list[str]:
    """Return the steps that trained more tokens than the journal committed: a commit is missing there.

    Fewer tokens are in order, because failed members of a group and tokens beyond the lag bound carry no
    gradient.
    """
    wrong = []
    for line in path.read_text().splitlines() if path.exists() else ():
        scalars = json.loads(line)
        if "learner/trained_tokens" not in scalars or scalars["step"] not in tokens:
            continue
        fresh = scalars["learner/trained_tokens"] - scalars.get("learner/replayed_tokens", 0.0)
        if fresh > tokens[scalars["step"]]:
            wrong.append(
                f"step {scalars['step']} trained {fresh:.0f} tokens, {tokens[scalars['step']]} were committed"
            )
    return wrong[:SHOWN]


def said_by_learner(log: Path) -> dict[str, list[int]]:
    """Return the steps at which the learner's log says each unit was trained, in the surviving line.

    When a step appears again, it and all later steps of the log so far are undone.
    """
    steps: dict[int, list[str]] = {}
    for match in SAID.finditer(log.read_text(errors="replace") if log.exists() else ""):
        step = int(match[1])
        steps = {at: units for at, units in steps.items() if at < step}
        steps[step] = match[2].split()
    found: dict[str, list[int]] = defaultdict(list)
    for step, units in steps.items():
        for unit in units:
            found[unit].append(step)
    return dict(found)


def by_log(journal: dict[str, int], log: Path) -> list[str]:
    """Return the units that the learner's log shows at two steps, or at a different step than the journal."""
    said = said_by_learner(log)
    wrong = [
        f"the learner's log has {unit} at steps {steps}" for unit, steps in said.items() if len(steps) > 1
    ]
    return (wrong + _compare_steps({unit: steps[0] for unit, steps in said.items()}, journal, "log"))[:SHOWN]


def by_checkpoint(journal: dict[str, int], folder: Path) -> list[str]:
    """Return the units that the newest checkpoint lacks, or has at a different step than the journal."""
    if not (folder / "latest").exists():
        return []
    state = msgspec.msgpack.decode((folder / latest_name(folder) / "offbeat-rank0.msgpack").read_bytes())
    client = state["client"]
    said = {unit: step for unit, step, was_trained, *_ in client["inlet"]["committed"] if was_trained}
    wrong = _compare_steps(said, journal, "checkpoint")
    first = min(said.values(), default=0)
    covered = [unit for unit, step in journal.items() if first < step <= client["step"]]
    wrong += [
        f"{unit}, of step {journal[unit]}, is not in the checkpoint" for unit in covered if unit not in said
    ]
    return wrong[:SHOWN]


def _compare_steps(said: dict[str, int], journal: dict[str, int], where: str) -> list[str]:
    return [
        f"the learner's {where} has {unit} at step {step}, the journal at {journal.get(unit, 'none')}"
        for unit, step in said.items()
        if journal.get(unit) != step
    ]


@dataclass
class Audit:
    """Findings of an audit. Each list has to be empty.

    The surviving line is the sequence of learner steps that leads to the newest state. Steps after a
    checkpoint are cut from it when a later learner starts again from that checkpoint.
    """

    segments: int = 0
    """Segments in the journal's files."""
    trained: dict[SegmentKey, int] = field(default_factory=dict)
    """Segments that the surviving line trained, and the step of each."""
    units: dict[str, int] = field(default_factory=dict)
    """Units that the surviving line trained, and the step of each."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Action tokens that the journal's commits give to each step of the surviving line."""
    trained_twice: list[str] = field(default_factory=list)
    """Segments trained at two steps of the surviving line, and tasks of which it trained two attempts."""
    segments_twice: set[SegmentKey] = field(default_factory=set)
    gone_with_a_learner: list[str] = field(default_factory=list)
    """Segments of undone steps that the broker no longer held."""
    differences: list[str] = field(default_factory=list)
    """Differences between the audit's state and a snapshot, which the campaign's broker wrote."""
    learner_differs: list[str] = field(default_factory=list)
    """Differences between the journal's commits and the learner's own reports."""
    snapshots: int = 0
    lineages: int = 0

    @property
    def wrong(self) -> list[str]:
        """Everything that is wrong, as text."""
        return [
            *(f"trained twice: {text}" for text in self.trained_twice),
            *(f"gone with a learner: {text}" for text in self.gone_with_a_learner),
            *self.differences,
            *self.learner_differs,
        ]


class _Index(Counted):
    """A store that knows which segments exist, without their bytes."""

    low = crowded = False

    def put(self, key: SegmentKey, header: bytes, body: bytes | memoryview) -> None:
        self.add(key, len(header) + len(body))

    def get(self, key: SegmentKey) -> tuple[bytes, bytes]:
        raise KeyError(key)

    def record_event(self, event: AnyEvent) -> None:
        pass

    def index(self) -> list[tuple[SegmentKey, bool]]:
        return sorted([(key, False) for key in self._held] + [(key, True) for key in self._committed])


class Replay:
    """A `BrokerState` to which all records so far were applied, and the findings so far."""

    def __init__(self, config: BrokerConfig) -> None:
        self.store = _Index()
        self.state = BrokerState(config, self.store, 1 << 30)
        self.audit = Audit()

    def take(self, record: Record) -> None:
        """Apply one record."""
        match record.kind:
            case Kind.SEGMENT:
                header, body = unpack_segment(record.payload)
                segment, nbytes = decode_segment(header), len(header) + len(body)
                self.store.add((segment.trajectory_id, segment.index), nbytes)
                self.state.apply_segment(segment, nbytes, 0.0)
                self.audit.segments += 1
            case Kind.EVENT:
                event = decode_event(record.payload)
                self._before(event)
                self.state.apply(event, 0.0)
            case Kind.SNAPSHOT:
                self._compare(msgspec.msgpack.decode(record.payload, type=Snapshot))
        self.state.outbox.take_queued()
        self.state.take_notices()

    def end(self) -> Audit:
        """Make the final checks, after all records were applied. Return all findings."""
        audit, ledger = self.audit, self.state.ledger
        attempts: dict[str, set[str]] = defaultdict(set)
        for trajectory, _ in audit.trained:
            attempts[names.task_of(trajectory)].add(trajectory)
        audit.trained_twice += [
            f"task {task}, as {sorted(several)}" for task, several in attempts.items() if len(several) > 1
        ]
        counted = ledger.outcomes["trained"].segments
        if counted != len(audit.trained) and audit.lineages < 2:
            audit.differences.append(
                f"the ledger says {counted} segments are trained, {len(audit.trained)} are"
            )
        if ledger.stored.segments != audit.segments:
            audit.differences.append(
                f"{audit.segments} segments are in the journal, {ledger.stored.segments} in the ledger"
            )
        if wrong := self.state.violation():
            audit.differences.append(f"the ledger does not close: {wrong}")
        return audit

    def _before(self, event: AnyEvent) -> None:
        """Update the line of steps for an event, before the event is applied to the state."""
        match event:
            case Committed(step=step, trained=trained):
                units = {unit.unit_id: unit for unit in self.state.deliveries.units()}
                for unit in (units[name] for name in trained if name in units):
                    self.audit.units[unit.unit_id] = step
                    for stored in unit.segments:
                        self._trained(stored.key, step, stored.action_tokens)
            case LearnerJoined(hello=hello):
                before = self.state.lineage
                if before is None or before.lineage != hello.lineage:
                    self.audit.lineages += 1
                    # A learner that goes back on purpose begins a new line at the step of its checkpoint.
                    self._cut(hello.step if hello.step_back else 0, kept=())
                elif process_of(before) != process_of(hello):
                    committed = [unit for unit in self.state.deliveries.saved() if unit.outcome is not None]
                    self._cut(hello.step, kept=(stored.key for unit in committed for stored in unit.segments))

    def _trained(self, key: SegmentKey, step: int, tokens: int) -> None:
        audit = self.audit
        if audit.trained.setdefault(key, step) != step:
            audit.segments_twice.add(key)
            audit.trained_twice.append(f"{key} at steps {audit.trained[key]} and {step}")
        audit.tokens[step] = audit.tokens.get(step, 0) + tokens

    def _cut(self, step: int, kept: Iterable[SegmentKey]) -> None:
        """Cut the line after ``step``. The broker must have kept the segments that were trained later."""
        audit, kept = self.audit, set(kept)
        undone = [key for key, at in audit.trained.items() if at > step]
        if audit.lineages == 1:
            audit.gone_with_a_learner += [str(key) for key in undone if key not in kept]
        for key in undone:
            del audit.trained[key]
        audit.units = {unit: at for unit, at in audit.units.items() if at <= step}
        audit.tokens = {at: tokens for at, tokens in audit.tokens.items() if at <= step}

    def _compare(self, saved: Snapshot) -> None:
        self.audit.snapshots += 1
        theirs, ours = _picture(saved), self._mine()
        self.audit.differences += [
            f"snapshot {self.audit.snapshots}, {part}: {_difference(theirs[part], ours[part])}"
            for part in theirs
            if theirs[part] != ours[part]
        ]

    def _mine(self) -> dict[str, Any]:
        state = self.state
        return _picture(
            Snapshot(
                segments=[(key, None, 0, aside) for key, aside in self.store.index()],  # type: ignore[misc]
                tasks=state.tasks.live(),
                over=state.tasks.over.items(),
                trajectories=list(state.assembly.trajectories.values()),
                groups=list(state.assembly.groups.values()),
                units=state.deliveries.saved(),
                unit_count=state.deliveries.count,
                mode=state.assembly.mode,
                ledger=state.ledger,
                lineage=state.lineage,
                published=state.published,
            )
        )


def _picture(saved: Snapshot) -> dict[str, Any]:
    """Return the comparable parts of a snapshot.

    They leave out file positions, clock times, and counts of refused messages, because no event records
    these.
    """
    ledger = saved.ledger
    return {
        "segments": sorted((key, aside) for key, _, _, aside in saved.segments),
        "tasks": sorted(
            (r.trajectory_id, r.losses, r.lease.lease_id if r.lease else "") for r in saved.tasks
        ),
        "tasks that are over": sorted(saved.over),
        "trajectories": sorted((t.trajectory_id, t.next_index, t.closed) for t in saved.trajectories),
        "groups": sorted((g.group_id, sorted(g.out), len(g.here), g.taken, g.lost) for g in saved.groups),
        "units": sorted(
            (u.unit_id, u.age, u.deliveries, u.epoch, u.step, u.outcome or "", [p.key for p in u.segments])
            for u in saved.units
        ),
        "ledger": {"stored": ledger.stored, "rolled back": ledger.rolled_back, **ledger.outcomes},
        "lineage": saved.lineage,
        "published": saved.published,
    }


def _difference(theirs: Any, ours: Any) -> str:
    if isinstance(theirs, list):
        theirs, ours = [x for x in theirs if x not in ours], [x for x in ours if x not in theirs]
    elif isinstance(theirs, dict):
        differing = [name for name in theirs if theirs[name] != ours.get(name)]
        theirs, ours = {n: theirs[n] for n in differing}, {n: ours.get(n) for n in differing}
    return f"the broker had {str(theirs)[:500]}, the journal gives {str(ours)[:500]}"


def audit(folder: Path) -> Audit:
    """Audit the journal of a run that has ended."""
    settings = json.loads((folder / "config.json").read_text())["broker"]
    replay = Replay(BrokerConfig.model_validate(settings))
    if numbers(folder / "journal", ".released"):
        replay.audit.differences.append(
            "files of the journal were deleted: keep_bytes is too small for a proof"
        )
        return replay.audit
    try:
        for record in records(folder / "journal"):
            if not isinstance(record, Loss):
                replay.take(record)
    except (BrokerError, AssertionError, KeyError, msgspec.MsgspecError) as error:
        replay.audit.differences.append(f"the journal cannot be applied from its beginning: {error!r}")
        return replay.audit
    found = replay.end()
    found.learner_differs = [
        *by_metrics(found.tokens, folder / "metrics.jsonl"),
        *by_log(found.units, folder / "logs" / "learner.log"),
        *by_checkpoint(found.units, folder / CHECKPOINTS),
    ]
    return found
