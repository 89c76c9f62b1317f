"""Write and read constraint files: the exact versions of everything that an installation of offbeat has.

``python -m tests.constraints constraints/cpu.txt cpu dev`` writes the file from this environment; `make constraints`
calls it. The file has names and versions and nothing else, above all no address of a package index.
"""

import importlib.metadata as metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
HEAD = """\
# Exact versions of all packages of `pip install -e '.[{extras}]'` on Linux, which `make setup` installs.
# Written by `make constraints`. Libraries that build on offbeat follow the ranges in pyproject.toml, not this file.
"""
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


def main() -> None:
    path, *extras = sys.argv[1:]
    versions = closure(extras)
    text = HEAD.format(extras=",".join(extras)) + "".join(f"{n}=={versions[n]}\n" for n in sorted(versions))
    Path(path).write_text(text)


if __name__ == "__main__":
    main()
