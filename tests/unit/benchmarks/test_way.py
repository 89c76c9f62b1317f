"""Test that the way of a segment and of a setting is counted, and that neither gets longer unnoticed."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import way

MOST_FILES = 48
"""Files from the broker's socket to the optimizer's step: 47, and one that a message in between may enter. The goal is
40."""
MOST_FILES_OF_A_SETTING = 8
"""Files that know a setting on its way."""


@pytest.mark.slow
def test_the_way_of_a_segment_from_the_socket_to_its_gradient_is_short(tmp_path):
    found = way.with_sockets(tmp_path)
    assert len(found.files_before_step) <= MOST_FILES, found.files_before_step
    # The ends of the way, and a place in its middle: nothing is left out.
    entered = {function for _, function in found.functions}
    assert {"LeanRouter.recv_multipart", "BrokerSession.receive_messages", "TrainingEngine.update"} <= entered
    assert "OutputCommit.tick" not in entered
    assert 0 < found.before_step < len(found.functions), "the report follows the optimizer's step"


@pytest.mark.slow
def test_the_way_without_sockets_is_a_part_of_it(tmp_path):
    (tmp_path / "without").mkdir()
    found = way.without_sockets(tmp_path / "without")
    assert "protocol/sockets.py" not in found.files
    assert "broker/core/dispatch.py" in found.files


@pytest.mark.slow
def test_few_files_know_a_setting_on_its_way_to_the_formula(tmp_path):
    found = way.setting(tmp_path)
    assert len(found.files) <= MOST_FILES_OF_A_SETTING, found.files
    assert found.files["learner/algorithms/surrogates.py"] == "gets the number"


def test_the_program_says_what_it_counts():
    said = subprocess.run(
        [sys.executable, "-m", "benchmarks.way", "--help"],
        cwd=Path(way.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=True,
    )
    assert "from the broker's socket to its gradient" in " ".join(said.stdout.split())
