"""The image has every package of the product, the user of the pods, and what their commands name."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from launch.fleet import kubernetes

ROOT = Path(__file__).resolve().parents[3]
FILE = (ROOT / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPT = (ROOT / "launch" / "scripts" / "image.sh").read_text()


def test_every_package_is_copied_and_nothing_else_by_default():
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    assert ignored[0] == "*"
    copied = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied
    assert {"pyproject.toml", PROJECT["project"]["readme"], "constraints"} <= copied


def test_the_image_has_the_user_and_the_programs_of_the_pods():
    assert f"USER {kubernetes.USER}:{kubernetes.USER}" in FILE
    assert f"WORKDIR {kubernetes.WORK_FOLDER}" in FILE
    assert re.search(r"^ +ca-certificates .*\btini\b", FILE, re.MULTILINE)
    assert "PATH=/opt/offbeat/bin:" in FILE


def test_the_builds_are_extras_with_constraints():
    extras = re.findall(r'"\$\{source\}\[(\w+)\]"', SCRIPT)
    assert set(extras) == {"cpu", "gpu", "tasks"} <= set(PROJECT["project"]["optional-dependencies"])
    named = set(re.findall(r'"\$source/(constraints/\w+\.txt)"', SCRIPT))
    assert all((ROOT / name).exists() for name in named)
    assert len(named) == 2


@pytest.mark.parametrize("name", ["image.sh", "base_image.sh"])
def test_the_shell_reads_the_scripts(name):
    done = subprocess.run(["sh", "-n", ROOT / "launch" / "scripts" / name], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
