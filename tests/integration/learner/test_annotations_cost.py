"""Test that what the learner notes of each token takes next to nothing of a step's processor time."""

import time

import numpy as np
import pytest

from learner.annotation_files import read_index
from learner.annotations import AnnotationLog
from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from tests.trajectories import make_trajectory


def spent(what, *given, **named):
    """Return the processor time of a call, and its value. Other work on the machine adds none."""
    begun = time.process_time()
    value = what(*given, **named)
    return time.process_time() - begun, value


# An update is only a part of a step. Annotations took 0.03 and 0.0004 of one, and ten times that is a fault.
@pytest.mark.parametrize(("rows", "actions", "times", "most"), [(32, 8, 5, 0.3), (1, 16_384, 1, 0.01)])
def test_annotations_cost_little_beside_an_update(model, engines, tmp_path, rows, actions, times, most):
    config = LearnerConfig(group_size=1, batch_trajectories=rows, micro_batch_tokens=rows * (actions + 4))
    engine = TrainingEngine(config, model=model, total_steps=9, seed=5)
    engines.append(engine)
    batch = [
        make_trajectory(f"t{n}", group=f"g{n // 4}", actions=actions, reward=float(n % 2), logp=-np.log(48))
        for n in range(rows)
    ]
    annotations, updates, costs = AnnotationLog(tmp_path, mib=64, floats="float16"), [], []

    def annotate(step, report):
        annotations.step(step, 0, batch, report.tokens, applied=True, untrained={})
        assert annotations.settle()

    for step in range(1, times + 1):
        took, report = spent(engine.update, batch, current_version=0)
        updates.append(took)
        costs.append(spent(annotate, step, report)[0])
    annotations.close()
    assert [of.rows for of, _ in read_index(tmp_path)] == [rows * actions] * times
    print(f"{rows} rows of {actions} tokens: update {min(updates):.4f} s, annotations {min(costs):.5f} s")
    assert min(costs) < most * min(updates)
