"""Samples, what the model wrote: one line of ``samples.jsonl``, the reading of that file, and samples in words."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

SAMPLES_FILE = "samples.jsonl"
"""File in the run folder: the newest samples, one JSON object a line, the newest line last."""
OLDER_SAMPLES_FILE = "samples.1.jsonl"
"""File in the run folder: the samples before those of `FILE`."""
MAX_FILE_BYTES = 16 << 20
"""Size after which `FILE` becomes `OLDER_FILE`, and the one before it is deleted."""
MAX_LINE_BYTES = 64 << 10
"""Largest line. Longer texts are cut in their middle."""

ANSWER_CHARS = 2_000
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
    answer: str | None = None
    """What the environment found in the model's text and compared; None if it does not tell. At most `ANSWER_CHARS`."""
    target: str | None = None
    """What the answer should have been."""
    replayed: bool = False
    temperature: float = 1.0
    time: float | None = None
    """Wall clock when the learner wrote the sample, in seconds since 1970 (UTC); None in a file of an earlier
    version."""


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
    for name in (OLDER_SAMPLES_FILE, SAMPLES_FILE):
        try:
            # The file may be rotated or replaced meanwhile, so it is read as it is now.
            lines = (run_dir / name).read_bytes().splitlines()
        except FileNotFoundError:
            continue
        yield from (sample for line in lines if (sample := decode_line(line)) is not None)


def newest_samples(run_dir: Path, nbytes: int = 1 << 20) -> list[Sample]:
    """Return the samples in the last bytes of the newest file, the oldest first; empty if there is none."""
    try:
        with open(run_dir / SAMPLES_FILE, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - nbytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    return [sample for line in lines if (sample := decode_line(line)) is not None]


FACT_CHARS = 60
"""Most characters of an answer or a target in a line of facts."""
CELL_CHARS = 600
"""Most characters of a cell in TensorBoard's table."""


def escaped(text: str, *, keep: str = "") -> str:
    """Return a text with every character that is not printable written as an escape.

    A model must not be able to send escape codes to a terminal, or to reverse the direction of writing.

    Args:
        keep: characters that stay, for example line ends.

    Example:
        >>> escaped("a\\x1b[2Jb\\nc"), escaped("a\\nb", keep="\\n")
        ('a\\\\x1b[2Jb\\\\nc', 'a\\nb')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def prompt_of(sample: Sample) -> str:
    """Return the text of the prompt, or ""."""
    return sample.parts[0].text if sample.parts and sample.parts[0].kind == "prompt" else ""


_USER_TURN = re.compile(
    r"<[|｜]?(?:im_start|start_header_id|start_of_turn|start_of_role|start|turn)[|｜]?>\s*(?:user|human)\b"
    r"(?:<\|(?:end_header_id|end_of_role|im_sep|message)\|>)?"
    r"|<[|｜]?(?:user|human)(?:_token)?[|｜]?>|\[INST\]",
    re.IGNORECASE,
)
_TURN_END = re.compile(
    r"<[|｜][^<>\s]{1,40}>|<[^<>\s]{1,40}[|｜]>|<(?:/s|eos|end_of_turn|start_of_turn|assistant)>|\[/INST\]",
    re.IGNORECASE,
)
_CUT = re.compile(r" \[\d+ (?:characters|tokens) left out\] ")


def question_of(sample: Sample) -> str:
    """Return the last user message of the prompt, without the marks of the chat template.

    A prompt in which no mark of a user's turn is known is returned as it is.

    Example:
        >>> text = "<|im_start|>system\\nHi<|im_end|>\\n<|im_start|>user\\n1 + 1?<|im_end|>\\n<|im_start|>assistant\\n"
        >>> parts = [SamplePart("prompt", text, 20)]
        >>> question_of(Sample(step=1, policy_version=0, split="train", env="e", task="t", group="g", parts=parts))
        '1 + 1?'
    """
    prompt = prompt_of(sample)
    begins = [match.end() for match in _USER_TURN.finditer(prompt)]
    if not begins:
        return prompt
    begin = begins[-1]
    end = _TURN_END.search(prompt, begin)
    gap = next((match for match in _CUT.finditer(prompt, begin) if end and match.start() > end.start()), None)
    if gap is not None:
        # The beginning of the last turn was cut out of a long prompt, and an earlier turn was found.
        begin, end = gap.end(), _TURN_END.search(prompt, gap.end())
    return prompt[begin : end.start() if end else len(prompt)].strip()


def answer_of(sample: Sample) -> str:
    """Return all that follows the prompt, in one text; observations stand in brackets."""
    rest = [part for part in sample.parts if part.kind != "prompt"]
    return " ".join(part.text if part.kind == "answer" else f"[{part.text}]" for part in rest)


def rewards_text(sample: Sample) -> str:
    """Return the return, and the rewards by name where there are several or where the name tells something.

    Example:
        >>> sample = Sample(step=1, policy_version=0, split="train", env="e", task="t", group="g", return_=1.25)
        >>> rewards_text(sample)
        'return 1.25'
    """
    # As many digits as where groups with equal returns are told, so that one sees why they are equal or not.
    named = ", ".join(f"{escaped(name)} {value:g}" for name, value in sample.rewards.items())
    return f"return {sample.return_:g}" + (f" ({named})" if named else "")


def versions_text(sample: Sample) -> str:
    """Return the policy versions of the tokens and their lag, or ""."""
    if sample.version_min is None or sample.version_max is None:
        return ""
    low, high = sample.version_min, sample.version_max
    return f"v{low}" if low == high else f"v{low}-{high}"


def _short(text: str) -> str:
    """Return a text in quotes, on one line and not too long."""
    plain = escaped(text)
    return f'"{plain if len(plain) <= FACT_CHARS else plain[: FACT_CHARS - 1] + "…"}"'


def facts(sample: Sample) -> str:
    """Return return, rewards, advantage, versions, lag and end of a sample in words."""
    if sample.failed:
        return f"failed: {escaped(sample.failure)}"
    parts = [rewards_text(sample)]
    parts += [] if sample.advantage is None else [f"advantage {sample.advantage:+.3f}"]
    parts += [text] if (text := versions_text(sample)) else []
    parts += [f"lag {sample.lag}"] if sample.lag is not None and sample.split == "train" else []
    parts += [] if sample.answer is None else [f"answer {_short(sample.answer)}"]
    parts += [] if sample.target is None else [f"target {_short(sample.target)}"]
    parts += ["replayed"] if sample.replayed else []
    parts += ["right" if sample.correct else "wrong"] if sample.correct is not None else []
    return ", ".join([*parts, escaped(sample.end)])


def markdown_table(samples: Iterable[Sample]) -> str:
    """Return samples as a Markdown table."""
    head = ["what", "prompt", "answer", "rewards", "advantage", "versions", "lag", "end"]
    rows = [head, ["---"] * len(head), *([_cell(text) for text in _row(sample)] for sample in samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(sample: Sample) -> Sequence[str]:
    return (
        f"{'held-out' if sample.split == 'heldout' else 'training'}, {sample.chosen}",
        prompt_of(sample),
        answer_of(sample),
        rewards_text(sample),
        "" if sample.advantage is None else f"{sample.advantage:+.3f}",
        versions_text(sample),
        "" if sample.lag is None else str(sample.lag),
        sample.failure if sample.failed else sample.end,
    )


def markdown_code(text: str) -> str:
    """Return a text as code in a cell of a Markdown table, so that nothing in it is markup.

    The bars of special tokens are written as entities, which both GitHub and TensorBoard show as bars.

    Example:
        >>> markdown_code("a|b"), markdown_code("a < b")
        ('<code>a&#124;b</code>', '`a < b`')
    """
    plain = escaped(text).replace("`", "'")
    if "|" not in plain:
        return f"`{plain}`"
    # Inside of HTML, Markdown would still read its own marks.
    return f"<code>{re.sub(r'[^a-zA-Z0-9 ]', lambda match: f'&#{ord(match[0])};', plain)}</code>"


def _cell(text: str) -> str:
    if not text:
        return ""
    plain, half = escaped(text), CELL_CHARS // 2
    return markdown_code(plain if len(plain) <= CELL_CHARS else f"{plain[:half]} ... {plain[-half:]}")
