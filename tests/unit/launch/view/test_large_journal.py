"""Test that a large journal is read in bounded memory and filtered fast. `make soak` runs it."""

import gc
import time
import tracemalloc

import pytest

from launch.view.questions import Questions
from tests.view_runs import Maker

GROUPS = 2_500
SIZE = 8


@pytest.mark.soak
def test_twenty_thousand_trajectories_are_filtered_in_a_moment(tmp_path):
    maker = Maker(tmp_path / "large")
    for number in range(GROUPS):
        maker.group(SIZE)
        if number % 16 == 15:
            maker.train()
            maker.checkpoint()
    folder = maker.close()
    tracemalloc.start()
    questions = Questions([folder], rest=0.0)
    questions.runs["large"].read_all()
    bytes_a_row = tracemalloc.get_traced_memory()[0] / (GROUPS * SIZE)
    tracemalloc.stop()
    gc.freeze()
    assert questions.ask("table", {})["total"] == GROUPS * SIZE
    # 100,000 rows then take 200 MB at most.
    assert bytes_a_row < 2_000
    for given in (
        {"reward_min": "0.5"},
        {"sort": "-reward"},
        {"uniform": "true"},
        {"outcome": "trained", "lag_min": "0"},
    ):
        # A fifth of the limit for 100,000. CPU time, because the machine may have other work.
        begun = time.process_time()
        questions.ask("table", given)
        assert time.process_time() - begun < 0.06, given
    gc.unfreeze()
