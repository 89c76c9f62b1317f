"""One sample, a line of ``samples.jsonl``, and the reading of that file."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

FILE = "samples.jsonl"
"""File in the run folder: the newest samples, one JSON object a line, the newest line last."""
OLDER_FILE = "samples.1.jsonl"
"""File in the run folder: the samples before those of `FILE`."""
MAX_FILE_BYTES = 16 << 20
"""Size after which `FILE` becomes `OLDER_FILE`, and the one before it is deleted."""
MAX_LINE_BYTES = 64 << 10
"""Largest line. Longer texts are cut in their middle."""

PartKind = Literal["prompt", "answer", "observation", "left_out"]
SampleReason = Literal["best", "worst", "random", "first", "failed", "uniform", "untrained"]


class SamplePart(Struct, frozen=True):
    """A piece of a trajectory: the prompt, tokens that the policy sampled, or an observation."""

    kind: PartKind
    """One of `PartKind`. ``left_out`` stands for several pieces of a long episode; its text says how many."""
    text: str
    """Decoded tokens, special tokens included. A long text is cut in its middle, and says so there."""
    tokens: int
    """Number of tokens, those that were cut included."""


class Sample(Struct, frozen=True, kw_only=True):
    """One trajectory as a person wants to see it."""

    step: int
    """Learner step that trained it; for held-out tasks, learner steps before the evaluation."""
    policy_version: int
    """Policy version that the step updated, or that was evaluated."""
    split: Literal["train", "heldout"]
    env: str
    task: str
    """Task id, for example ``1g17.3``: member 3 of the rollout group that was dealt out as number 17."""
    group: str
    evaluation: str = ""
    """Tag of the evaluation, for example ``step 40``; "" for training."""
    chosen: SampleReason = "random"
    """Why this trajectory was kept."""
    parts: list[SamplePart] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    """Sum over all turns, by name of the reward."""
    return_: float = field(default=0.0, name="return")
    advantage: float | None = None
    """Mean advantage of the tokens that carried gradient; None if no token did."""
    version_min: int | None = None
    """Oldest policy version that sampled a token; None if none was sampled."""
    version_max: int | None = None
    lag: int | None = None
    """Largest policy lag of a token, in versions, against ``policy_version``."""
    end: str = ""
    """Status of the trajectory and the reason of its end, for example ``truncated: length``."""
    failed: bool = False
    failure: str = ""
    """Why the episode failed, or ""."""
    correct: bool | None = None
    """True if the task was solved exactly; None if the environment does not say so."""
    replayed: bool = False
    temperature: float = 1.0


_decoder = msgspec.json.Decoder(Sample)


def encode_line(sample: Sample) -> bytes:
    """Return a sample as a line. The line is ASCII, so that ``cat`` shows no escape codes of a model."""
    return json.dumps(msgspec.to_builtins(sample)).encode("ascii") + b"\n"


def decode_line(line: bytes) -> Sample | None:
    """Return the sample of a line; None if a crash cut the line, or if it is not a sample."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def read_samples(run_dir: Path) -> Iterator[Sample]:
    """Iterate over all samples of a run, the oldest first. Lines that cannot be read are left out."""
    for name in (OLDER_FILE, FILE):
        try:
            # The file may be rotated or replaced meanwhile, so it is read as it is now.
            lines = (run_dir / name).read_bytes().splitlines()
        except FileNotFoundError:
            continue
        yield from (sample for line in lines if (sample := decode_line(line)) is not None)


def newest_samples(run_dir: Path, nbytes: int = 1 << 20) -> list[Sample]:
    """Return the samples in the last bytes of the newest file, the oldest first; empty if there is none."""
    try:
        with open(run_dir / FILE, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - nbytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    return [sample for line in lines if (sample := decode_line(line)) is not None]
