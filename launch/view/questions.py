"""The questions that the page asks, and their answers as plain data. The server and the export give the same ones."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from broker.errors import JournalError
from broker.status import BROKER
from launch.errors import BadQuestion, NotKept
from launch.run_folder import JOURNAL
from launch.view.annotations import AnnotationReader
from launch.view.columns import RowColumns
from launch.view.differences import answers, differences_page
from launch.view.inspector import (
    Words,
    inspector_page,
    known_text,
    open_words,
    read_pieces,
    row_of_file,
    turn_times,
)
from launch.view.journal_index import JournalIndex, Row
from launch.view.overview import number, overview, sentence
from launch.view.run_reader import LogReader, RunFiles, RunReader
from launch.view.table import choices, table_page
from launch.view.timeline import batch_page, timeline_page
from launch.view.tokens import ledger_page, staleness_page
from learner.gauges import HELDOUT_REWARD, REWARD, declared
from learner.samples import Sample
from protocol.gauges import BY_ROLE, ENV, Gauge

CATCH_UP_S = 0.15
"""Longest time that a question spends on new records of the journal before it is answered."""
REST = 30
MAX_POINTS = 4_000
MAX_NAMES = 64
LOG_LINES = 1_000
"""Most lines of the logs in an answer."""
DOCS = Path(__file__).parent / "docs"
"""Pages of the documentation; they stand in the package as in the repository."""
UNLIMITED_LAG = 1 << 30
"""Bound for a journal whose run's settings cannot be read: nothing in a journal depends on it."""
Question = Mapping[str, str]


class _Page(NamedTuple):
    seen: tuple[int, ...]
    fresh_until: float
    made: Any


class RunView:
    """One run as the page sees it.

    Invariant: several threads ask at the same time; `_lock` guards the files, the index has a lock of its own.

    Args:
        folder: run folder.
        name: name in addresses, unique among the runs that are shown.
        rest: how many times as long as a page took it is given again, if what it rests on has changed.
    """

    def __init__(self, folder: Path, name: str, rest: float = REST) -> None:
        self.folder, self.name, self._rest = folder, name, rest
        self._reader = RunReader(folder)
        self._logs = LogReader(folder)
        self._lock = threading.Lock()
        bound = self._reader.read().bound
        self.index = JournalIndex(folder / JOURNAL, UNLIMITED_LAG if bound is None else bound)
        self.columns = RowColumns(self.index)
        self.annotations = AnnotationReader(folder)
        self._words: Words | None = None
        self._pages: dict[str, _Page] = {}
        self._ended = threading.Event()
        self._filler: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read the journal in a thread, which ends when it has read what is there."""
        self._filler = threading.Thread(target=self._fill, name=f"journal of {self.name}", daemon=True)
        self._filler.start()

    def _fill(self) -> None:
        while not self._ended.is_set() and self._advance():
            pass

    def _advance(self) -> bool:
        """Read one more chunk of the journal. Return whether there was something to read."""
        read = self.index.advance()
        with self.index.lock:
            # A little with each chunk, so that nobody who asks has to wait for all rows.
            self.columns.refresh(self._reader.files.config)
        return read

    def read_all(self) -> None:
        """Read all of the journal now."""
        while self._advance():
            pass

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._filler is not None:
            self._filler.join(10.0)

    def files(self) -> RunFiles:
        """Return what the files of the run say now."""
        with self._lock:
            return self._reader.read()

    def log_lines(self, process: str, level: str) -> list[dict[str, str]]:
        """Return the newest lines of the logs, merged by time."""
        with self._lock:
            return self._logs.lines(process=process, level=level)

    def catch_up(self) -> None:
        """Read what is new in the journal, for a short time."""
        if self._filler is not None and self._filler.is_alive():
            return
        until = time.monotonic() + CATCH_UP_S
        while self._advance() and time.monotonic() < until:
            pass

    def page(self, name: str, make: Callable[[RunFiles, JournalIndex], Any]) -> Any:
        """Return a page of the whole index; it is made anew if the journal or the metrics have grown.

        A page that took long is given again for some times as long, so that looking takes little from a run.
        """
        files = self.files()
        self.catch_up()
        with self.index.lock:
            self.columns.refresh(files.config)
            self.annotations.refresh()
            seen = (self.index.changes, files.steps.rows, self.annotations.changes)
            before = self._pages.get(name)
            now = time.monotonic()
            if before is None or (before.seen != seen and now > before.fresh_until):
                made = make(files, self.index)
                took = time.monotonic() - now
                before = self._pages[name] = _Page(seen, now + self._rest * took, made)
            return {**before.made, "progress": asdict(self.index.progress)}

    def words(self, files: RunFiles) -> Words:
        """Return the texts of tokens. A tokenizer that was not found is looked for again."""
        if self._words is None or not self._words.known:
            self._words = open_words(self.folder, files.config, known_text(files.samples, self.index))
        return self._words

    def row(self, trajectory: str) -> Row:
        """Return a trajectory.

        Raises:
            NotKept: the journal does not have it, and neither have the annotations.
        """
        row = self.index.by_id.get(trajectory)
        if row is not None:
            return row
        if (record := self.annotations.of_file(trajectory)) is not None:
            return row_of_file(record)
        progress = self.index.progress
        if not progress.whole:
            raise NotKept(f"trajectory {trajectory[:80]!r} is not read yet; the journal is still being read")
        if progress.deleted_below:
            until = progress.deleted_until_step
            when = "" if until is None else f" at step {until}"
            raise NotKept(
                f"trajectory {trajectory[:80]!r} is not there; files of the journal were deleted{when}: keep more with "
                "broker.journal.keep_bytes"
            )
        raise NotKept(f"the journal has no trajectory {trajectory[:80]!r}")


class Questions:
    """All runs that are shown, and the answers to questions about them.

    Args:
        folders: run folders, each of them there.
        rest: see `RunView`.
    """

    def __init__(self, folders: Sequence[Path], rest: float = REST) -> None:
        self.runs: dict[str, RunView] = {}
        for folder in folders:
            name = base = folder.resolve().name
            count = 1
            while name in self.runs:
                count += 1
                name = f"{base} ({count})"
            self.runs[name] = RunView(folder, name, rest)

    def start(self) -> None:
        """Begin to read the journals."""
        for run in self.runs.values():
            run.start()

    def close(self) -> None:
        """End the threads."""
        for run in self.runs.values():
            run.close()

    def ask(self, name: str, given: Question) -> dict[str, Any]:
        """Answer a question.

        Args:
            name: one of `ANSWERS`.
            given: parameters of the address.

        Raises:
            BadQuestion: there is no such question, or a parameter has a value that it cannot have.
            NotKept: what it names is not there.
        """
        if name == "runs":
            return {"runs": [_entry(run) for run in self.runs.values()]}
        if name == "differences":
            return self._differences(given)
        if name == "docs":
            return docs_page(given.get("page", ""))
        answer = ANSWERS.get(name)
        if answer is None:
            raise BadQuestion(f"there is no question {name[:40]!r}")
        return answer(self.run(given), given)

    def run(self, given: Question) -> RunView:
        """Return the run that the parameters name, or the only one.

        Raises:
            NotKept: there is no such run.
        """
        name = given.get("run") or next(iter(self.runs))
        if name not in self.runs:
            raise NotKept(f"there is no run {name[:80]!r} here; start `offbeat view` with its folder, too")
        return self.runs[name]

    def _differences(self, given: Question) -> dict[str, Any]:
        names = [name for name in given.get("runs", "").split(",") if name] or list(self.runs)
        runs = [self.run({"run": name}) for name in names[:8]]
        for run in runs:
            run.catch_up()
        page = differences_page([run.files() for run in runs], [run.index for run in runs])
        if task := given.get("task"):
            number_ = _integer(given, "task")
            page["task"] = task
            page["answers"] = [_answers(run, number_) for run in runs]
        return {**page, "runs": [run.name for run in runs]}


def docs_page(name: str) -> dict[str, Any]:
    """Return a page of the documentation as it was written.

    Args:
        name: its path below docs/; an anchor behind it is left alone.

    Raises:
        NotKept: there is no such page.

    Example:
        >>> docs_page("run/view.md#keys")["text"].splitlines()[0]
        '# Runs in the browser'
    """
    # The name is looked up in a list, so it cannot lead out of the folder.
    known = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
    page = name.partition("#")[0]
    if page not in known:
        raise NotKept(f"the documentation has no page {page[:80]!r}")
    return {"page": page, "text": known[page].read_text(encoding="utf-8")}


def _entry(run: RunView) -> dict[str, Any]:
    files = run.files()
    return {
        "run": run.name,
        "state": files.state,
        "sentence": sentence(files),
        "step": files.steps.last("step"),
        "progress": asdict(run.index.progress),
    }


def _answers(run: RunView, task: int) -> list[dict[str, Any]]:
    files = run.files()
    with run.index.lock:
        found = answers(run.index, files, task)
        words = run.words(files)
        for answer in found[:40]:
            try:
                pieces = read_pieces(run.index.folder, run.index.by_id[answer["trajectory"]])
            except NotKept as error:
                answer["why_missing"] = str(error)
                continue
            action = pieces.arrays["action_mask"] > 0
            answer["prompt"] = words.text(pieces.arrays["token_ids"][: int(action.argmax())].tolist())
            answer["text"] = words.text(pieces.arrays["token_ids"][action][:4_096].tolist())
    return found


def _integer(given: Question, name: str, default: int | None = None) -> int:
    text = given.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d{1,12}", text):
        raise BadQuestion(f"{name} is {text[:40]!r}; it takes a whole number")
    return int(text)


# --- answers ------------------------------------------------------------------------------------------------


def answer_overview(run: RunView, given: Question) -> dict[str, Any]:
    """Return the state of a run: sentence, alarms, evaluations, processes, settings."""
    return {**overview(run.files()), "run": run.name, "progress": asdict(run.index.progress)}


def answer_names(run: RunView, given: Question) -> dict[str, Any]:
    """Return the names of all metrics, with unit and meaning."""
    files = run.files()
    return {
        "names": [
            {"name": name, **meaning_of(name)} for name in sorted(files.steps.names) if name not in AXES
        ]
    }


AXES = ("step", "time")


def meaning_of(name: str) -> dict[str, str]:
    """Return unit and meaning of a metric, as docs/run/metrics.md has them; empty for an environment's own.

    Example:
        >>> meaning_of("learner/loss")["unit"], meaning_of("env/anything")["meaning"]
        ('loss', 'what the environment reports')
    """
    gauge: Gauge | None
    role, _, rest = name.partition("/")
    if name.startswith(ENV):
        return {"unit": "", "meaning": "what the environment reports"}
    if name.startswith((REWARD, HELDOUT_REWARD)):
        return {"unit": "reward", "meaning": "mean of this reward, without its weight"}
    if role == "broker":
        gauge = BROKER.get(rest)
    elif role in BY_ROLE and rest in BY_ROLE[role]:
        gauge = BY_ROLE[role][rest]
    else:
        try:
            gauge = declared(name)
        except KeyError:
            gauge = None
    return {"unit": "", "meaning": ""} if gauge is None else {"unit": gauge.unit, "meaning": gauge.meaning}


def answer_metrics(run: RunView, given: Question) -> dict[str, Any]:
    """Return columns of metrics by step: those whose names are given, separated by commas.

    An answer has a mark. Whoever gives it again as ``since`` gets only the rows behind it, if all rows are shown.
    """
    files = run.files()
    steps = files.steps
    names = [name for name in given.get("names", "").split(",") if name][:MAX_NAMES]
    every = -(-steps.rows // MAX_POINTS) or 1
    # The newest point is always among them.
    first = (steps.rows - 1) % every if steps.rows else 0
    since, _, rows = given.get("since", "").partition(".")
    known = every == 1 and since == str(files.beginnings) and re.fullmatch(r"\d{1,9}", rows)
    if known and int(rows) <= steps.rows:
        first = int(rows)
    else:
        known = None
    found = {
        name: [number(value) for value in steps[name][first::every]]
        for name in (*AXES, *names)
        if name in steps
    }
    return {
        "columns": found,
        "meanings": {} if known else {name: meaning_of(name) for name in names},
        "since": given["since"] if known else "",
        "mark": f"{files.beginnings}.{steps.rows}",
    }


def answer_samples(run: RunView, given: Question) -> dict[str, Any]:
    """Return the samples of a learner step, and of the evaluation after it; without a step, the newest."""
    samples = run.files().samples
    if given.get("step"):
        step = _integer(given, "step")
        samples = [sample for sample in samples if sample.step == step]
    return {
        "samples": [_sample(sample, run) for sample in samples[-40:]],
        "steps": sorted({sample.step for sample in run.files().samples}),
    }


def _sample(sample: Sample, run: RunView) -> dict[str, Any]:
    rows = [row for row in run.index.groups.get(sample.group, ()) if row.task == sample.task]
    return {
        "step": sample.step,
        "split": sample.split,
        "env": sample.env,
        "task": sample.task,
        "group": sample.group,
        "evaluation": sample.evaluation,
        "chosen": sample.chosen,
        "parts": [{"kind": part.kind, "text": part.text, "tokens": part.tokens} for part in sample.parts],
        "rewards": {name: number(value) for name, value in sample.rewards.items()},
        "return": number(sample.return_),
        "advantage": sample.advantage,
        "versions": None if sample.version_min is None else [sample.version_min, sample.version_max],
        "lag": sample.lag,
        "end": sample.end,
        "failure": sample.failure,
        "correct": sample.correct,
        "answer": getattr(sample, "answer", None),
        "target": getattr(sample, "target", None),
        "trajectory": rows[-1].trajectory if rows else None,
    }


def answer_logs(run: RunView, given: Question) -> dict[str, Any]:
    """Return the newest lines of the logs, merged by time."""
    lines = run.log_lines(given.get("process", ""), given.get("level", ""))
    text, count = given.get("text", "")[:200], _integer(given, "count", LOG_LINES)
    lines = [line for line in lines if text in line["text"]] if text else lines
    return {"lines": lines[-max(1, min(count, LOG_LINES)) :]}


def answer_ledger(run: RunView, given: Question) -> dict[str, Any]:
    """Return what became of every token."""
    return dict(run.page("ledger", partial(ledger_page, kept=run.annotations, columns=run.columns)))


def answer_staleness(run: RunView, given: Question) -> dict[str, Any]:
    """Return trained tokens by lag."""
    return dict(run.page("staleness", partial(staleness_page, kept=run.annotations)))


def answer_timeline(run: RunView, given: Question) -> dict[str, Any]:
    """Return where the time of the roles went."""
    return dict(run.page("timeline", timeline_page))


def answer_batch(run: RunView, given: Question) -> dict[str, Any]:
    """Return the trajectories of a learner step with their times."""
    files = run.files()
    run.catch_up()
    with run.index.lock:
        newest = max((commit.step for commit in run.index.commits if commit.version >= 0), default=0)
        step = _integer(given, "step", newest)
        return batch_page(files, run.index, step, lambda row: _times(run.index, row))


def _times(index: JournalIndex, row: Row) -> list[dict[str, Any]]:
    try:
        return turn_times(read_pieces(index.folder, row).segments)
    except (NotKept, JournalError):
        return []


def answer_table(run: RunView, given: Question) -> dict[str, Any]:
    """Return a page of the table of trajectories."""
    files = run.files()
    run.catch_up()
    with run.index.lock:
        run.columns.refresh(files.config)
        page = table_page(run.index, run.columns, files.config, files.samples, given)
        return {**page, "choices": choices(run.columns), "progress": asdict(run.index.progress)}


def answer_trajectory(run: RunView, given: Question) -> dict[str, Any]:
    """Return one trajectory with all its tokens."""
    files = run.files()
    run.catch_up()
    with run.index.lock:
        row = run.row(given.get("id", ""))
        pieces = read_pieces(run.index.folder, row)
        words = run.words(files)
        return inspector_page(run.index, row, pieces, words, files.config, files.samples, run.annotations)


ANSWERS: dict[str, Callable[[RunView, Question], dict[str, Any]]] = {
    "overview": answer_overview,
    "names": answer_names,
    "metrics": answer_metrics,
    "samples": answer_samples,
    "logs": answer_logs,
    "ledger": answer_ledger,
    "staleness": answer_staleness,
    "timeline": answer_timeline,
    "batch": answer_batch,
    "table": answer_table,
    "trajectory": answer_trajectory,
}
"""Questions about one run."""
