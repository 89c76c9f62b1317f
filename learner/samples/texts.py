"""Token ids of a trajectory as texts of bounded length."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from learner.samples.sample import PartKind, SamplePart
from learner.trajectory import Trajectory
from protocol.arrays import Int64s

log = logging.getLogger(__name__)

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
