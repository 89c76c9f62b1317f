"""Puts the figures of benchmarks/results into the pages that show them.

    python -m benchmarks.page [PAGE ...]

A page has a place for each table, which this program fills from benchmarks/results/NAME.json::

    <!-- results: NAME.TABLE -->
    <!-- end -->

Each table is followed by the command, the day, the commit and the machine of the run that wrote the file.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PLACE = re.compile(r"<!-- results: ([\w-]+)\.([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, results: Path = RESULTS) -> str:
    """Return the page with each table made anew from its JSON file.

    Raises:
        FileNotFoundError: the page names results that no benchmark has written.
        KeyError: the file has no such table; the text names both.
    """
    return _PLACE.sub(lambda place: _table(place[1], place[2], results), page)


def _table(name: str, table: str, results: Path) -> str:
    found = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    if table not in found["tables"]:
        raise KeyError(
            f"benchmarks/results/{name}.json has no table {table!r}, but {sorted(found['tables'])}"
        )
    source = f"`{found['command']}`, {found['date']}, commit {found['commit']}, {found['machine']}."
    return f"<!-- results: {name}.{table} -->\n{found['tables'][table]}\n\n{source}\n<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    for path in parser.parse_args().pages:
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
