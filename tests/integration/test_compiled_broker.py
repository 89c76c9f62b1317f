"""The broker as C extensions: the same decisions, by the same tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import compiled

ROOT = Path(__file__).parents[2]
SAME = """
import sys
from launch import compiled
assert compiled.use()
import broker.service, broker.units
assert broker.units.__file__.startswith(str(compiled.folder())), broker.units.__file__
assert not compiled.use()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
TESTS = [
    "tests/property/test_broker_machine.py",
    "tests/unit/test_broker_deliveries.py",
    "tests/unit/test_broker_lineage.py",
    "tests/unit/test_broker_peers.py",
    "tests/unit/test_broker_recovery.py",
    "tests/unit/test_broker_segments.py",
    "tests/unit/test_broker_tasks.py",
    "tests/unit/test_broker_desk.py",
    "tests/integration/test_broker_service.py",
]
PATCHED = "breaks_the_books or broke_the_books or cannot_go_on or do_not_have_is_not_written"
"""Tests that replace functions of compiled modules and classes, which calls between compiled ones do not see."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_compiled_broker_decides_as_the_one_it_was_made_from(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not compiled.use(), "nothing is compiled here yet"
    made = compiled.make()
    assert made == compiled.folder()
    assert compiled.make() == made, "what is there is not made again"
    command = [sys.executable, "-c", SAME, "-q", "-p", "no:cacheprovider", "-k", f"not ({PATCHED})", *TESTS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
