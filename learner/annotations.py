"""Annotations: makes rows of what the learner made of each token, and writes them behind the step, in a thread."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.annotation_files import (
    FOLDER,
    MAX_LAG,
    NUMBERS,
    AnnotatedStep,
    AnnotatedTrajectory,
    AnnotationFiles,
    Bit,
    Floats,
    row_type,
)
from learner.given import GIVEN
from learner.trajectory import Trajectory
from learner.update.token_numbers import TokenNumbers

log = logging.getLogger(__name__)

QUEUED = 4
"""Most steps that wait to be written. If the disk is slower than training, steps are left out."""
SETTLE_S = 30.0
"""Longest wait for the disk at a checkpoint and at the end."""


def rows_of(
    trajectories: Sequence[Trajectory], numbers: TokenNumbers, floats: Floats
) -> tuple[NDArray[Any], list[AnnotatedTrajectory]]:
    """Return the rows of all trajectories of a batch, one behind the other, and where each one's are."""
    batch, starts = numbers.batch, numbers.batch.starts
    shown = np.concatenate([t.action_mask for t in trajectories])
    for t, start in zip(trajectories, starts.tolist(), strict=False):
        # What was given in a file has no place in the journal; what a live teacher wrote has one.
        hidden = len(t) if t.env == GIVEN else t.window_start
        shown[start : start + hidden] = False
    place = np.flatnonzero(shown)
    rows = np.zeros(len(place), row_type(floats))
    rows["bits"] = _bits(trajectories, numbers)[place]
    versions = np.concatenate([t.policy_version for t in trajectories])[place]
    # What another policy wrote has no version, so nothing is known of its lag.
    rows["lag"] = np.where(versions < 0, 0, np.clip(batch.version - versions, 0, MAX_LAG))
    # Those of the tokens that carried gradient and are shown.
    known = shown[numbers.place]
    own = np.searchsorted(place, numbers.place[known])
    values = np.full((len(NUMBERS), len(place)), np.nan, dtype=np.float32)
    values[:, own] = [numbers.trained(name)[known] for name in NUMBERS]
    with np.errstate(over="ignore"):
        # A half float ends at 65,504. A ratio above that is shown as infinite, which it is to any reader.
        for name, column in zip(NUMBERS, values, strict=True):
            rows[name] = column
    # The loss took the current policy for the unknown one, so that its ratio of 1 is none that was measured.
    rows["ratio"][versions < 0] = np.nan
    return rows, _places(trajectories, shown, starts)


_TRAINED, _STALE, _AUXILIARY, _UNUSED = (
    np.uint8(bit) for bit in (Bit.TRAINED, Bit.STALE, Bit.AUXILIARY, Bit.UNUSED)
)


def _bits(trajectories: Sequence[Trajectory], numbers: TokenNumbers) -> NDArray[np.uint8]:
    """Return the `Bit`s of all tokens of a batch, [ΣT]."""
    batch, columns = numbers.batch, numbers.batch.columns
    learned = np.concatenate([t.learned_mask for t in trajectories])
    usable = columns["fresh"] > 0
    for t, start in zip(trajectories, batch.starts.tolist(), strict=False):
        if t.unused:
            usable[start : start + len(t)] = True
    bits = np.where(learned, np.where(usable, _UNUSED, _STALE), _AUXILIARY)
    bits[numbers.place] = _TRAINED
    bits |= ((columns["value_mask"] > 0) | (columns["imitation_mask"] > 0)).astype(np.uint8) * np.uint8(
        Bit.OTHER_LOSS
    )
    of_trained = np.zeros(len(numbers.place), dtype=np.uint8)
    for bit, where in (
        (Bit.CLIPPED, numbers.trained("clipped") != 0),
        (Bit.TRUNCATED, numbers.trained("truncated") != 0),
        (Bit.ZERO_WEIGHT, numbers.trained("correction") == 0),
    ):
        of_trained |= where.astype(np.uint8) * np.uint8(bit)
    bits[numbers.place] |= of_trained
    return bits


def _places(
    trajectories: Sequence[Trajectory],
    shown: NDArray[np.bool_],
    starts: NDArray[np.int64],
) -> list[AnnotatedTrajectory]:
    """Return where the shown tokens are. ``starts`` are those of the trajectories, with the end of the last."""
    edges = np.diff(shown.astype(np.int8), prepend=0, append=0)
    # A span ends where its trajectory does, too.
    inner = starts[1:-1]
    cut = inner[shown[inner - 1] & shown[np.minimum(inner, len(shown) - 1)]] if len(inner) else inner
    begins = np.sort(np.concatenate([np.flatnonzero(edges == 1), cut]))
    ends = np.sort(np.concatenate([np.flatnonzero(edges == -1), cut]))
    owner = np.searchsorted(starts, begins, side="right") - 1
    spans: list[list[tuple[int, int]]] = [[] for _ in trajectories]
    rows = [0] * len(trajectories)
    inside = starts[owner]
    for at, start, end in zip(
        owner.tolist(), (begins - inside).tolist(), (ends - inside).tolist(), strict=True
    ):
        # The places are those of the journal: what is trained behind another prompt was sampled further on, or before.
        moved = trajectories[at].moved
        spans[at].append((start - moved, end - moved))
        rows[at] += end - start
    return [
        AnnotatedTrajectory(t.trajectory_id, rows[i], t.window_start, spans[i], t.replayed, t.origin)
        for i, t in enumerate(trajectories)
    ]


class _Rewind(NamedTuple):
    step: int


class _Job(NamedTuple):
    step: int
    version: int
    at: float
    applied: bool
    trajectories: Sequence[Trajectory]
    numbers: TokenNumbers
    untrained: Mapping[str, list[str]]


class AnnotationLog:
    """Writes the annotations of a run, in a thread. Whatever goes wrong, the run goes on without them.

    Args:
        run_dir: run folder.
        mib: most MiB of all files.
        floats: float type of the rows.
        wall_clock: returns the seconds since 1970 (UTC).
    """

    def __init__(
        self, run_dir: Path, *, mib: int, floats: Floats, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._floats, self._wall_clock = run_dir / FOLDER, floats, wall_clock
        self._files = AnnotationFiles(self._folder, mib << 20)
        # Invariant: the step that is added and not done counts, so the queue is empty only when all is written.
        self._queue: queue.Queue[_Job | _Rewind | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self._broken = False
        self.left_out = 0
        """Steps that were not written, because the disk is slower than training, or failed."""

    def step(
        self,
        step: int,
        version: int,
        trajectories: Sequence[Trajectory],
        numbers: TokenNumbers,
        *,
        applied: bool,
        untrained: Mapping[str, list[str]],
    ) -> None:
        """Have a step written.

        Args:
            step: learner steps done, this one included.
            version: policy version that the step updated.
            trajectories: those of the batch.
            numbers: what the update computed. Nobody may change it any more.
            applied: whether the weights moved.
            untrained: ids of the trajectories that were dropped since the step before, by outcome.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="annotations", daemon=True)
            self._thread.start()
        job = _Job(step, version, self._wall_clock(), applied, trajectories, numbers, untrained)
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self._leave_out(step, "the disk is slower than training")

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if isinstance(job, _Rewind):
                    self._files.rewind(job.step)
                    continue
                self._write(job)
                self._broken = False
            except Exception as error:
                # Annotations are for people; no error of theirs may end a run.
                self._leave_out(job.step, str(error) or repr(error))
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, job: _Job) -> None:
        rows, places = rows_of(job.trajectories, job.numbers, self._floats)
        line = AnnotatedStep(
            step=job.step,
            version=job.version,
            time=round(job.at, 3),
            applied=job.applied,
            floats=self._floats,
            offset=0,
            trajectories=places,
            untrained=dict(job.untrained),
        )
        self._files.add(line, rows.tobytes())

    def _leave_out(self, step: int, why: str) -> None:
        self.left_out += 1
        if not self._broken:
            log.warning("the annotations of step %d are left out: %s (%s)", step, why, self._folder)
        self._broken = True

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait until all steps are written. Return False if that takes longer than ``timeout_s``."""
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s)

    def rewind(self, step: int, timeout_s: float = SETTLE_S) -> None:
        """Delete the annotations after a checkpoint; a run that continues from it writes them again.

        If the thread is still in a write after ``timeout_s``, what waits behind it is left out, and the thread deletes
        as soon as the write ends: two threads never change the files at once.
        """
        if self.settle(timeout_s):
            try:
                self._files.rewind(step)
            except OSError as error:
                self._leave_out(step, str(error))
            return
        back_to = step
        with contextlib.suppress(queue.Empty):
            while True:
                waiting = self._queue.get_nowait()
                self._queue.task_done()
                if isinstance(waiting, _Rewind):
                    back_to = min(back_to, waiting.step)
                elif waiting is not None and waiting.step <= step:
                    self._leave_out(waiting.step, "the disk is slower than training")
        # Invariant: only this thread puts jobs, so the queue that was emptied has room.
        self._queue.put_nowait(_Rewind(back_to))

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self._thread is not None and self.settle():
            self._queue.put(None)
            self._thread.join(SETTLE_S)
            self._thread = None
            self._files.close()
