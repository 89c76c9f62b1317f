"""Put the figures of benchmarks/results into the pages that show them.

    python -m benchmarks.page [PAGE ...] [--measure NAME ...]

A page has a place for each table. This program fills the place from benchmarks/results/NAME.json::

    <!-- results: NAME.TABLE -->
    <!-- end -->

A table is followed by the command, the day, the commit and the machine of the run that wrote the file. If there
is no such file, the page says that nothing was measured, and names the command. An experiment that is closed has
results, but no program in this tree; its tables name the commit that has it. `<!-- headlines -->` is a place for one
table of the ratios that all results give. `--measure` runs benchmarks first, one after the other.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = {
    "adapters": "adapters",
    "async_vs_sync": "async_vs_sync --arms heavy tools --seeds 0",
    "broker": "broker --sizes '16 KB' --repetitions 3",
    "claims": "claims --claims GDPO DVAO G2RPO OTC GiGPO --plot docs/images/claims.png",
    "claims-doors": "claims --claims GiGPO-doors --plot docs/images/claims-doors.png",
    "claims-families": "claims --claims GHPO ARPO-branch --plot docs/images/claims-families.png",
    "claims-instructions": "claims --claims INSPO --seeds 1 2 3 4 5",
    "elastic": "elastic --seconds 45 --every 15",
    "generation": "generation --repetitions 5",
    "generation-smollm2": "generation --size smollm2 --requests 128 --repetitions 5",
    "gpu/fused": "gpu --quick --steps load learner --models 0.6B",
    "gpu/before": "gpu --quick --steps ceilings publish learner --models 0.6B 1.7B 4B",
    "gpu/fused-larger": "gpu --quick --steps learner --models 1.7B",
    "harnesses": "harnesses",
    "lag_price": "lag_price --tasks uniform heavy --seeds 0 --minutes 0.5 --plot docs/images/lag_price.png",
    "learner": "learner --rounds 5",
    "learner-shared": "learner --sizes 1M 10M 135M --lengths 'one prompt' 'three turns' --rounds 3",
    "plan-smollm2": "plan recipes/smollm2.toml --calibrate 60 --seconds 120",
    "ratios": "ratios",
    "frontier": "frontier results --plot docs/images/staleness.png",
    "versus_trl-easy-sums": "versus_trl --tasks easy-sums --seeds 0 1 2 3 4 5 6 7",
    "view-beside": "view beside",
    "view-large": "view large",
    "weights": "weights --repetitions 5",
}
"""Program and arguments that write benchmarks/results/NAME.json, by NAME, which may have a folder."""
CAMPAIGNS = ("harnesses",)
"""Names in `COMMANDS` whose program is in tests/campaigns."""
CLOSED = {
    "agent_cost": "d2d69aab",
    "agent_learning": "d2d69aab",
    "endtoend": "d2d69aab",
    "every_way": "d2d69aab",
    "every_way-methods": "d2d69aab",
}
"""Results of experiments that are closed, by NAME: the last commit that has the program."""
_PLACE = re.compile(r"<!-- results: ([\w/-]+)\.([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
_HEADLINES = re.compile(r"<!-- headlines -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str, results: Path = RESULTS) -> str:
    """Return the page with each place filled anew from the JSON files.

    Raises:
        KeyError: the page names a benchmark that is not in `COMMANDS`, or a table that its file does not have.
    """
    page = _PLACE.sub(lambda place: _table(place[1], place[2], results), page)
    return _HEADLINES.sub(lambda _: f"<!-- headlines -->\n{_headlines(results)}\n<!-- end -->", page)


def command(name: str) -> str:
    """Return the command line that writes benchmarks/results/NAME.json."""
    folder = "tests.campaigns" if name in CAMPAIGNS else "benchmarks"
    return f"python -m {folder}.{COMMANDS[name]} --json benchmarks/results/{name}.json"


def _table(name: str, table: str, results: Path) -> str:
    path = results / f"{name}.json"
    place = f"<!-- results: {name}.{table} -->"
    if not path.exists():
        return f"{place}\nNot measured on this version. `{command(name)}` measures it.\n<!-- end -->"
    found = json.loads(path.read_text(encoding="utf-8"))
    if table not in found["tables"]:
        raise KeyError(
            f"benchmarks/results/{name}.json has no table {table!r}, but {sorted(found['tables'])}"
        )
    return f"{place}\n{found['tables'][table]}\n\n{_source(name, found)}\n<!-- end -->"


def _source(name: str, found: dict[str, Any]) -> str:
    source = f"`{found['command']}`, {found['date']}, commit {found['commit']}, {found['machine']}."
    return (
        f"{source} The experiment is closed: commit {CLOSED[name]} has its program."
        if name in CLOSED
        else source
    )


def _headlines(results: Path) -> str:
    rows, machines = [], set()
    for path in sorted(results.rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rows += [f"| {' | '.join(headline)} |" for headline in found.get("headlines", [])]
        machines |= {found["machine"]} if found.get("headlines") else set()
    if not rows:
        return "No ratio was measured on this version."
    head = ["| what Offbeat does | compared with | ratio |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", *(f"Measured on {machine}." for machine in sorted(machines))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--measure", nargs="+", choices=sorted(COMMANDS), default=[], metavar="NAME")
    arguments = parser.parse_args()
    for name in arguments.measure:
        subprocess.run([sys.executable, *shlex.split(command(name))[1:]], cwd=ROOT, check=True)
    for path in arguments.pages:
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
