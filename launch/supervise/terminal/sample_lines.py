"""Lines under an evaluation in the terminal: what the model wrote, cut to the terminal's width."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from learner.samples import Sample, answer_of, escaped, facts, prompt_of

HELD_OUT = 2
"""Held-out answers that are shown; beside them, one trained answer."""
PROMPT_SHARE = 0.4
GAP = " ... "


def evaluation_samples(samples: Sequence[Sample], step: int, name: str = "") -> list[Sample]:
    """Return the samples to show for the newest evaluation of a set after a learner step.

    These are its best and its worst answer, and the newest answer that was trained. A failed episode
    takes the place of the best.
    """
    tags = {f"{name} {tag}".strip() for tag in ("before", "after", f"step {step}")}
    held_out = [s for s in samples if s.split == "heldout" and s.step == step and s.evaluation in tags]
    newest = [s for s in held_out if s.evaluation == held_out[-1].evaluation]
    ended = sorted((s for s in newest if not s.failed), key=lambda s: (s.correct is True, s.return_))
    shown = [s for s in newest if s.failed][:1]
    shown += [ended[i] for i in sorted({0, len(ended) - 1})][: HELD_OUT - len(shown)] if ended else []
    trained = [s for s in samples if s.split == "train" and s.advantage is not None and s.step <= step]
    return shown + trained[-1:]


def sample_lines(sample: Sample, width: int) -> list[str]:
    """Return two lines of at most ``width`` columns: the numbers of a sample, and its prompt with its answer.

    Example:
        >>> from learner.samples import SamplePart
        >>> parts = [SamplePart("prompt", "Spell backward: cat", 5), SamplePart("answer", "tac\\x1b[2J", 3)]
        >>> sample = Sample(step=4, policy_version=4, split="heldout", env="spell", task="t", group="g", parts=parts,
        ...                 return_=0.5, version_min=4, version_max=4, end="finished: stop")
        >>> for line in sample_lines(sample, 60):
        ...     print(line)
        held-out: return 0.5, v4, finished: stop
          Spell backward: cat -> tac\\x1b[2J
    """
    where = "held-out" if sample.split == "heldout" else f"trained at step {sample.step}"
    prompt, answer = escaped(prompt_of(sample)).strip(), escaped(answer_of(sample)).strip()
    texts = "  " + fit(prompt, int(width * PROMPT_SHARE)) + " -> "
    return [fit(f"{where}: {facts(sample)}", width), texts + fit(answer, max(8, width - cell_len(texts)))]


def fit(text: str, cells: int) -> str:
    """Return a text of at most ``cells`` columns, without its middle if it is longer.

    Example:
        >>> fit("abcdefghijkl", 9), fit("abc", 9)
        ('ab ... kl', 'abc')
    """
    if cell_len(text) <= cells:
        return text
    half = max(0, (cells - len(GAP)) // 2)
    # A wide character that does not fit as a whole becomes a space.
    head, tail = set_cell_size(text, half), set_cell_size(text[::-1], half)[::-1]
    return f"{head}{GAP}{tail}" if half else set_cell_size(text, cells)
