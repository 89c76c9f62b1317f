"""Every TOML file of this repository that is a run file loads."""

from pathlib import Path

import pytest

from launch.run_file.load import load

ROOT = Path(__file__).parents[4]
FILES = sorted(
    path
    for folder in ("benchmarks", "recipes", "tests/campaigns")
    for path in (ROOT / folder).rglob("*.toml")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_run_file_loads(path):
    assert load(path).run.name


def test_the_benchmarks_have_run_files():
    assert {"async_vs_sync", "faults", "truncation", "versus_trl"} <= {path.stem for path in FILES}
