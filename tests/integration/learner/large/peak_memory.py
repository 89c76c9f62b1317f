"""Program for torchrun: two ranks make three updates, and each writes the most memory that it ever held.

Usage: torchrun --nproc_per_node 2 -- tests/integration/learner/large/peak_memory.py MODEL OUT STAGE DTYPE
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from learner.settings.learner import LearnerConfig
from learner.update.engine import TrainingEngine
from tests.trajectories import make_batch_of_groups


def main(model, out, stage, dtype):
    config = LearnerConfig(processes=2, zero_stage=int(stage), dtype=dtype, micro_batch_tokens=64)
    engine = TrainingEngine(config, model=model, total_steps=10, seed=5)
    if engine.rank == 0:
        for _ in range(3):
            assert engine.update(make_batch_of_groups(2, 2), current_version=0).applied
        engine.close()
    else:
        engine.follow()
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    (Path(out) / f"{engine.rank}").write_text(str(int(peak) * 1024))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
