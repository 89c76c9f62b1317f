"""The recorded run that is shipped with the package, so that one can look before one trains."""

import re
import zipfile
from pathlib import Path

DEMO = Path(__file__).parent / "demo.zip"
FILES = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "supervisor.json",
    "model/tokenizer.json",
)
"""Files of a run folder that a record keeps, beside its journal and the ends of its logs."""
LOG_BYTES = 24 << 10
_OWN_LINE = re.compile(rb"\d{4}-\d\d-\d\d ")
DATE = (2026, 1, 1, 0, 0, 0)
"""Date of the files in a record, so that equal runs make equal records."""


def record(folder: Path, out: Path) -> Path:
    """Write a record of a run that has ended: what `offbeat view` reads, and nothing secret."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def put(name: str, content: bytes) -> None:
            info = zipfile.ZipInfo(name, DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)

        for name in FILES:
            if (folder / name).is_file():
                put(name, (folder / name).read_bytes())
        for pattern in ("journal/journal-*.log", "annotations/*", "annotations*"):
            for path in sorted(folder.glob(pattern)):
                if path.is_file():
                    put(path.relative_to(folder).as_posix(), path.read_bytes())
        for path in sorted((folder / "logs").glob("*.log")):
            # Lines of libraries name folders of the machine that recorded the run.
            lines = [
                line
                for line in path.read_bytes()[-LOG_BYTES:].splitlines(keepends=True)
                if _OWN_LINE.match(line)
            ]
            put(f"logs/{path.name}", b"".join(line for line in lines if b"/" not in line))
    return out


def unpack(archive: Path, place: Path) -> Path:
    """Unpack a record into a run folder below a place; return the folder."""
    folder = place / "demo"
    with zipfile.ZipFile(archive) as opened:
        # The archive is the package's own; extractall also refuses names that lead out of the folder.
        opened.extractall(folder)
    # The summary has to be younger than the settings, as in a run that has ended.
    for name in FILES:
        if name != "summary.json" and (folder / name).exists():
            (folder / name).touch()
    if (folder / "summary.json").exists():
        (folder / "summary.json").touch()
    return folder
