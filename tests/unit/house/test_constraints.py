"""The constraint file fits pyproject.toml, has nothing but names and versions, and is what is installed."""

import sys
from pathlib import Path

import pytest

from tests.constraints import closure, direct, normal, read

ROOT = Path(__file__).parents[3]
FILE = ROOT / "constraints" / "cpu.txt"
EXTRAS = ["cpu", "dev"]
WITHOUT_VERSION = {"torchvision", "torchaudio", "torchcodec"}
"""Packages that install.sh takes out again."""


def test_the_file_has_names_and_versions_alone():
    assert len(read(FILE)) > 150
    assert not [line for line in FILE.read_text().splitlines() if "://" in line or line.startswith("-")]


@pytest.mark.parametrize(
    "line", ["--index-url https://index.example/simple", "torch @ https://a.example/t.whl", "torch>=2"]
)
def test_a_line_with_a_host_or_a_range_is_refused(line, tmp_path):
    (tmp_path / "c.txt").write_text(f"# head\nnumpy==2.3.5\n{line}\n")
    with pytest.raises(ValueError, match="is no NAME==VERSION"):
        read(tmp_path / "c.txt")


def test_each_version_is_within_the_range_of_pyproject():
    versions = read(FILE)
    asked = [r for r in direct(EXTRAS) if normal(r.name) not in WITHOUT_VERSION]
    assert len(asked) > 30
    missing = [str(r) for r in asked if normal(r.name) not in versions]
    assert not missing, "install them and run `make constraints`"
    outside = [str(r) for r in asked if not r.specifier.contains(versions[normal(r.name)], prereleases=True)]
    assert not outside, "run `make constraints`"


def test_what_is_installed_is_what_the_file_says():
    said = Path(sys.prefix) / ".constraints"
    if not said.exists() or said.read_text().strip() == "none":
        pytest.skip("this environment was not made with the constraints")
    versions, installed = read(FILE), closure(EXTRAS)
    assert {n: v for n, v in installed.items() if versions.get(n) != v} == {}, "run `make constraints`"
