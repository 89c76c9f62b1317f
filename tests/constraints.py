"""Write and read constraint files: the exact versions of everything that an installation of offbeat has.

``python -m tests.constraints constraints/cpu.txt cpu dev`` writes the file from this environment. With ``--resolve``
pip resolves the requirements anew and installs nothing, so that a host without a GPU writes constraints/gpu.txt, and an
environment without trackers writes constraints/trackers.txt. `make constraints` calls all three. A file has names and
versions and nothing else, above all no address of a package index.
"""

import argparse
import importlib.metadata as metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
HEAD = """\
# Exact versions of all packages of `pip install -e '.[{extras}]'` on Linux, which `make {target}` installs{where}.
# Written by `make constraints`. Libraries that build on offbeat follow the ranges in pyproject.toml, not this file.
"""
WITH_GPU = " where it finds an NVIDIA driver (x86-64, Python 3.11)"
RESOLVE_S = 1_800.0
LINE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*==[0-9][\w.+]*")


def normal(name: str) -> str:
    """Return a package's name as all indices write it.

    Example:
        >>> normal("Farama_Notifications")
        'farama-notifications'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def own(extra: str, project: dict) -> Iterator[Requirement]:
    """Yield the requirements of an extra of offbeat, "" for those of all, with the extras in it taken apart."""
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    for requirement in map(Requirement, texts):
        if normal(requirement.name) == "offbeat":
            for inner in requirement.extras:
                yield from own(inner, project)
        else:
            yield requirement


def direct(extras: list[str]) -> list[Requirement]:
    """Return what pyproject.toml asks for, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [requirement for extra in ("", *extras) for requirement in own(extra, project)]


def closure(extras: list[str]) -> dict[str, str]:
    """Return name and version of each installed package that offbeat needs with these extras, directly or not."""
    found, ahead = dict[str, str](), direct(extras)
    seen = set[tuple[str, frozenset[str]]]()
    while ahead:
        requirement = ahead.pop()
        key = (normal(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            installed = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            # install.sh takes out packages that need CUDA.
            continue
        found[key[0]] = installed.version
        for text in installed.requires or ():
            inner = Requirement(text)
            wanted = ({"extra": extra} for extra in ("", *requirement.extras))
            if inner.marker is None or any(inner.marker.evaluate(extra) for extra in wanted):
                ahead.append(inner)
    return found


def read(path: Path) -> dict[str, str]:
    """Return the versions of a constraint file by name.

    Raises:
        ValueError: a line is no name with a version.
    """
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    if wrong := [line for line in lines if not LINE.fullmatch(line)]:
        raise ValueError(f"{path}: {wrong[0]!r} is no NAME==VERSION")
    return dict(line.split("==") for line in lines)


def resolved(extras: list[str]) -> dict[str, str]:
    """Return name and version of each package that pip would install with these extras into an empty environment.

    The build of torch for CPUs, which `make setup` installs, is no candidate: pip would take it for a newer version.

    Raises:
        subprocess.CalledProcessError: the requirements cannot be had; pip says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        without, report = Path(folder) / "without.txt", Path(folder) / "report.json"
        without.write_text(f"torch!={read(ROOT / 'constraints' / 'cpu.txt')['torch']}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run"]
        pip += ["--ignore-installed", "--report", str(report), "--constraint", str(without)]
        subprocess.run([*pip, f"{ROOT}[{','.join(extras)}]"], check=True, timeout=RESOLVE_S)
        return of_report(json.loads(report.read_text()))


def of_report(report: dict) -> dict[str, str]:
    """Return the versions by name of an installation report of pip, without offbeat itself.

    Example:
        >>> of_report({"install": [{"metadata": {"name": n, "version": "1.0"}} for n in ("PyYAML", "offbeat")]})
        {'pyyaml': '1.0'}
    """
    found = (one["metadata"] for one in report["install"])
    versions = {normal(one["name"]): one["version"] for one in found}
    versions.pop("offbeat", None)
    return versions


def written(extras: list[str], versions: dict[str, str]) -> str:
    """Return the text of a constraint file."""
    head = HEAD.format(
        extras=",".join(extras),
        target="setup" if "dev" in extras else "trackers",
        where=WITH_GPU if "gpu" in extras else "",
    )
    return head + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("extras", nargs="+")
    parser.add_argument("--resolve", action="store_true")
    arguments = parser.parse_args()
    versions = resolved(arguments.extras) if arguments.resolve else closure(arguments.extras)
    arguments.path.write_text(written(arguments.extras, versions))


if __name__ == "__main__":
    main()
