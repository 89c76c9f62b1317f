"""Writes the samples of a run: a few of each learner step and of each evaluation."""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from learner.samples.choice import of_batch, of_evaluation, of_failed, of_uniform, why_failed
from learner.samples.sample import (
    FILE,
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    OLDER_FILE,
    Sample,
    SampleReason,
    decode_line,
    encode_line,
)
from learner.samples.texts import PART_CHARS, Decode, parts_of
from learner.trajectory import Trajectory
from protocol import names
from protocol.files import write_whole

log = logging.getLogger(__name__)

MAX_SHARE = 0.01
"""Share of the wall time that samples of steps may take. A step that comes above it writes none."""
REWARD_NAMES = 32
"""Most rewards of a sample that are kept by name."""


class SampleLog:
    """Appends samples to ``run_dir/samples.jsonl``.

    If the file cannot be written, the run goes on: the samples are lost, and the log says so once.

    Args:
        run_dir: run folder.
        decode: turns token ids into text; None: no samples are written.
        seed: seed of the choice.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        run_dir: Path,
        decode: Decode | None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run_dir, self._decode, self._seed, self._clock = run_dir, decode, seed, clock
        self._started, self._spent = clock(), 0.0
        self._broken = False
        self.of_last_step: list[Sample] = []
        """Samples of the last step that wrote some."""

    def step(
        self,
        step: int,
        version: int,
        trained: Sequence[Trajectory],
        arrived: Sequence[Trajectory],
        advantages: NDArray[np.float64] | None = None,
    ) -> list[Sample]:
        """Write some of a batch, a member of a group with equal returns, and failed episodes. Return them.

        A step writes nothing if samples have taken more than `MAX_SHARE` of the time so far.

        Args:
            step: learner steps done, this one included.
            version: policy version that the step updated.
            trained: trajectories of the batch.
            arrived: trajectories that arrived since the last step.
            advantages: mean advantage of each trajectory of the batch, [S]; NaN where no token is trained.
        """
        begun = self._clock()
        if self._decode is None or self._spent > MAX_SHARE * (begun - self._started):
            return []
        rng = np.random.default_rng([self._seed, step])
        samples = [
            make_sample(
                trained[i],
                self._decode,
                chosen=chosen,
                step=step,
                version=version,
                advantage=math.nan if advantages is None else float(advantages[i]),
            )
            for chosen, i in of_batch(trained, rng)
        ]
        others = [*of_uniform(arrived, trained), *of_failed(arrived)]
        samples += [self._sample(arrived[i], chosen, step, version) for chosen, i in others]
        self._append(samples)
        self.of_last_step = samples
        self._spent += self._clock() - begun
        return samples

    def untrained(self, step: int, version: int, arrived: Sequence[Trajectory]) -> None:
        """Write samples of what arrived if no step can be made of it."""
        if self._decode is None:
            return
        usable = [t for t in arrived if t.status != "failed"]
        kept = of_batch(usable, np.random.default_rng([self._seed, step]))
        samples = [self._sample(usable[i], "untrained", step, version) for _, i in kept]
        self._append(
            samples + [self._sample(arrived[i], why, step, version) for why, i in of_failed(arrived)]
        )

    def evaluation(
        self, step: int, version: int, tag: str, episodes: Sequence[Trajectory | None]
    ) -> list[Sample]:
        """Write some answers of an evaluation, and return them.

        Args:
            step: learner steps done.
            version: policy version that was evaluated.
            tag: name of the evaluation.
            episodes: one trajectory for each task; None for a task that was given up.
        """
        if self._decode is None:
            return []
        samples = [
            self._sample(t, chosen, step, version, evaluation=tag)
            for chosen, i in of_evaluation(episodes)
            if (t := episodes[i]) is not None
        ]
        self._append(samples)
        return samples

    def rewind(self, step: int, evaluations: Collection[str]) -> None:
        """Delete the samples after a checkpoint; a run that continues from it writes them again.

        Args:
            step: learner steps that the checkpoint covers.
            evaluations: tags of the evaluations that it covers.
        """

        def kept(line: bytes) -> bool:
            sample = decode_line(line)
            if sample is None or sample.step != step:
                return sample is not None and sample.step < step
            return sample.evaluation in evaluations if sample.evaluation else sample.chosen != "untrained"

        for name in (OLDER_FILE, FILE):
            path = self._run_dir / name
            if not path.exists():
                continue
            lines = [line for line in path.read_bytes().splitlines() if kept(line)]
            # The file is replaced as a whole, because a crash in the middle must not lose the kept lines.
            write_whole(path, b"".join(line + b"\n" for line in lines))

    def _append(self, samples: Sequence[Sample]) -> None:
        """Write all samples with one call, so that a reader sees whole lines, except after a crash."""
        lines = b"".join(encode_line(sample) for sample in samples)
        if not lines:
            return
        path = self._run_dir / FILE
        try:
            if path.exists() and path.stat().st_size + len(lines) > MAX_FILE_BYTES:
                path.replace(self._run_dir / OLDER_FILE)
            with open(path, "ab") as file:
                # After a write that failed in the middle, a line end closes the broken line.
                file.write(b"\n" + lines if self._broken else lines)
            self._broken = False
        except OSError as error:
            if not self._broken:
                log.warning("%s cannot be written, its samples are lost: %s", path, error)
            self._broken = True

    def _sample(
        self, t: Trajectory, chosen: SampleReason, step: int, version: int, *, evaluation: str = ""
    ) -> Sample:
        assert self._decode is not None
        return make_sample(t, self._decode, chosen=chosen, step=step, version=version, evaluation=evaluation)


def make_sample(
    t: Trajectory,
    decode: Decode,
    *,
    chosen: SampleReason,
    step: int,
    version: int,
    evaluation: str = "",
    advantage: float = math.nan,
) -> Sample:
    """Return the sample of a trajectory, whose line has at most `MAX_LINE_BYTES` bytes.

    Args:
        decode: turns token ids into text.
        version: policy version that the step updated, or that was evaluated.
        advantage: mean advantage of the tokens that carried gradient; NaN if none did.
    """
    versions = t.policy_version[t.action_mask]
    failed = t.status == "failed"
    sample = Sample(
        step=step,
        policy_version=version,
        split="heldout" if t.purpose == "eval" else "train",
        env=t.env,
        task=names.task_of(t.trajectory_id) or t.trajectory_id,
        group=t.group_id,
        evaluation=evaluation,
        chosen=chosen,
        rewards=dict(islice(t.reward_by_name.items(), REWARD_NAMES)),
        return_=t.return_,
        advantage=None if math.isnan(advantage) else float(advantage),
        version_min=int(versions.min()) if len(versions) else None,
        version_max=int(versions.max()) if len(versions) else None,
        lag=max(0, version - int(versions.min())) if len(versions) else None,
        end=": ".join(filter(None, (t.status, t.stop_reason))),
        failed=failed,
        failure=why_failed(t) if failed else "",
        correct=t.correct,
        replayed=t.replayed,
        temperature=t.temperature,
    )
    chars = PART_CHARS
    while True:
        whole = msgspec.structs.replace(sample, parts=parts_of(t, decode, chars=chars))
        if len(encode_line(whole)) <= MAX_LINE_BYTES or chars < 2:
            return whole
        chars //= 2
