"""Takes the broker's messages into the intake: deliveries become units. Pure: messages in, units out."""

import logging
from collections.abc import Sequence

from learner.errors import BrokenTrajectory
from learner.families.family import FamilyStage
from learner.families.waiting import WaitingFamilies
from learner.intake.intake import SAMPLED, Intake
from learner.intake.trajectories import is_usable, placed, trajectories_of, valued
from learner.trajectory import Trajectory
from learner.units import RECOMMITTED, Unit
from protocol import names
from protocol.arrays import SegmentArrays
from protocol.codec import AnyMessage, decode_delivery
from protocol.errors import ProtocolError
from protocol.messages.episodes import Deliver, Dropped
from protocol.messages.peers import QueueStats

log = logging.getLogger(__name__)


def receive(intake: Intake, message: AnyMessage, rest: Sequence[bytes]) -> None:
    """Process one message from the broker."""
    match message:
        case Deliver(unit_id=unit_id) if unit_id in intake.commits:
            # Its commit is not sent yet, so there is nothing to repeat.
            log.debug("unit %s came again while it is here", unit_id)
        case Deliver():
            intake.deliveries += 1
            _delivered(intake, message, rest)
        case Dropped():
            intake.deliveries += 1
            # 0 trajectories: a window before the last. The gap shows when the next window comes.
            if message.trajectories:
                _will_not_come(intake, message.group_id, message.unit_id)
            intake.counts.note(f"dropped_{message.reason}", message.trajectories)
        case QueueStats():
            grown = message.gauges.get(SAMPLED, 0.0) - intake.gauges.get(SAMPLED, 0.0)
            # The gauge falls when a generator is restarted.
            intake.sampled_tokens += max(0, int(grown))
            intake.gauges = message.gauges


def _delivered(intake: Intake, deliver: Deliver, rest: Sequence[bytes]) -> None:
    try:
        segments = decode_delivery(deliver, rest)
    except ProtocolError as error:
        log.error("delivery refused unit=%s: %s", deliver.unit_id, error)
        segments = []
    intake.delivered_tokens += sum(segment.action_tokens for segment, _ in segments)
    if _is_committed(intake, deliver.unit_id, segments):
        _commit_again(intake, deliver, segments)
        return
    if intake.windows and segments and segments[0][0].purpose == "train":
        _window(intake, deliver, segments)
        return
    trajectories = trajectories_of(segments, intake.line, intake.counts, intake.route_layers)
    if not trajectories:
        group_id = _group_id(deliver, segments)
        if deliver.complete or deliver.unit_id == group_id:
            _will_not_come(intake, group_id, deliver.unit_id)
        intake.drop_delivery(deliver.unit_id, "unusable", [])
        return
    group_id, training = trajectories[0].group_id, trajectories[0].purpose == "train"
    whole, config = deliver.unit_id == group_id, intake.curriculum.config.reward
    trajectories = valued(trajectories, config, intake.line, group=whole, training=training)
    if not training:
        for trajectory in trajectories:
            intake.evaluated[group_id] = trajectory
            intake.signal.episode(trajectory)
        intake.drop_delivery(deliver.unit_id, "evaluated", trajectories)
    elif not intake.curriculum.owns(group_id):
        intake.drop_delivery(deliver.unit_id, "other_epoch", trajectories)
    else:
        _to_train(intake, deliver.unit_id, group_id, trajectories)


def _to_train(intake: Intake, unit_id: str, group_id: str, trajectories: list[Trajectory]) -> None:
    """Hold a group or a trajectory that this lineage asked for, unless it would train nothing."""
    intake.recent += trajectories
    for trajectory in trajectories:
        intake.signal.episode(trajectory)
    failed = [t for t in trajectories if t.status == "failed"]
    intake.counts.add("failed", failed)
    usable = [t for t in trajectories if is_usable(t)]
    if intake.families is not None:
        intake.families.failed(failed)
        _join_family(intake, intake.families, FamilyStage(group_id, unit_id, usable))
        return
    outcome = intake.judged(usable)
    if outcome:
        intake.free_room(Unit(unit_id, group_id, trajectories))
        intake.drop_delivery(unit_id, outcome, usable)
        return
    intake.hold(Unit(unit_id, group_id, usable))


def _join_family(intake: Intake, families: WaitingFamilies, stage: FamilyStage) -> None:
    if outcome := families.refuses(stage.group_id):
        intake.drop_delivery(stage.unit_id, outcome, stage.members)
        return
    intake.commits.hold(stage.unit_id)
    intake.settle(families.add(stage))


def _is_committed(intake: Intake, unit_id: str, segments: list[SegmentArrays]) -> bool:
    """Return whether this unit was committed, and is not a new one with a reused id.

    A broker that lost its journal uses ids again.
    """
    if unit_id not in intake.commits.committed:
        return False
    return not (intake.windows and segments and intake.open.begun_anew(segments))


def _commit_again(intake: Intake, deliver: Deliver, segments: list[SegmentArrays]) -> None:
    """Queue a repeated commit for a unit that was committed and has been delivered again."""
    ends = {segment.trajectory_id for segment, _ in segments if segment.status != "unfinished"}
    tokens = sum(segment.action_tokens for segment, _ in segments)
    intake.counts.note(RECOMMITTED, len(ends), tokens)
    intake.commits.repeat(deliver.unit_id)
    group_id = _group_id(deliver, segments)
    if intake.curriculum.is_evaluation(group_id):
        return
    if deliver.complete or deliver.unit_id == group_id:
        _will_not_come(intake, group_id, deliver.unit_id)


def _window(intake: Intake, deliver: Deliver, segments: list[SegmentArrays]) -> None:
    """Process the next window of a trajectory; the tokens before it become its context."""
    segment, last = segments[0][0], segments[-1][0]
    tokens = sum(piece.action_tokens for piece, _ in segments)
    if not intake.curriculum.awaits(segment.group_id, segment.task_id):
        intake.counts.note("other_epoch", 0, tokens)
        intake.drop_delivery(deliver.unit_id, "other_epoch", [])
        return
    if intake.open.displaced_by(segments):
        intake.counts.note("broken", 1)
    try:
        trajectory = intake.open.extend(segments, intake.route_layers)
    except BrokenTrajectory as error:
        log.error("window rejected: %s", error)
        intake.counts.note("broken", 1)
        trajectory = None
    if trajectory is None:
        intake.counts.note("broken", 0, tokens)
        intake.drop_delivery(deliver.unit_id, "broken", [])
        if last.status != "unfinished":
            intake.free_member(segment.group_id, segment.task_id)
        return
    config, whole = intake.curriculum.config.reward, [placed(trajectory, intake.line)]
    (trajectory,) = valued(whole, config, intake.line, group=False, training=True)
    if trajectory.status != "unfinished":
        intake.recent.append(trajectory)
        intake.signal.episode(trajectory)
    unit = Unit(deliver.unit_id, segment.group_id, [trajectory])
    if trajectory.status == "failed" or not trajectory.window_tokens:
        intake.free_room(unit)
        outcome = "failed" if trajectory.status == "failed" else "context"
        intake.drop_delivery(deliver.unit_id, outcome, [trajectory])
        return
    intake.hold(unit)


def _will_not_come(intake: Intake, group_id: str, unit_id: str) -> None:
    """Stop waiting for this group, or for this member of it."""
    curriculum = intake.curriculum
    if curriculum.is_evaluation(group_id):
        intake.evaluated[group_id] = None
        return
    if unit_id in ("", group_id):
        if intake.families is not None:
            if curriculum.owns(group_id):
                intake.settle(intake.families.lost(group_id))
            return
        for task in curriculum.outstanding.get(group_id, []):
            intake.open.forget(task.task_id)
        curriculum.free(group_id)
        return
    # The unit is named by the task, or by its trajectory.
    name = names.without_window(unit_id)
    task_id = name if curriculum.awaits(group_id, name) else names.task_of(name)
    intake.free_member(group_id, task_id)


def _group_id(deliver: Deliver, segments: Sequence[SegmentArrays]) -> str:
    return segments[0][0].group_id if segments else names.group_of_unit(deliver.unit_id)
