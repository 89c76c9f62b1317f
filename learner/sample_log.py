"""Writes the samples of a run: chooses a few trajectories of each learner step and of each evaluation, as texts."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from learner.samples import (
    ANSWER_CHARS,
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    OLDER_SAMPLES_FILE,
    SAMPLES_FILE,
    PartKind,
    Sample,
    SamplePart,
    SampleReason,
    decode_line,
    encode_line,
)
from learner.trajectory import Trajectory
from protocol import names
from protocol.arrays import Int64s
from protocol.failures import describe, failure_or_text
from protocol.files import write_whole

log = logging.getLogger(__name__)

RANDOM = 2
"""Trajectories of a batch that are kept beside its best and its worst."""
FIRST = 3
"""Held-out tasks that are kept at every evaluation, so that one can compare their answers over time."""
FAILED = 2
"""Failed episodes that are kept each time, with different reasons."""

Choice = tuple[SampleReason, int]
"""Why a trajectory is kept, and its place in the sequence."""


def of_batch(trained: Sequence[Trajectory], rng: np.random.Generator) -> list[Choice]:
    """Return the best and the worst of a batch by return, and `RANDOM` others. A greedy baseline is left out.

    Example:
        >>> of_batch([], np.random.default_rng(0))
        []
    """
    places = [i for i, t in enumerate(trained) if not t.baseline]
    if not places:
        return []
    best, worst = _extremes(trained, places)
    chosen = dict.fromkeys((best, worst))
    others = [i for i in places if i not in chosen]
    drawn = rng.permutation(len(others))[:RANDOM].tolist()
    return [*_both(best, worst), *(("random", others[i]) for i in drawn)]


def of_evaluation(episodes: Sequence[Trajectory | None]) -> list[Choice]:
    """Return the first `FIRST` answered tasks, the best, the worst, and failed ones."""
    places = [i for i, t in enumerate(episodes) if t is not None and t.status != "failed"]
    kept: list[Choice] = [("first", i) for i in places[:FIRST]]
    others = places[FIRST:]
    if others:
        kept += _both(*_extremes(episodes, others))
    return kept + of_failed(episodes)


def of_failed(episodes: Sequence[Trajectory | None]) -> list[Choice]:
    """Return failed episodes, at most `FAILED`, each with a reason of its own."""
    reasons: dict[str, int] = {}
    for i, t in enumerate(episodes):
        if t is not None and t.status == "failed":
            reasons.setdefault(why_failed(t), i)
    return [("failed", i) for i in list(reasons.values())[:FAILED]]


def _both(best: int, worst: int) -> list[Choice]:
    return [("best", best)] if best == worst else [("best", best), ("worst", worst)]


def of_uniform(arrived: Sequence[Trajectory], trained: Sequence[Trajectory]) -> list[Choice]:
    """Return a member of the newest group whose returns are all equal, unless the batch has it.

    Such groups are not trained, as a rule. They show what is too hard or too easy for the model.
    """
    batch = {t.trajectory_id for t in trained}
    # Members of a group may arrive at different steps, and then their returns say nothing yet.
    here = Counter(t.group_id for t in arrived)
    groups: dict[str, list[int]] = {}
    for i, t in enumerate(arrived):
        whole = here[t.group_id] >= t.group_size
        if whole and t.status != "failed" and not t.baseline and t.trajectory_id not in batch:
            groups.setdefault(t.group_id, []).append(i)
    uniform = [
        places[0]
        for places in groups.values()
        if len(places) > 1 and len({arrived[i].return_ for i in places}) == 1
    ]
    return [("uniform", i) for i in uniform[-1:]]


def of_first_group(arrived: Sequence[Trajectory]) -> list[Choice]:
    """Return the best and the worst member of the first group that is whole, and failed ones; nothing before that.

    They are shown whatever the group's returns are, because a run that never makes a step has nothing else to show.
    """
    here = Counter(t.group_id for t in arrived if not t.baseline)
    first = next((t.group_id for t in arrived if here[t.group_id] >= t.group_size), None)
    if first is None:
        return []
    members = [t if t.group_id == first else None for t in arrived]
    places = [i for i, t in enumerate(members) if t is not None and t.status != "failed" and not t.baseline]
    best_and_worst = dict.fromkeys(_extremes(arrived, places)) if places else ()
    return [*(("first", i) for i in best_and_worst), *of_failed(members)]


def why_failed(t: Trajectory) -> str:
    """Return why an episode failed, in one sentence."""
    return describe(failure_or_text(t.failure, t.error))


def _extremes(episodes: Sequence[Trajectory | None], places: Sequence[int]) -> tuple[int, int]:
    """Return the places of the best and of the worst trajectory; what is solved is better than what is not."""

    def value(i: int) -> tuple[bool, float]:
        t = episodes[i]
        assert t is not None
        return t.correct is True, t.return_

    # Among equals the last one is the worst, so that two are shown.
    return max(places, key=value), min(reversed(places), key=value)


Decode = Callable[[Sequence[int]], str]
PART_TOKENS = 1024
"""Most tokens of a part that are decoded: one half from its beginning, one from its end."""
PART_CHARS = 4_000
PARTS = 12
"""Most parts of a sample: one half from the beginning of the episode, one from its end."""


def open_tokenizer(model: str) -> Decode | None:
    """Return the function that decodes token ids, special tokens included; None if that is not possible.

    Args:
        model: model folder.
    """
    path = Path(model) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The tokenizers library raises bare Exception.
        log.warning("no samples are written, because %s cannot be read: %s", path, error)
        return None

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    return decode


def parts_of(t: Trajectory, decode: Decode, *, chars: int = PART_CHARS) -> list[SamplePart]:
    """Return prompt, answers and observations of a trajectory.

    Args:
        chars: most characters of a part's text.
    """
    edges = np.flatnonzero(np.diff(t.action_mask)) + 1
    runs = [run for run in np.split(np.arange(len(t)), edges) if len(run)]
    parts = [_Run(_kind(t, run), t.token_ids[run]) for run in runs]
    if len(parts) <= PARTS:
        return [part.decoded(decode, chars) for part in parts]
    ends = parts[: PARTS // 2], parts[-PARTS // 2 :]
    between = parts[PARTS // 2 : -PARTS // 2]
    gap = SamplePart(
        "left_out", f"[{len(between)} parts left out]", sum(len(part.token_ids) for part in between)
    )
    first, last = ([part.decoded(decode, chars) for part in end] for end in ends)
    return [*first, gap, *last]


def _kind(t: Trajectory, run: Int64s) -> PartKind:
    if t.action_mask[run[0]]:
        return "answer"
    return "prompt" if run[0] == 0 else "observation"


class _Run:
    """Neighbouring tokens that are all sampled, or all not sampled."""

    def __init__(self, kind: PartKind, token_ids: Sequence[int]) -> None:
        self.kind, self.token_ids = kind, token_ids

    def decoded(self, decode: Decode, chars: int) -> SamplePart:
        ids = [int(token) for token in self.token_ids]
        if len(ids) <= PART_TOKENS:
            return SamplePart(self.kind, cut(decode(ids), chars), len(ids))
        half = PART_TOKENS // 2
        between = f" [{len(ids) - 2 * half} tokens left out] "
        head, tail = (cut(decode(end), chars // 2) for end in (ids[:half], ids[-half:]))
        return SamplePart(self.kind, head + between + tail, len(ids))


def cut(text: str, chars: int) -> str:
    """Return a text whose middle is left out if it is longer than ``chars``.

    Example:
        >>> cut("abcdefghij", 4), cut("abc", 4)
        ('ab [6 characters left out] ij', 'abc')
    """
    if len(text) <= chars:
        return text
    half = max(1, chars // 2)
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


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
        wall_clock: returns the seconds since 1970 (UTC), which each sample has.
    """

    def __init__(
        self,
        run_dir: Path,
        decode: Decode | None,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir, self._decode, self._seed, self._clock = run_dir, decode, seed, clock
        self._wall_clock = wall_clock
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
                at=self._wall_clock(),
            )
            for chosen, i in of_batch(trained, rng)
        ]
        others = [*of_uniform(arrived, trained), *of_failed(arrived)]
        samples += [self._sample(arrived[i], chosen, step, version) for chosen, i in others]
        self._append(samples)
        self.of_last_step = samples
        self._spent += self._clock() - begun
        return samples

    def first_group(self, version: int, arrived: Sequence[Trajectory]) -> bool:
        """Write samples of the first group that ended before the first step. Return whether there was one."""
        chosen = of_first_group(arrived)
        if chosen and self._decode is not None:
            self._append([self._sample(arrived[i], why, 0, version) for why, i in chosen])
        return bool(chosen)

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
            if sample.evaluation:
                return sample.evaluation in evaluations
            # Those of step 0 were written before any step, and are written again.
            return step > 0 and sample.chosen != "untrained"

        for name in (OLDER_SAMPLES_FILE, SAMPLES_FILE):
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
        path = self._run_dir / SAMPLES_FILE
        try:
            if path.exists() and path.stat().st_size + len(lines) > MAX_FILE_BYTES:
                path.replace(self._run_dir / OLDER_SAMPLES_FILE)
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
        return make_sample(
            t,
            self._decode,
            chosen=chosen,
            step=step,
            version=version,
            evaluation=evaluation,
            at=self._wall_clock(),
        )


def make_sample(
    t: Trajectory,
    decode: Decode,
    *,
    chosen: SampleReason,
    step: int,
    version: int,
    evaluation: str = "",
    advantage: float = math.nan,
    at: float | None = None,
) -> Sample:
    """Return the sample of a trajectory, whose line has at most `MAX_LINE_BYTES` bytes.

    Args:
        decode: turns token ids into text.
        version: policy version that the step updated, or that was evaluated.
        advantage: mean advantage of the tokens that carried gradient; NaN if none did.
        at: wall clock, in seconds since 1970 (UTC).
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
        answer=None if t.answer is None else cut(t.answer, ANSWER_CHARS // 2),
        target=None if t.target is None else cut(t.target, ANSWER_CHARS // 2),
        replayed=t.replayed,
        temperature=t.temperature,
        time=None if at is None else round(at, 3),
    )
    chars = PART_CHARS
    while True:
        whole = msgspec.structs.replace(sample, parts=parts_of(t, decode, chars=chars))
        if len(encode_line(whole)) <= MAX_LINE_BYTES or chars < 2:
            return whole
        chars //= 2
