"""Samples in words, for the terminal and for TensorBoard. Pure."""

from collections.abc import Iterable, Sequence

from learner.samples.sample import Sample

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
    named = ", ".join(f"{escaped(name)} {value:.3g}" for name, value in sample.rewards.items())
    return f"return {sample.return_:.3g}" + (f" ({named})" if named else "")


def versions_text(sample: Sample) -> str:
    """Return the policy versions of the tokens and their lag, or ""."""
    if sample.version_min is None or sample.version_max is None:
        return ""
    low, high = sample.version_min, sample.version_max
    return f"v{low}" if low == high else f"v{low}-{high}"


def facts(sample: Sample) -> str:
    """Return return, rewards, advantage, versions, lag and end of a sample in words."""
    if sample.failed:
        return f"failed: {escaped(sample.failure)}"
    parts = [rewards_text(sample)]
    parts += [] if sample.advantage is None else [f"advantage {sample.advantage:+.3f}"]
    parts += [text] if (text := versions_text(sample)) else []
    parts += [f"lag {sample.lag}"] if sample.lag is not None and sample.split == "train" else []
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


def _cell(text: str) -> str:
    """Return a text as a cell of a Markdown table: as code, so that nothing in it is markup."""
    if not text:
        return ""
    plain = escaped(text).replace("|", "/").replace("`", "'")
    half = CELL_CHARS // 2
    return "`" + (plain if len(plain) <= CELL_CHARS else f"{plain[:half]} ... {plain[-half:]}") + "`"
