"""`offbeat samples`: shows what the model of a run wrote, from the samples that the learner keeps."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from launch.commands.status import newest_run
from launch.errors import ConfigError
from launch.run_folder import JOURNAL
from learner.samples import SAMPLES_FILE, Sample, encode_line, escaped, facts, read_samples

NAMES = {"prompt": "prompt", "answer": "answer", "observation": "observed", "left_out": ""}
INDENT = 11
SHOWN = 5
MAX_SENT = 1_000_000
"""Most samples for another viewer; the files of a run hold fewer."""


def show(
    target: str,
    *,
    only: str = "",
    heldout: bool = False,
    step: int | None = None,
    count: int | None = None,
    as_json: bool = False,
    inspect: Path | None = None,
    otlp: str | None = None,
) -> int:
    """Print samples of a run, or hand them to another viewer. Return the exit code.

    Args:
        target: run folder; "": the newest run.
        only: see `chosen`.
        heldout: show answers to held-out tasks only.
        step: show samples of this learner step only; for held-out tasks, of the evaluation after it.
        count: most samples; None: `SHOWN`, or all for another viewer.
        as_json: print the lines of the file.
        inspect: folder for logs of Inspect View.
        otlp: address of a receiver of spans.

    Raises:
        ConfigError: there is no such run, or it has no such samples.
        LaunchError: the folder cannot be written, or the receiver does not take the spans.
    """
    others = inspect is not None or otlp is not None
    count = count or (MAX_SENT if others else SHOWN)
    folder = Path(target) if target else newest_run(Path("runs"))
    if not folder.is_dir():
        raise ConfigError(f"{target!r} is not a run folder; write for example runs/NAME")
    samples = list(read_samples(folder))
    if not samples:
        raise ConfigError(
            f"{folder} has no samples yet ({SAMPLES_FILE}): the first evaluation writes them, and the first group of "
            "training tasks that ends"
        )
    shown = chosen(samples, only=only, heldout=heldout, step=step, count=count)
    if not shown:
        steps = sorted({sample.step for sample in samples})
        raise ConfigError(
            f"none of the {len(samples)} samples of {folder} is of this kind; "
            f"they are of the steps {steps[0]} to {steps[-1]}"
        )
    if inspect is not None:
        from launch.commands.inspect_logs import write_inspect_logs

        sys.stdout.write(write_inspect_logs(shown, inspect, folder.name) + "\n")
    elif otlp is not None:
        from launch.commands.otlp import send_spans

        sys.stdout.write(send_spans(shown, otlp, run=folder.name, journal=folder / JOURNAL) + "\n")
    elif as_json:
        sys.stdout.write("".join(encode_line(sample).decode("ascii") for sample in shown))
    else:
        sys.stdout.write("\n".join(block(sample) for sample in shown))
    return 0


def chosen(
    samples: Iterable[Sample], *, only: str = "", heldout: bool = False, step: int | None = None, count: int
) -> list[Sample]:
    """Return the samples to show, in the order in which they are shown.

    Args:
        only: "worst" or "best" (by return, the most extreme first), "failed", or "" (the newest, the newest last).
    """
    rows = [s for s in samples if (not heldout or s.split == "heldout") and step in (None, s.step)]
    if only == "failed":
        return [s for s in rows if s.failed][-count:]
    if only:
        sign = 1 if only == "worst" else -1
        # A failed episode has no return that one could compare. Among equals the newest comes first.
        ended = [s for s in rows if not s.failed]
        return sorted(ended, key=lambda s: (sign * s.return_, -s.step))[:count]
    return rows[-count:]


def block(sample: Sample) -> str:
    """Return a sample as lines: where it stands, its numbers, and its texts."""
    where = f"held-out, {sample.evaluation}" if sample.split == "heldout" else "trained"
    if sample.chosen in ("untrained", "uniform"):
        where = "not trained" + (", as its group has equal returns" if sample.chosen == "uniform" else "")
    elif sample.chosen == "first" and sample.split == "train":
        where = "first group"
    elif sample.failed and sample.split == "train":
        where = "training task"
    head = f"step {sample.step}, {where}, {sample.task} ({sample.env}): {facts(sample)}"
    parts = [line for part in sample.parts for line in _lines(NAMES[part.kind], part.text)]
    return "\n".join([escaped(head), *parts, ""])


def _lines(name: str, text: str) -> Sequence[str]:
    """Return a text behind its name; all its lines begin at one column."""
    lines = escaped(text, keep="\n").split("\n")
    return [f"  {name if not i else '':<{INDENT - 2}}{line}" for i, line in enumerate(lines)]
