"""Start two learner ranks under torchrun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = Path(__file__).with_name("two_ranks.py")
COMMAND = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--")


def run_two_ranks(model: str, folder: Path, cases: Sequence[str], timeout_s: float) -> Path:
    """Let two ranks of `two_ranks` compute all cases. Return the folder with their results."""
    done = subprocess.run(
        [*COMMAND, str(PROGRAM), model, str(folder), *cases],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder
