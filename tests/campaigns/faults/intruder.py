"""Misbehaving peers for `tests.campaigns.faults`, with no key, an unknown key, or a valid key that they misuse."""

import contextlib
import math
import queue
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from broker.journal.files import numbers, read_file
from broker.journal.writer import FoundRecord, Kind, unpack_segment
from protocol.codec import MAX_BODY_BYTES, PRELUDE, Frames, encode, encode_arrays
from protocol.messages.episodes import (
    Checkpointed,
    Commit,
    Deliver,
    LeaseTask,
    Segment,
    SegmentAck,
    TaskCredit,
    Turn,
)
from protocol.messages.peers import Goodbye, Hello, PublishWeights, Refused
from protocol.sockets import ThreadLink
from tests.campaigns.faults.scene import System

PATIENCE_S = 10.0


def record_segments(folder: Path, count: int) -> list[Frames]:
    """Return the frames of up to ``count`` segments of a run, read from its journal."""
    frames: list[Frames] = []
    for number in reversed(numbers(folder / "journal")):
        contents = read_file(folder / "journal", number)
        for item in contents.found:
            if isinstance(item, FoundRecord) and item.kind is Kind.SEGMENT and len(frames) < count:
                frames.append([PRELUDE, *unpack_segment(contents.record(item).payload)])
    return frames


class Intruder:
    """A peer with the key of ``role``: "" for no key, "unknown" for a key that the broker does not know."""

    def __init__(self, system: System, role: str) -> None:
        self._system = system
        self._endpoint = str(system.config["broker"]["endpoint"])
        self._key_of = role
        self._keys = tempfile.TemporaryDirectory()
        self._links: list[ThreadLink] = []

    def close(self) -> None:
        for link in self._links:
            link.close("intruder")
        self._keys.cleanup()

    def _link(self, hello: Hello) -> ThreadLink:
        """Open a link with the intruder's key, whatever role ``hello`` claims."""
        link = ThreadLink(self._endpoint, hello, keys=self._key_folder(hello.role))
        self._links.append(link)
        return link

    def _key_folder(self, posing_as: str) -> Path | None:
        if not self._key_of:
            return None
        real, folder = self._system.folder / "keys", Path(self._keys.name)
        shutil.copy(real / "broker.pub", folder)
        path = folder / f"{posing_as}.secret"
        if self._key_of == "unknown":
            path.write_bytes(zmq.curve_keypair()[1])
        else:
            shutil.copy(real / f"{self._key_of}.secret", path)
        path.chmod(0o600)
        return folder

    def _join(self) -> ThreadLink:
        hello = Hello(role="actor", peer="intruder", incarnation=time.time_ns() // 1_000_000)
        link = self._link(hello)
        self._until(lambda: link.session.joined, "the intruder has joined")
        return link

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def _next(self, link: ThreadLink, kind: type) -> object:
        """Return the next message of a kind.

        Raises:
            AssertionError: none came within `PATIENCE_S`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                item = link.inbox.get(timeout=0.1)
                if isinstance(item, tuple) and isinstance(item[0], kind):
                    return item[0]
        raise AssertionError(f"no {kind.__name__} came")

    # --- what they do -------------------------------------------------------------------------------------

    def hello_in_vain(self, _: object) -> None:
        """Send Hello in vain: the broker must not let the intruder join."""
        link = self._link(Hello(role="actor", peer="intruder", incarnation=1))
        time.sleep(2.0)
        assert not link.session.joined, "a stranger was let in"

    def pose_as_learner(self, _: object) -> None:
        """Send a learner's Hello under another role's key: the broker must not let the intruder join."""
        epoch = self._epoch()
        link = self._link(Hello(role="learner", peer="learner", incarnation=1 << 40, epoch=epoch + 1))
        time.sleep(2.0)
        assert not link.session.joined, "an actor's key was taken for a learner's"

    def malformed(self, _: object) -> None:
        """Send invalid frames, oversized headers and deeply nested headers: the broker must refuse them."""
        link = self._join()
        body = bytes(1000)
        for frames in (
            [b"nonsense"],
            [PRELUDE],
            [PRELUDE, b"\xc1"],
            [PRELUDE, b"\x91" * 100_000],
            [PRELUDE, bytes(300_000)],
            [b"OB\xff\x00", b"x"],
            [PRELUDE, encode(TaskCredit(tasks=1))[1], body, body, body],
        ):
            link.send_frames(frames)
        assert isinstance(self._next(link, Refused), Refused)

    def oversize(self, _: object) -> None:
        """Send a frame above the size limit: the broker cuts the connection, and the next one works."""
        link = self._join()
        link.send_frames([PRELUDE, bytes(MAX_BODY_BYTES + (1 << 20))])
        time.sleep(1.5)
        self._until(
            lambda: link.session.silent_for(time.monotonic()) < 1.0, "the broker speaks to the intruder again"
        )
        link.send(Goodbye())

    def send_segments(self, frames: list[Frames]) -> None:
        """Send segments that the run already had: the broker must store none of them again."""
        link = self._join()
        for one in frames:
            link.send_frames(one)
        for _ in frames:
            ack = self._next(link, SegmentAck)
            assert isinstance(ack, SegmentAck)
            assert ack.status != "stored", ack

    def zombie(self, _: object) -> None:
        """Act as a learner of an old epoch that commits, checkpoints and publishes: it must be refused."""
        epoch = self._epoch()
        link = self._link(
            Hello(role="learner", peer="learner", incarnation=max(0, epoch - 1), epoch=epoch - 1)
        )
        link.send(Commit(epoch=epoch - 1, step=1 << 30, trained=[f"1g{n}" for n in range(5000)]))
        link.send(Checkpointed(epoch=epoch - 1, step=1 << 30))
        link.send(PublishWeights(epoch=epoch - 1, version=1 << 30, manifest="/nowhere"))
        refused = self._next(link, Refused)
        assert isinstance(refused, Refused)
        assert not link.session.joined, "a learner of an old epoch was let in"

    def squat(self) -> None:
        """Say Hello under the live learner's name, as a learner of an old epoch: no delivery may come here."""
        epoch = self._epoch()
        link = self._link(
            Hello(role="learner", peer="learner", incarnation=0, epoch=epoch - 1, deliver="group")
        )
        assert isinstance(self._next(link, Refused), Refused)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                item = link.inbox.get(timeout=0.1)
                assert not (isinstance(item, tuple) and isinstance(item[0], Deliver)), (
                    "the learner's unit came here"
                )

    def not_finite(self, _: object) -> None:
        """Send trajectories with NaN and infinite log-probabilities, under valid leases."""
        link = self._join()
        link.send(TaskCredit(tasks=2))
        for bad in (math.nan, math.inf):
            lease = self._next(link, LeaseTask)
            assert isinstance(lease, LeaseTask)
            link.send_frames(_segment(lease, bad))
        self._next(link, SegmentAck)
        link.send(Goodbye())

    def _epoch(self) -> int:
        status = self._system.status()
        assert status is not None
        return int(status["epoch"])


def _segment(lease: LeaseTask, logp: float) -> Frames:
    task, tokens = lease.task, 6
    segment = Segment(
        trajectory_id=lease.trajectory_id,
        task_id=task.task_id,
        group_id=task.group_id,
        group_size=task.group_size,
        index=0,
        offset=0,
        tokens=tokens,
        action_tokens=3,
        status="finished",
        env=task.env,
        purpose=task.purpose,
        version_min=0,
        version_max=0,
        turns=[Turn(0, 0, 3, False), Turn(1, 3, 6, True)],
    )
    mask = np.array([0, 0, 0, 1, 1, 1], "u1")
    arrays = {
        "token_ids": np.arange(tokens, dtype="<i4"),
        "action_mask": mask,
        "logp_behaviour": np.where(mask, logp, 0.0).astype("<f4"),
        "policy_version": np.where(mask, 0, -1).astype("<i4"),
    }
    return encode_arrays(segment, arrays)
