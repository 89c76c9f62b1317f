"""Annotations: makes rows of what the learner made of each token, and writes them behind the step, in a thread."""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
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
from protocol.arrays import Int64s

log = logging.getLogger(__name__)

QUEUED = 32
"""Most steps that wait to be written. If the disk is slower than training, steps are left out."""
QUEUED_TOKENS = 1 << 20
"""Tokens of the waiting steps above which no other waits: some 70 MB."""
GATHER_S = 2.0
"""Steps that follow one another faster are written together. The calls that make rows take as long for eight short
steps as for one, and find nothing of theirs in the processor's caches after an update."""
TOGETHER_TOKENS = 1 << 16
"""Tokens of steps that are written together. Rows of more would gain nothing by it."""
SETTLE_S = 30.0
"""Longest wait for the disk at a checkpoint and at the end."""


def rows_of(
    trajectories: Sequence[Trajectory], numbers: Sequence[TokenNumbers], floats: Floats
) -> tuple[NDArray[Any], list[AnnotatedTrajectory]]:
    """Return the rows of all trajectories of some batches, one behind the other, and where each one's are.

    Calls cost more than tokens where answers are short, so what can be done for all trajectories at once is.

    Args:
        trajectories: those of all batches, in order.
        numbers: what the update of each batch computed.
        floats: float type of the rows.
    """
    batches = [of.batch for of in numbers]
    starts = np.concatenate(
        [[0], np.cumsum(np.concatenate([batch.lengths for batch in batches]), dtype=np.int64)]
    )
    shown = np.concatenate([t.action_mask for t in trajectories])
    for t, start in zip(trajectories, starts.tolist(), strict=False):
        if hidden := len(t) if t.origin == "given" else t.window_start:
            shown[start : start + hidden] = False
    place = np.flatnonzero(shown)
    first = np.searchsorted(place, starts)
    rows = np.zeros(len(place), _block_type(floats))
    versions = np.concatenate([t.policy_version for t in trajectories])[place]
    unknown = versions < 0
    sizes = [len(batch.token_ids) for batch in batches]
    lag = np.minimum(np.repeat([batch.version for batch in batches], sizes)[place] - versions, MAX_LAG)
    # What another policy wrote has no version, so nothing is known of its lag.
    lag[unknown | (lag < 0)] = 0
    rows["lag"] = lag
    # Those of the tokens that carried gradient and are shown, and their rows.
    trained = np.concatenate([of.place + sum(sizes[:i]) for i, of in enumerate(numbers)])
    known = shown[trained]
    own = (np.cumsum(shown) - 1)[trained[known]]
    of_own = {
        name: np.concatenate([of.trained(name) for of in numbers])[known]
        for name in (*NUMBERS, "clipped", "truncated")
    }
    values = rows["numbers"]
    values[:] = np.nan
    with np.errstate(over="ignore"):
        # A half float ends at 65,504. A ratio above that is shown as infinite, which it is to any reader.
        values[own] = np.array([of_own[name] for name in NUMBERS]).T
    # The loss took the current policy for the unknown one, so that its ratio of 1 is none that was measured.
    values[unknown, NUMBERS.index("ratio")] = np.nan

    def column(name: str) -> NDArray[np.float32]:
        return np.concatenate([batch.columns[name] for batch in batches])[place]

    bits = np.where(column("fresh") > 0, _UNUSED, _STALE)
    _mask_whole(bits, trajectories, place, starts, first)
    bits[own] = (
        _TRAINED
        | (of_own["clipped"] != 0) * _CLIPPED
        | (of_own["truncated"] != 0) * _TRUNCATED
        | (of_own["correction"] == 0) * _ZERO_WEIGHT
    )
    bits |= ((column("value_mask") + column("imitation_mask")) > 0) * _OTHER_LOSS
    rows["bits"] = bits
    return rows.view(row_type(floats)), _places(trajectories, place, starts, first)


_TRAINED, _CLIPPED, _TRUNCATED, _ZERO_WEIGHT, _STALE, _AUXILIARY, _UNUSED, _OTHER_LOSS = (
    np.uint8(bit) for bit in Bit
)


@cache
def _block_type(floats: Floats) -> np.dtype[Any]:
    """Return `row_type` with `NUMBERS` as one field, which one assignment fills."""
    number = row_type(floats)[NUMBERS[0]]
    return np.dtype([("bits", "u1"), ("lag", "u1"), ("numbers", number, (len(NUMBERS),))])


def _mask_whole(
    bits: NDArray[np.uint8],
    trajectories: Sequence[Trajectory],
    place: Int64s,
    starts: Int64s,
    first: Int64s,
) -> None:
    """Mark the rows of whole trajectories and of whole turns that no method trains, see `_places`."""
    for i, t in enumerate(trajectories):
        if t.unused or t.auxiliary:
            own = slice(first[i], first[i + 1])
            if t.unused:
                bits[own] = _UNUSED
            bits[own][~t.learned_mask[place[own] - starts[i]]] = _AUXILIARY


def _places(
    trajectories: Sequence[Trajectory], place: Int64s, starts: Int64s, first: Int64s
) -> list[AnnotatedTrajectory]:
    """Return where the shown tokens are.

    Args:
        trajectories: those of the batch.
        place: index of each shown token in the batch.
        starts: first token of each trajectory, and last the number of all tokens.
        first: first row of each trajectory, and last the number of all rows.
    """
    # A span begins where a trajectory does, or behind tokens that are not shown.
    begins = np.zeros(len(place) + 1, dtype=np.bool_)
    begins[first] = True
    begins[1:-1] |= place[1:] != place[:-1] + 1
    edges = np.flatnonzero(begins)
    spans_of = np.searchsorted(edges, first)
    # The places are those of the journal: what is trained behind another prompt was sampled further on, or before.
    origin = starts[:-1] + [t.moved for t in trajectories]
    inside = np.repeat(origin, np.diff(spans_of))
    spans = np.stack([place[edges[:-1]], place[edges[1:] - 1] + 1]) - inside
    each = list(zip(*spans.tolist(), strict=True))
    at, rows = spans_of.tolist(), np.diff(first).tolist()
    return [
        AnnotatedTrajectory(
            t.trajectory_id,
            rows[i],
            t.window_start,
            each[at[i] : at[i + 1]],
            t.replayed,
            t.origin,
            *((t.group_id, t.token_ids.tolist()) if t.env == GIVEN and rows[i] else ()),
        )
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


def _tokens(job: _Job) -> int:
    return len(job.numbers.batch.token_ids)


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
        self._queue: queue.Queue[_Job | _Rewind | None] = queue.Queue()
        self._hurry = threading.Event()
        """Set if nobody waits for further steps before those that are there are written."""
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
        if self._is_full():
            self._leave_out(step, "the disk is slower than training")
            return
        self._queue.put_nowait(
            _Job(step, version, self._wall_clock(), applied, trajectories, numbers, untrained)
        )
        if self._queue.qsize() > QUEUED // 2:
            self._hurry.set()

    def _is_full(self) -> bool:
        with self._queue.mutex:
            waiting = [job for job in self._queue.queue if isinstance(job, _Job)]
        return len(waiting) >= QUEUED or sum(map(_tokens, waiting)) > QUEUED_TOKENS

    def _work(self) -> None:
        ending, written = False, -math.inf
        while not ending:
            jobs = [self._queue.get()]
            self._hurry.wait(written + GATHER_S - time.monotonic())
            # Whoever hurries has put what it waits for before.
            self._hurry.clear()
            with contextlib.suppress(queue.Empty):
                while True:
                    jobs.append(self._queue.get_nowait())
            together: list[_Job] = []
            for job in jobs:
                if not isinstance(job, _Job) or sum(map(_tokens, together)) > TOGETHER_TOKENS:
                    self._write(together)
                    together = []
                if isinstance(job, _Job):
                    together.append(job)
                elif isinstance(job, _Rewind):
                    self._go_back(job.step)
                else:
                    ending = True
            self._write(together)
            written = time.monotonic()
            for _ in jobs:
                self._queue.task_done()

    def _write(self, jobs: Sequence[_Job]) -> None:
        left = list(jobs)
        while left:
            try:
                self._write_or_fail(left)
                self._broken = False
            except Exception as error:
                # Annotations are for people; no error of theirs may end a run.
                self._leave_out(left.pop(0).step, str(error) or repr(error))

    def _write_or_fail(self, jobs: list[_Job]) -> None:
        """Write steps, and take each out of the list that is written."""
        rows, places = rows_of(
            [t for job in jobs for t in job.trajectories], [job.numbers for job in jobs], self._floats
        )
        content, at = rows.tobytes(), 0
        while jobs:
            job = jobs[0]
            own, places = places[: len(job.trajectories)], places[len(job.trajectories) :]
            line = AnnotatedStep(
                step=job.step,
                version=job.version,
                time=round(job.at, 3),
                applied=job.applied,
                floats=self._floats,
                offset=0,
                trajectories=own,
                untrained=dict(job.untrained),
            )
            end = at + line.rows * rows.itemsize
            self._files.add(line, content[at:end])
            at = end
            del jobs[0]

    def _leave_out(self, step: int, why: str) -> None:
        self.left_out += 1
        if not self._broken:
            log.warning("the annotations of step %d are left out: %s (%s)", step, why, self._folder)
        self._broken = True

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Have all steps written and wait for it. Return False if that takes longer than ``timeout_s``."""
        self._hurry.set()
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s)

    def rewind(self, step: int, timeout_s: float = SETTLE_S) -> None:
        """Delete the annotations after a checkpoint; a run that continues from it writes them again.

        If the thread is still in a write after ``timeout_s``, what waits behind it is left out, and the thread deletes
        as soon as the write ends: two threads never change the files at once.
        """
        if self.settle(timeout_s):
            self._go_back(step)
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
        self._queue.put_nowait(_Rewind(back_to))
        self._hurry.set()

    def _go_back(self, step: int) -> None:
        try:
            self._files.rewind(step)
        except OSError as error:
            self._leave_out(step, str(error))

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self._thread is not None and self.settle():
            self._queue.put(None)
            self._hurry.set()
            self._thread.join(SETTLE_S)
            self._thread = None
            self._files.close()
