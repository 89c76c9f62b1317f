"""Test that what the learner notes of each token takes next to nothing of a step's processor time."""

import sys
import threading
import time

import numpy as np
import pytest

from learner import annotations as module
from learner.annotation_files import read_index
from learner.annotations import AnnotationLog, rows_of
from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from tests.trajectories import batch_of, make_trajectory
from tests.unit.learner.test_annotations import numbers_of


def rows_with(actions, rows):
    return [
        make_trajectory(f"t{n}", group=f"g{n // 4}", actions=actions, reward=float(n % 2), logp=-np.log(48))
        for n in range(rows)
    ]


# An update is only a part of a step. Annotations took 0.01 and 0.0003 of one, and ten times that is a fault.
@pytest.mark.parametrize(("rows", "actions", "times", "most"), [(32, 8, 32, 0.1), (1, 16_384, 1, 0.01)])
def test_annotations_cost_little_beside_an_update(
    model, engines, tmp_path, monkeypatch, rows, actions, times, most
):
    # Steps of milliseconds are written together however slow the machine is; the first one is written at once.
    monkeypatch.setattr(module, "GATHER_S", 600.0)
    config = LearnerConfig(group_size=1, batch_trajectories=rows, micro_batch_tokens=rows * (actions + 4))
    engine = TrainingEngine(config, model=model, total_steps=40, seed=5)
    engines.append(engine)
    batch, annotations = rows_with(actions, rows), AnnotationLog(tmp_path, mib=64, floats="float16")

    def annotated(step):
        """Update and annotate, and return the processor time of both in this thread. Other work adds none."""
        begun = time.thread_time()
        tokens = engine.update(batch, current_version=0).tokens
        updated = time.thread_time()
        annotations.step(step, 0, batch, tokens, applied=True, untrained={})
        return updated - begun, time.thread_time() - updated

    annotated(1)
    assert annotations.settle()
    (thread,) = (one for one in threading.enumerate() if one.name == "annotations")
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    updates, handed_over = zip(*(annotated(step) for step in range(2, times + 2)), strict=True)
    assert annotations.settle()
    cost = (sum(handed_over) + time.clock_gettime(clock) - before) / times
    annotations.close()
    assert [of.rows for of, _ in read_index(tmp_path)] == [rows * actions] * (times + 1)
    update = sum(updates) / times
    print(
        f"{rows} rows of {actions} tokens: update {update:.4f} s, annotations {cost:.6f} s, {cost / update:.5f}"
    )
    assert cost < most * update


def calls_of(rows, steps, actions):
    """Return the number of calls that make the rows of some steps."""
    batch = rows_with(actions, rows)
    numbers = [numbers_of(batch_of(batch)) for _ in range(steps)]
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        made, _ = rows_of(batch * steps, numbers, "float16")
    finally:
        sys.setprofile(None)
    assert len(made) == rows * actions * steps
    return calls


def test_steps_that_are_written_together_share_most_of_their_calls():
    """Calls and not seconds are counted, so that no machine is too slow for it."""
    alone, longer = calls_of(32, 1, 8), calls_of(32, 1, 80)
    assert alone == longer, "tokens cost no call"
    together = calls_of(32, 16, 8) / 16
    print(f"calls of a step of 32 rows: {alone} alone, {together:.0f} with 15 others")
    assert together < 0.8 * alone
    per_row = (calls_of(64, 1, 8) - alone) / 32
    assert per_row <= 10
