"""Writes a copy of the pages that opens without a server: assets in one script, and answers as scripts.

A page from file:// may neither load modules nor ask for data, but it may load plain scripts.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launch.errors import ConfigError, NotKept
from launch.view.inspector import inspector_page, read_pieces, row_of_file
from launch.view.questions import MAX_NAMES, Questions, RunView, docs_page
from launch.view.server import ASSETS
from launch.view.table import choices, row_of, selected, table_page

TRAJECTORIES = 1_000
"""Newest trajectories of each run that a copy has with their tokens."""
ROWS = 20_000
"""Newest trajectories of each run that a copy has in its table."""
BATCHES = 30
IN_FILE = 50
MODULES = (
    "dom.js", "data.js", "charts.js", "overview.js", "timeline.js", "ledger.js", "trajectories.js", "inspector.js",
    "staleness.js", "differences.js", "manual.js", "app.js",
)  # fmt: skip
"""Modules of the page, each behind those that it imports."""
_IMPORT = re.compile(r"^import (?:\{(.*?)\}|\* as (\w+)) from \"\./([\w-]+)\.js\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)


def export(questions: Questions, folder: Path) -> str:
    """Write a copy of all runs to a new or empty folder; return a line about it.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--export {folder}: is not empty; name a new folder")
    try:
        data = folder / "data"
        data.mkdir(parents=True)
        for run in questions.runs.values():
            run.read_all()
        _write(data, "runs", questions.ask("runs", {}))
        _write(data, "differences", questions.ask("differences", {}))
        for number, run in enumerate(questions.runs.values()):
            _write_run(data, number, run, questions)
        for name in ("app.css", "uplot.css", "uplot.js", "uplot-licence.txt", "icon.svg"):
            shutil.copyfile(ASSETS / name, folder / name)
        (folder / "app.js").write_text(in_one_script(), encoding="utf-8")
        page = (ASSETS / "index.html").read_text(encoding="utf-8")
        script = '<script src="app.js" type="module"></script>'
        start = '<script src="export.js" defer></script>\n<script src="app.js" defer></script>'
        (folder / "index.html").write_text(page.replace(script, start), encoding="utf-8")
        (folder / "export.js").write_text("window.OFFBEAT_EXPORT = { parts: {} };\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--export {folder}: {error.strerror or error}") from None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{folder / 'index.html'}: {len(questions.runs)} runs, {size / 1e6:.1f} MB; open it in a browser"


def batched(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield parts of a list of at most ``size`` items.

    Example:
        >>> list(batched(["a", "b", "c"], 2))
        [['a', 'b'], ['c']]
    """
    for first in range(0, len(names), size):
        yield names[first : first + size]


def _write(data: Path, name: str, answer: Any) -> None:
    # JSON is JavaScript, and in a file of its own no text in it can end the script.
    body = msgspec.json.encode(answer).decode().replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    (data / f"{name}.js").write_text(f'window.OFFBEAT_EXPORT.parts["{name}"] = {body};\n', encoding="utf-8")


def _write_run(data: Path, number: int, run: RunView, questions: Questions) -> None:
    def put(name: str, answer: Any) -> None:
        _write(data, f"{number}-{name}", answer)

    given = {"run": run.name}
    for name in ("overview", "names", "logs", "ledger", "staleness", "timeline"):
        put(name, questions.ask(name, given))
    found = questions.ask("overview", given)
    for finding in (*found["alarms"], *found["advice"]):
        page = docs_page(finding["docs"])
        _write(data, f"docs-{re.sub(r'[^a-zA-Z0-9_]', '-', page['page'])}", page)
    columns: dict[str, Any] = {"columns": {}, "meanings": {}}
    for names in batched(run.files().steps.names, MAX_NAMES):
        part = questions.ask("metrics", {**given, "names": ",".join(names)})
        columns["columns"] |= part["columns"]
        columns["meanings"] |= part["meanings"]
    put("metrics", columns)
    steps = questions.ask("samples", given)["steps"]
    of_steps = [questions.ask("samples", {**given, "step": str(step)})["samples"] for step in steps[-200:]]
    put("samples", {"steps": steps, "samples": [sample for of_step in of_steps for sample in of_step]})
    with run.index.lock:
        _write_trajectories(run, put)
    newest = questions.ask("batch", given)
    shown = newest["steps"][-BATCHES:]
    put("batch-newest", {**newest, "steps": shown})
    for step in shown:
        put(f"batch-{step}", {**questions.ask("batch", {**given, "step": str(step)}), "steps": shown})


def _write_trajectories(run: RunView, put: Callable[[str, Any], None]) -> None:
    """Write the table, and the tokens of the newest trajectories, some in each file."""
    files, index = run.files(), run.index
    columns = run.columns
    columns.refresh(files.config)
    rows = [index.rows[place] for place in selected(index, columns, {})[:ROWS].tolist()]
    page = {**table_page(index, columns, files.config, files.samples, {}), "choices": choices(columns)}
    put("table", {**page, "rows": [row_of(row, index, files.config) for row in rows]})
    words, names = run.words(files), dict[str, int]()
    parts: dict[int, dict[str, Any]] = {}
    newest = rows[:TRAJECTORIES]
    groups = dict.fromkeys(row.group for row in newest)
    newest += [row_of_file(record) for group in groups for record in run.annotations.of_files(group)]
    for row in newest:
        try:
            pieces = read_pieces(index.folder, row)
        except NotKept:
            continue
        place = names[row.trajectory] = len(names)
        parts.setdefault(place // IN_FILE, {})[row.trajectory] = inspector_page(
            index, row, pieces, words, files.config, files.samples, run.annotations
        )
    put("trajectories", names)
    for number, pages in parts.items():
        put(f"tokens-{number}", pages)


def in_one_script() -> str:
    """Return the modules of the page as one script: each a function that returns what it exports."""
    parts = ['"use strict";\n(() => {\nconst modules = {};\n']
    for name in MODULES:
        source = (ASSETS / name).read_text(encoding="utf-8")
        exported = _EXPORT.findall(source)
        body = _IMPORT.sub(_import, source)
        body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
        parts.append(
            f'modules["{name[:-3]}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();\n'
        )
    return "".join([*parts, "})();\n"])


def _import(match: re.Match[str]) -> str:
    names, whole, module = match.groups()
    left = f"const {whole}" if whole else f"const {{ {names.strip()} }}"
    return f'{left} = modules["{module}"];\n'
