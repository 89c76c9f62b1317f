"""Writes to the terminal of `offbeat train`: notes, the live line, answers of evaluations, and the table at the end."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.run_file.sections import RunConfig
from launch.supervise.broker_status import Answer
from launch.supervise.progress import (
    SMOOTHED_STEPS,
    MetricsTail,
    evaluates,
    progress_line,
    sentence,
    set_of,
    trailer,
)
from launch.supervise.summary import Summary, summary_rows
from learner.run_files import METRICS
from learner.samples import Sample, answer_of, escaped, facts, newest_samples, question_of

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


def first_group(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of the first group that ended, while the run has done no step."""
    if any(s.step for s in samples):
        return []
    return [s for s in samples if s.split == "train"][: HELD_OUT + 1]


def sample_lines(sample: Sample, width: int) -> list[str]:
    """Return two lines of at most ``width`` columns: the numbers of a sample, and its question with its answer.

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
    if sample.split == "train" and not sample.step:
        where = "first group"
    prompt, answer = escaped(question_of(sample)).strip(), escaped(answer_of(sample)).strip()
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


PLAIN_INTERVAL_S = 5.0
PLAIN_STILL_S = 30.0
"""Interval of plain lines while processes start, and while no learner step ends."""
PLAIN_COLUMNS = 160
"""Columns of samples where the output is not a terminal."""
MARGIN = " " * 10
"""Beginning of a line that belongs to the line above it."""
HEADER = f"progress: reward and right are means over the last {SMOOTHED_STEPS} steps, lag and tok/s the last step's"


class Panel:
    """Writes progress to standard output: a live line on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(soft_wrap=True, highlight=False)
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._started = self._training_since = time.monotonic()
        self._tail = MetricsTail(time.time())
        self._seen_step = self._step = 0
        self._shows_first_group = True
        self._stepped = self._started
        self._printed, self._printed_step, self._line = 0.0, -1, ""
        self._answer: Answer | None = None
        if self._status:
            self._status.start()

    def note(self, text: str) -> None:
        """Print a line that stays.

        If the output is a file on a full disk, the line is lost, but the run goes on.
        """
        self._print(f"[{time.monotonic() - self._started:5.0f} s] {text}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, emoji=False)

    @property
    def _width(self) -> int:
        """Columns that are free behind the margin."""
        return (self._console.width if self._console.is_terminal else PLAIN_COLUMNS) - len(MARGIN)

    def stage(self, text: str, seconds: float) -> None:
        """Show what is done before the roles start: in the live line, or once where there is none.

        Args:
            seconds: time since it began.
        """
        if self._status:
            self._status.update(Text(f"{text}, {seconds:.0f} s"))
        elif text != self._line:
            self._line = text
            self.note(text)

    def joined(self, sentences: Sequence[str], all_joined: str) -> None:
        """Say who has joined: a line for each where the output is not a terminal, else one line for all.

        Args:
            sentences: one for each process that has joined since the last call.
            all_joined: sentence for all of them; "" while one is missing.
        """
        if self._status is None:
            for sentence in sentences:
                self.note(sentence)
        elif sentences and all_joined:
            self.note(all_joined)

    def heard(self, answer: Answer) -> None:
        """Take the broker's newest answer, or its silence."""
        self._answer = answer

    def update(
        self,
        folder: Path,
        config: RunConfig,
        *,
        restarts: Mapping[str, int],
        starting: str = "",
        last: bool = False,
    ) -> None:
        """Refresh the live line from the run folder.

        Args:
            starting: who has not joined yet, see `Starting.text`.
        """
        now = time.monotonic()
        self._tell_news(folder)
        metrics = self._tail.values
        same_step = metrics.get("step", 0) == self._printed_step
        interval_s = PLAIN_STILL_S if starting or same_step else PLAIN_INTERVAL_S
        if not last and now - self._printed < (0.5 if self._status else interval_s):
            return
        if not self._seen_step and "learner/policy_version" in metrics:
            self._training_since, self._seen_step = now, metrics["step"]
            self.note(HEADER)
        if metrics.get("step", 0) != self._step:
            self._step, self._stepped = metrics.get("step", 0), now
        metrics["first_step"], metrics["all_joined"] = self._seen_step, not starting
        if self._answer is not None and self._answer.status is not None:
            metrics["episodes"] = self._answer.status.get("episodes", {}).get("ended", 0)
            metrics["evaluating"] = evaluates(self._answer.status)
        line = progress_line(metrics, config, now - self._training_since)
        line += f" | {starting}" if starting else ""
        # While processes start, everybody waits for them, and the line says so already.
        still_s = 0.0 if starting and not self._seen_step else now - self._stepped
        line += trailer(restarts, None if last else self._answer, still_s)
        self._printed, self._printed_step = now, self._step
        if self._status and not last:
            # An error's text may hold what rich takes for marks.
            self._status.update(Text(line))
        elif line != self._line or not last:
            self._line = line
            self.note(line)

    def _tell_news(self, folder: Path) -> None:
        """Print what is new in the metrics file: notes, and evaluations with samples of their answers."""
        for news in self._tail.read(folder / METRICS):
            self.note(sentence(news))
            if (name := set_of(news)) is not None:
                self._show_samples(evaluation_samples(newest_samples(folder), news["step"], name))
        # Its samples stand here before any step, and alone where the run never makes one.
        if self._shows_first_group and not self._tail.values.get("step"):
            first = first_group(newest_samples(folder))
            if first:
                self._shows_first_group = False
                self.note("the first group of training tasks has ended")
                self._show_samples(first)

    def _show_samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._print("\n".join(MARGIN + line for line in sample_lines(sample, self._width)))

    def show(self, summary: Summary) -> None:
        """Print the table at the end."""
        table = Table(title=f"run {summary['run']}", show_header=False)
        for name, value in summary_rows(summary):
            # Errors of the user's code are not markup.
            table.add_row(name, Text(value))
        self._console.print(table)

    def __enter__(self) -> "Panel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the live line."""
        if self._status:
            self._status.stop()
